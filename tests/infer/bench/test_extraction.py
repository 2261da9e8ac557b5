"""Test the extraction of programs from a chat model's answers against EvalPlus.

The expected programs are the output of EvalPlus's own sanitize.py (commit 26d6d00) on these answers.
"""

import pytest

from conf.text.rows import read_rows
from infer.bench import sandbox
from infer.bench.extraction import extract_program
from infer.bench.problems import (
    CHAT_STOP,
    Problem,
    humaneval_file,
    mbpp_entry_point,
    read_problems,
)
from infer.bench.quality import judge

ADD = "def add(a, b):\n    return a + b"
TWICE = "def twice(x):\n    return add(x, x)"
# The answer after "```python\n" and its program for `add`, by the special case.
GOLDEN = {
    "a block and its end": (f"{ADD}\n```\nThis adds two numbers.", ADD),
    "no end, by EOS": (f"{ADD}\n```", ADD),
    "prose before a second block": (
        f"\n```\n\nHere is the function, step by step:\n\n```python\n{ADD}\n```\n",
        ADD,
    ),
    "several blocks: the longest is taken": (
        f"import math\n```\nAnd with a check:\n```python\nimport math\n\n{ADD}\n\n"
        "def check():\n    return add(1, 2) == 3\n```\n",
        f"import math\n{ADD}",
    ),
    "imports after the code come first": (
        f"{ADD}\n\nfrom typing import List\nimport math",
        f"from typing import List\nimport math\n{ADD}",
    ),
    "cut off within a second function": (
        f"{ADD}\n\n{TWICE}\n\ndef thrice(x):\n    total = add(x,",
        ADD,
    ),
    "cut off within the function itself": (
        "import math\nimport re\n\ndef add(a, b):\n    if a == 0:\n        return b\n    for i in range(",
        "import math\nimport re\ndef add(a, b):\n    if a == 0:\n        return b",
    ),
    "helpers that the function reaches, tests that it does not": (
        "LIMIT = 10\nUNUSED = 1\n\ndef cut(x):\n    return min(x, LIMIT)\n\n"
        "def add(a, b):\n    return cut(a + b)\n\nassert add(1, 2) == 3\n"
        "for i in range(3):\n    add(i, i)\n",
        "LIMIT = 10\ndef cut(x):\n    return min(x, LIMIT)\n"
        "def add(a, b):\n    return cut(a + b)",
    ),
    "two versions: the first": (
        f"{ADD}\n\ndef add(a, b):\n    return sum([a, b])\n",
        ADD,
    ),
    "a function without return, and a decorated one": (
        f"import functools\n\ndef show(x):\n    print(x)\n\n@functools.cache\n{TWICE}\n\n"
        "class Adder:\n    def run(self, a, b):\n        return a + b\n\n"
        "def add(a, b):\n    show(a)\n    return Adder().run(a, twice(b))\n",
        "import functools\nclass Adder:\n    def run(self, a, b):\n        return a + b\n"
        "def add(a, b):\n    show(a)\n    return Adder().run(a, twice(b))",
    ),
    "one line": ("def add(a, b): return a + b", "def add(a, b): return a + b"),
    "nothing but prose": (
        "I cannot do this,\nbecause it isn't clear.",
        "I cannot do this,",
    ),
    "no import or definition": (
        "def add(a, b):\n    print(a + b)\n\nadd(1, 2)",
        "def add(a, b):\n    print(a + b)\n\nadd(1, 2)",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_an_answer_has_the_program_that_evalplus_finds(name: str) -> None:
    text, program = GOLDEN[name]
    assert extract_program(text, "add") == program


def test_without_an_entry_point_all_definitions_stay() -> None:
    text = f"x = 1\n{ADD}\n\n{TWICE}\nprint(twice(2))"
    assert extract_program(text) == f"x = 1\n{ADD}\n{TWICE}"


def test_escapes_and_tabs_are_no_warnings_and_no_errors(recwarn: object) -> None:
    problem = Problem("p", "", stop=CHAT_STOP, entry_point="f", by_chat=True)
    text = "import re\ndef f(s):\n\treturn re.sub('\\d', '', s)\n"
    assert problem.answer(text).endswith("\n    return re.sub('\\d', '', s)")
    assert not recwarn  # type: ignore[truthy-bool]


def test_a_chats_answer_ends_where_evalplus_ends_it() -> None:
    """Regression: the answer ended at the first line that begins with a fence, even in a docstring."""
    problem = Problem("p", "", stop=CHAT_STOP, entry_point="add", by_chat=True)
    text = f'def add(a, b):\n    """\n```python\nadd(1, 2)\n    """\n    return a + b\n```\n{TWICE}\n'
    assert problem.answer(text).endswith("    return a + b")
    assert problem.answer(f"{ADD}\nprint(add(1, 2))\n{TWICE}") == ADD


def test_every_canonical_solution_of_humaneval_is_found_in_a_chat() -> None:
    """Each solution is fenced, with prose around it. The program is the function alone."""
    rows = list(read_rows(humaneval_file()))
    for index, (problem, row) in enumerate(zip(read_problems("humaneval", ""), rows)):
        asked = Problem(
            problem.id,
            "",
            stop=CHAT_STOP,
            tests=problem.tests,
            entry_point=problem.entry_point,
            by_chat=True,
        )
        source = row["prompt"] + row["canonical_solution"]
        program = asked.answer(f"{source}\n```\n\nThis solves it. Another way:\n")
        assert f"def {problem.entry_point}(" in program, problem.id
        # 32, 38 and 50 are tested by functions of their prompts.
        if index in (0, 32, 38, 50, 100) and not sandbox.unavailable():
            assert judge(asked, program)["passed"], problem.id


def test_tests_that_need_a_function_of_the_prompt_bring_it() -> None:
    """HumanEval/38 calls encode_cyclic, which EvalPlus's extraction leaves out of an answer."""
    if reason := sandbox.unavailable():
        pytest.skip(reason)
    problem = read_problems("humaneval", "")[38]
    program = (
        "def decode_cyclic(s: str):\n"
        "    groups = [s[(3 * i):min((3 * i + 3), len(s))] for i in range((len(s) + 2) // 3)]\n"
        "    groups = [(group[-1] + group[:-1]) if len(group) == 3 else group for group in groups]\n"
        '    return "".join(groups)\n'
    )
    asked = Problem("p", "", tests=problem.tests, by_chat=True)
    assert judge(asked, program)["passed"]
    wrong = program.replace("group[-1] + group[:-1]", "group")
    assert not judge(asked, wrong)["passed"]
    # The prompt's functions are the tests' own: an answer cannot call them.
    borrowed = (
        "def decode_cyclic(s: str):\n    return encode_cyclic(encode_cyclic(s))\n"
    )
    assert "encode_cyclic" in judge(asked, borrowed)["reason"]


@pytest.mark.parametrize(
    ("code", "test", "name"),
    [
        ("def f(x):\n  return x", "assert set(f(1)) == 2", "f"),
        ("def g(x):\r\n\treturn x\r\ndef f(x):\r\n\treturn g(x)", "assert f(1)", "f"),
        ("", "assert f(1) == 2", ""),
    ],
)
def test_an_mbpp_row_says_which_function_is_called(
    code: str, test: str, name: str
) -> None:
    assert mbpp_entry_point({"code": code, "test_list": [test]}) == name

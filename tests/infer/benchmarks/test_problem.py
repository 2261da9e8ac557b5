"""Where an answer ends, what is executed of it, and when it is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.benchmarks.rows import Problem
from infer.config import Infill
from infer.sandbox import Program

TEXTS = st.text(alphabet="ab\n}#", max_size=12)


@given(TEXTS, st.lists(TEXTS.filter(bool), max_size=3).map(tuple))
def test_a_completion_is_cut_before_the_first_text_that_ends_it(completion: str, stop: tuple[str, ...]) -> None:
    cut = Problem("a", "", stop=stop).cut(completion)
    rest = completion[len(cut) :]
    assert completion.startswith(cut) and not any(text in cut for text in stop)
    assert not rest or any(rest.startswith(text) for text in stop)


def test_a_program_has_the_prompt_or_another_head_before_the_answer() -> None:
    """Tests that close a block stand behind what is cut."""
    cpp = Problem("a", "int f() {\n", stop=("\n}",), language="cpp", tests="}\nint main() { f(); }")
    program = cpp.program("    return 1;\n}\nint g() {}")
    assert program == Program("cpp", "int f() {\n    return 1;\n", "}\nint main() { f(); }")
    assert Problem("a", "p", tests="t", known="k").program("c") == Program("", "pc\n", "t", "k")
    assert Problem("a", "p", tests="t", head="").program("c") == Program("", "c\n", "t")
    assert Problem("a", Infill("p", "s")).program("c") is None


@pytest.mark.parametrize(
    ("completion", "exact"),
    [("    x = 1\n", True), ("x = 1", True), ("\n x = 1 \n", True), ("x  = 1", False), ("x = 1\ny", False)],
)
def test_white_space_at_either_end_is_no_difference(completion: str, exact: bool) -> None:
    assert Problem("a", Infill("p", "s"), answer="    x = 1\n").matches(completion) is exact
    assert not Problem("a", "p").matches("")

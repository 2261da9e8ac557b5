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
    assert completion.startswith(cut)
    assert not any(text in cut for text in stop)
    rest = completion[len(cut) :]
    assert not rest or any(rest.startswith(text) for text in stop)


@pytest.mark.parametrize(
    ("completion", "cut"),
    [
        ("    return 1\n\nprint(f())", "    return 1\n"),
        ("    return 1\ndef g():", "    return 1"),
        ("    if x:\n        return 1\n", "    if x:\n        return 1\n"),
        ("\nif x:", ""),
        ("", ""),
    ],
)
def test_what_ends_an_answer_is_no_part_of_it(completion: str, cut: str) -> None:
    assert Problem("a", "", stop=("\ndef", "\nif", "\nprint")).cut(completion) == cut


def test_tests_that_close_a_block_stand_behind_what_is_cut() -> None:
    problem = Problem("a", "int f() {\n", stop=("\n}",), language="cpp", tests="}\nint main() { f(); }")
    program = problem.program("    return 1;\n}\nint g() {}")
    assert program == Program("cpp", "int f() {\n    return 1;\n", "}\nint main() { f(); }")


def test_a_program_has_the_prompt_or_another_head_before_the_answer() -> None:
    assert Problem("a", "p", tests="t", known="k").program("c") == Program("", "pc\n", "t", "k")
    assert Problem("a", "p", tests="t", head="").program("c") == Program("", "c\n", "t")
    assert Problem("a", "p").program("c") is None
    assert Problem("a", Infill("p", "s")).program("c") is None


@pytest.mark.parametrize(
    ("completion", "exact"),
    [("    x = 1\n", True), ("x = 1", True), ("\n x = 1 \n", True), ("x  = 1", False), ("x = 1\ny", False)],
)
def test_white_space_at_either_end_is_no_difference(completion: str, exact: bool) -> None:
    assert Problem("a", Infill("p", "s"), answer="    x = 1\n").matches(completion) is exact


def test_a_problem_without_an_answer_matches_nothing() -> None:
    assert not Problem("a", "p").matches("")

"""Help: what is said of a setting, where an error leads to, and how a terminal shows it."""

import io
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conf.help import comments, describe, in_words, link, paragraph, print_help, written
from conf.schema import named_setting, names, place
from docs.reference import ENTRIES
from infer.config import InferConfig


@dataclass
class Base:
    """What it is, over
    two lines.

    Raises nothing.
    """

    size: int  # of it
    # how it is called:
    # one word
    name: str = "x # y"  # not two
    plain: int = 3


@dataclass
class Derived(Base):
    size: int = 5  # of this one
    many: list[str] = field(
        default_factory=list,
    )  # several


def test_a_setting_means_what_stands_beside_and_above_its_field() -> None:
    """A comment of the field before must not be taken for one above."""
    assert comments(Base) == {
        "size": "of it",
        "name": "how it is called: one word not two",
        "plain": "",
    }
    assert comments(Derived) == {
        **comments(Base),
        "size": "of this one",
        "many": "several",
    }
    assert paragraph(Base) == "What it is, over two lines."


def test_types_and_defaults_are_in_words() -> None:
    kinds = [int | None, list[str] | None, list[list[float]], dict[str, Any], list[Any]]
    words = [
        "whole number",
        "list of texts",
        "list of list of numbers",
        "settings by name",
        "list of values",
    ]
    assert [in_words(kind) for kind in kinds] == words
    values = [None, True, "", "a b", [1, 0.5, "x"], {}, 5e-05]
    assert list(map(written, values)) == [
        "null",
        "true",
        '""',
        "a b",
        "[1, 0.5, x]",
        "{}",
        "5e-05",
    ]


@pytest.mark.parametrize(
    ("entry", "sentence", "setting"),
    [
        ("train", "unknown setting 'stepz': did you mean 'steps'?", "steps"),
        ("train", "setting 'objective.w': Value 'x' of type 'str'", "objective.w"),
        ("train", "deepspeed.fp16.enabled=x: wanted", "deepspeed"),
        ("train", "experiment: wanted one of demo, found x", "experiment"),
        ("train", "data.path=a: b/c=d: wanted a folder", "data.path"),
        ("train", "steps, seed: wanted", "steps"),
        ("train", "path: wanted", None),
        ("train", "lora/adapter: wanted", None),
        ("infer", "draft=self:0: wanted self:N", "draft"),
        ("infer", "draft.model=x: wanted", "draft"),
        ("infer", "draft.dtype: wanted none", "draft.dtype"),
    ],
)
def test_a_sentence_leads_to_the_setting_that_it_begins_with(
    entry: str, sentence: str, setting: str | None
) -> None:
    assert named_setting(sentence, ENTRIES[entry], ("experiment",)) == setting


def test_a_page_of_its_own_goes_before_the_setting() -> None:
    assert (
        link("model=x: wanted", None, "infer", InferConfig)
        == "docs/settings/infer.md#model"
    )
    assert (
        link("model=x: wanted", "slow.md#x", "infer", InferConfig) == "docs/slow.md#x"
    )
    assert link("what is this", None, "infer", InferConfig) is None


@given(st.sampled_from(sorted(ENTRIES)), st.data())
def test_every_setting_is_its_own_place(entry: str, data: st.DataObject) -> None:
    schema = ENTRIES[entry]
    name = data.draw(st.sampled_from(names(schema)))
    assert place(schema, name) == name


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_help_fits_the_terminal_and_has_every_setting(name: str) -> None:
    """Off a terminal it is plain text."""
    entry = describe(name, ENTRIES[name])
    for width in (80, 120):
        printed = io.StringIO()
        print_help(entry, Console(file=printed, width=width))
        lines = printed.getvalue().splitlines()
        assert (
            max(
                len(line.rstrip())
                for line in lines
                if line.strip() not in entry.examples
            )
            <= width
        )
        assert {f"  {example}" for example in entry.examples} <= set(lines), (
            "whole, to be copied"
        )
        for setting in (
            setting for section in entry.sections for setting in section.settings
        ):
            assert any(line.startswith(f"  {setting.name}=") for line in lines), setting
        for group in entry.groups:
            for choice in group.choices:
                assert any(
                    line.split()[:1] == [f"{group.name}={choice.name}"]
                    for line in lines
                ), choice

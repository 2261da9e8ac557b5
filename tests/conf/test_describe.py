from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.comments import comments, paragraph
from conf.describe import in_words, written
from conf.links import link, named
from conf.schema import names, place
from docs.reference import ENTRIES
from infer.config import InferConfig
from infer.speed.config import SpeedConfig
from train.config import TrainConfig


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
    assert comments(Base) == {"size": "of it", "name": "how it is called: one word not two", "plain": ""}
    assert comments(Derived) == {**comments(Base), "size": "of this one", "many": "several"}
    assert paragraph(Base) == "What it is, over two lines."


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "whole number"),
        (list[str] | None, "list of texts"),
        (list[list[float]], "list of list of numbers"),
        (dict[str, Any], "settings by name"),
        (list[Any], "list of values"),
    ],
)
def test_types_are_said_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words


def test_a_default_is_written_as_it_would_be_given() -> None:
    values = [None, True, "", "a b", [1, 0.5, "x"], {}, 5e-05]
    assert list(map(written, values)) == ["null", "true", '""', "a b", "[1, 0.5, x]", "{}", "5e-05"]


@pytest.mark.parametrize(
    ("schema", "sentence", "setting"),
    [
        (TrainConfig, "unknown setting 'stepz': did you mean 'steps'?", "steps"),
        (TrainConfig, "setting 'objective.w': Value 'x' of type 'str'", "objective.w"),
        (TrainConfig, "deepspeed.zero_optimization: wanted offloading to cpu", "deepspeed"),
        (TrainConfig, "deepspeed.fp16.enabled=x: wanted", "deepspeed"),
        (TrainConfig, "experiment must be one of demo, got x", "experiment"),
        (TrainConfig, "data.path=a: b/c=d: wanted a folder", "data.path"),
        (TrainConfig, "steps, seed: wanted", "steps"),
        (TrainConfig, "path: wanted", None),
        (TrainConfig, "lora/adapter: wanted", None),
        (TrainConfig, "memory: wanted", None),
        (SpeedConfig, "prompts.kind must be one of humaneval", "prompts.NAME.kind"),
        (SpeedConfig, "prompts.humaneval.count: wanted 20 prompts, found 3", "prompts.NAME.count"),
        (SpeedConfig, "prompts.mine: wanted at least one prompt", "prompts"),
        (SpeedConfig, "prompts.group: wanted", "prompts"),
        (InferConfig, "draft=self:0: wanted self:N", "draft"),
        (InferConfig, "draft.model=x: wanted", "draft"),
        (InferConfig, "draft.dtype: wanted none", "draft.dtype"),
    ],
)
def test_a_sentence_leads_to_the_setting_that_it_begins_with(
    schema: type, sentence: str, setting: str | None
) -> None:
    assert named(sentence, schema, ("experiment",)) == setting


def test_a_page_of_its_own_goes_before_the_setting() -> None:
    told = {"entry": "infer", "schema": InferConfig, "groups": ()}
    assert link("model=x: wanted", None, **told) == "docs/settings/infer.md#model"  # type: ignore[arg-type]
    assert link("model=x: wanted", "slow.md#x", **told) == "docs/slow.md#x"  # type: ignore[arg-type]
    assert link("what is this", None, **told) is None  # type: ignore[arg-type]


@given(st.sampled_from(sorted(ENTRIES)), st.data())
def test_every_setting_is_its_own_place(entry: str, data: st.DataObject) -> None:
    schema = ENTRIES[entry]
    name = data.draw(st.sampled_from(names(schema)))
    assert place(schema, name) == name
    assert place(schema, name.replace("NAME", "some")) == name

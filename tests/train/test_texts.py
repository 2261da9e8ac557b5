"""Held-out texts with their accepted drafts: for the tracker's table, texts.jsonl and TensorBoard."""

from pathlib import Path

import numpy as np
import pytest

from conf.runs.tensorboard import FOLDER, TensorboardRun
from conf.runs.tracker import HtmlTable, log_files, log_row
from tests import bpe
from train.texts import (
    ACCEPTED,
    ReplayedText,
    append_texts,
    read_texts,
    replayed_text,
    to_html,
)
from train.validation import replay_loops


def test_a_loop_has_its_place_and_its_accepted_drafts() -> None:
    # Windows of two at the positions 4 to 7: offset 1 and 2 of each.
    offsets = np.array([1, 2, 1, 2, 1, 2, 1, 2])
    positions = np.array([4, 5, 5, 6, 6, 7, 7, 8])
    hits = np.array([1, 0, 0, 0, 1, 1, 1, 1], dtype=bool)
    # At 4 one draft is right: the next loop is at 4 + 1 + 2.
    assert replay_loops(offsets, positions, hits) == [(4, 1), (7, 2)]


def test_a_text_says_which_tokens_are_accepted_drafts() -> None:
    ids = np.arange(20, 40)
    text = replayed_text(3, ids, [(4, 1), (7, 2)], Path(bpe.FOLDER))
    # own, draft, own; own, draft, draft, own.
    assert [accepted for _, accepted in text.spans] == [False, True, False, True, False]
    assert (text.sequence, text.acceptance_length) == (3, 2.5)


def test_html_has_accepted_drafts_on_a_colour() -> None:
    page = to_html(ReplayedText(0, 2.0, [("a < b", False), ("<c>", True)]))
    assert f'a &lt; b<span style="background: {ACCEPTED}">&lt;c&gt;</span>' in page


def test_a_repeated_validation_replaces_its_line(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    texts = [[ReplayedText(0, length, [["a", True]])] for length in (1.0, 2.0, 3.0)]
    append_texts(file, 0, texts[0])
    append_texts(file, 5, texts[1])
    append_texts(file, 5, texts[2])
    assert list(read_texts(file)) == [(0, texts[0]), (5, texts[2])]
    file.write_text(file.read_text() + '{"step": 10, "te')
    assert [step for step, _ in read_texts(file)] == [0, 5]


def test_tensorboard_has_the_figures_and_the_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):  # the second run removes the files of the first
        run = TensorboardRun(tmp_path)
        log_row(run, {"train/loss": value}, 1)
        log_row(run, {"texts": HtmlTable(("n", "text"), [(1, "<b>a</b>")])}, 1)
        run.send(lambda run: run.define_metric("*", step_metric="tokens_seen"))
        run.send(lambda run: log_files(run, "m", "model", tmp_path, {}))
        run.finish()
    events = EventAccumulator(str(tmp_path / FOLDER))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [2.0]
    assert events.Tags()["tensors"] == ["texts/text_summary"]

"""Held-out texts with their accepted drafts: for the tracker's table, texts.jsonl and TensorBoard."""

import os
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.runs.tensorboard import FOLDER, TensorboardRun
from conf.runs.tracker import HtmlTable, log_files, log_row
from conf.settings.compose import settings
from tests import bpe
from tests.conftest import vocab_of
from train import validation
from train.config import TrainConfig
from train.texts import (
    ACCEPTED,
    ReplayedText,
    append_texts,
    read_texts,
    replayed_text,
    to_html,
)
from train.validation import Validation, replay_loops


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


def test_only_the_first_rank_decodes_texts(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank decoded the texts of its sequences, and only the first rank's were logged."""
    overrides = ["model=tiny", "objective=branch", "micro_batch=1"]
    config = settings("train", TrainConfig, [*overrides, f"data.path={data_folder}"])
    monkeypatch.setattr(validation.dist, "all_reduce", lambda tensor: None)
    device = torch.device("cpu")

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tally = torch.ones(config.objective.L + 1, 4, dtype=torch.float64)
        return tally.sum(), tally, batch["labels"]

    vocab = vocab_of(data_folder)
    texts = []
    for rank in (0, 1):
        share = Validation(config, vocab, rank=rank, ranks=2, device=device)
        metrics, shown = share.run(forward, stop=lambda: False, show=print)  # type: ignore[arg-type]
        assert metrics["tau_real"] > 1
        texts.append(shown)
    assert texts[0] and not texts[1]


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


def test_a_failed_write_keeps_the_earlier_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a full disk, or a kill during the write, lost the texts of all earlier validations."""
    file = tmp_path / "texts.jsonl"
    append_texts(file, 0, [ReplayedText(0, 1.0, [["a", True]])])
    before = file.read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        append_texts(file, 5, [])
    assert file.read_bytes() == before


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

"""Test GSD's figures: of chosen drafts, of whole texts against a literal reference, repeatability."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.errors import UserError
from conf.runs.files import read_json
from conf.settings.compose import settings
from infer import DecodeConfig, Model
from infer.bench.config import BenchConfig, GsdConfig
from infer.bench.gsd import (
    DraftedText,
    decode_prompt,
    figures,
    record,
    recurring,
    tables,
)
from infer.bench.run import bench
from infer.drafters import drafting
from infer.drafters.draft_model import DraftModelSources
from infer.engine.runner import Runners
from infer.methods import Methods
from infer.trees.growth import Rules
from infer.trees.token_graph import Outcome, TokenGraph, unroll
from tests import warm
from tests.conftest import tiny_llama, write_rows
from tests.infer.drafters.test_draft_model import a_draft_of
from tests.infer.library import by_library
from tests.infer.trees import literal

Y, A, B, C, D = range(5)
GSD = DecodeConfig("gsd")


def accept(*nodes: int) -> Outcome:
    """Return the outcome of accepting these nodes, one after the other.

    The graph is drawn in gsd.py: b's child a is merged into the root's.
    """
    graph = TokenGraph([Y])
    for parent, token in ((0, B), (0, A), (1, A), (2, C)):
        graph.add(parent, token, 0.5)
    graph.merge(3, 2)
    drafts = unroll(graph, [0.0] * 10, depth=10)
    path = [0]
    for node in nodes:
        behind = (at for at, parent in enumerate(drafts.parents) if parent == path[-1])
        path.append(next(at for at in behind if drafts.nodes[at] == node))
    tokens = [drafts.tokens[at] for at in path[1:]]
    return Outcome(graph, drafts, path, [*tokens, D], rows=4)


def test_figures_are_those_of_the_drafts() -> None:
    """Acceptance is by level drafted, averaged over texts, as the authors count.

    Merged nodes are not drafted anew. A text of a single step has no times.
    """
    times = [(0.1, 0.2, 0.3), (0.3, 0.1, 0.1), (0.2, 0.3, 0.2)]
    first = DraftedText([1] * 8, 1.0, [accept(1, 3, 4), accept(2)], times)
    second = DraftedText([1] * 4, 0.5, [accept(1)])
    plain = DraftedText([1] * 8, 2.0, [])
    row = figures([record(text, plain, GSD) for text in (first, second)])
    assert row["acceptance_rate"] == ((3 + 1) / 4 + 1 / 2) / 2
    assert row["drafted_share"] == 5 / 12 and row["mean_acceptance_length"] == 1 + 5 / 3
    assert row["levels"] == 2 and row["graph_success"] == pytest.approx(1 / 3)
    assert row["drafted_tokens"] == (2 * 3 + 3) / 2
    assert row["rank_shares"] == [4 / 5, 1 / 5, 0, 0]
    assert row["speedup"] == pytest.approx(2) and row["recurring"] == []
    assert (row["draft_ms"], row["verification_ms"], row["rest_ms"]) == (200, 200, 200)
    assert (row["same"], row["compared"]) == (1, 2)
    nothing = figures([record(DraftedText([1], 1.0, []), plain, GSD)])
    assert nothing["acceptance_rate"] is nothing["draft_ms"] is None
    assert nothing["drafted_tokens"] == 0


def test_tokens_recur_across_branches_only() -> None:
    """a b below y, and a b, a b in a row below c: of the row one bigram is not counted twice."""
    graph = TokenGraph([Y])
    for parent, token in ((0, A), (1, B), (0, C), (3, A), (4, B), (5, A), (6, B)):
        graph.add(parent, token, 0.5)
    shares = recurring(graph)
    assert shares[:3] == [6 / 7, 6 / 7, 0]
    del graph.tokens[3:], graph.parents[3:]
    assert recurring(graph)[0] == 0


def paired(model: Model) -> Model:
    """A model in float64 and a draft model close to it."""
    lm = tiny_llama(vocab=30, seed=3).double()
    draft = a_draft_of(lm, 0.1)
    methods = Methods(lm, draft=DraftModelSources(lm, draft))
    runners = Runners(lm)
    return replace(
        model,
        lm=lm,
        adaptive=None,
        eos=frozenset([1]),
        context=512,
        draft=draft,
        methods=methods,
        runners=runners,
    )


@pytest.mark.parametrize("method", ["ssd", "tsd", "gsd"])
def test_texts_are_decoded_as_the_paper_says_word_for_word(
    model: Model, method: str
) -> None:
    """Drafted tokens, levels, accepted drafts, successes of every step, and the text.

    The draft of a text's last step was not counted.
    """
    pair = paired(model)
    assert pair.draft
    gsd = GsdConfig(k=3, depth=3, nodes=9, theta_prob=0.02, theta_sib=0.02, tau=1)
    decode = gsd.decoders(DecodeConfig("plain", max_new_tokens=24))[method]
    successes = accepted = timed = 0
    for prompt in ([5, 17, 3], [14, 6, 13, 20, 8], [9, 9]):

        def target(path: tuple[int, ...]) -> int:
            return int(by_library(pair.lm, list(path)).argmax())

        def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
            assert pair.draft
            chances, ids = by_library(pair.draft.lm, list(path)).softmax(-1).topk(5)
            return [(int(id), float(chance)) for id, chance in zip(ids, chances)]

        ends = pair.eos | pair.text.ends(prompt)
        steps = literal.decode(
            prompt,
            target,
            likeliest,
            new=24,
            ends=ends,
            nodes=9,
            **vars(decode.rules),
        )
        text = decode_prompt(pair, prompt, decode, 0)
        assert text.tokens == [token for step in steps for token in step.tokens]
        drafting = [step for step in steps if step.drafted]
        run = record(text, text, decode)
        assert run["steps"] == len(drafting) > len(text.times)
        for name in ("drafted", "levels", "accepted", "successes"):
            assert run[name] == sum(step.counts[name] for step in drafting), name
        successes += run["successes"]
        accepted += run["accepted"]
        timed += len(text.times)
    assert bool(successes) == (method == "gsd") and accepted > 12 and timed > 3


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"content": "def first(x):\n    return x + 1\n" * 4}]
    return write_rows(tmp_path_factory.mktemp("prompts") / "rows.jsonl", rows)


def arguments_of(model: Path, prompts: Path, out: Path, *overrides: str) -> list[str]:
    return [
        f"model={model}",
        f"prompts=[{prompts}]",
        f"out={out}",
        "dtype=float32",
        "draft=self:1",
        "count=1",
        "gsd.max_new_tokens=12",
        "tracker.mode=disabled",
        *overrides,
    ]


def rows_of(model: Path, prompts: Path, out: Path, *overrides: str) -> list[Any]:
    arguments = arguments_of(model, prompts, out, *overrides)
    config = settings("bench", BenchConfig, arguments)
    bench(config)
    rows: list[Any] = read_json(out / "report.json")[config.parts[0]]["rows"]
    return rows


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if not name.startswith("speedup") and not name.endswith("_ms")
    }


def test_counts_repeat_whatever_the_clock_says(
    model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the clock decided levels and nodes; three runs drafted 3.57, 4.61 and 4.61 per token."""
    counts = []
    for at, pace in enumerate((1e-3, 1.0, 1e3)):

        def clock(pace: float = pace) -> float:
            return pace * time.perf_counter()

        monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=clock))
        overrides = ["part=gsd", "gsd.theta_prob=0.01", "gsd.parts=[methods,sampling]"]
        rows = rows_of(model_dir, prompts, tmp_path / str(at), *overrides)
        counts.append(list(map(without_times, rows)))
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0]) == 9 and all(row["drafted_tokens"] for row in counts[0])
    greedy = next(row for row in counts[0] if row["setting"] == "greedy gsd")
    assert greedy["same"] == greedy["compared"] == 1


def test_defaults_are_the_papers() -> None:
    """The paper's tables have tau 2 without the merged token, which is 3 in all settings here."""
    (greedy, _) = tables(GsdConfig())["methods"]
    gsd = greedy["greedy gsd"]
    assert gsd.rules == Rules(4, 10, 0.2, 0.3, 3) == DecodeConfig("gsd").rules
    assert (gsd.nodes, gsd.max_new_tokens) == (100, 512)
    assert greedy["greedy tsd"].rules == Rules(4, 10, 0.2, 0.3, None)
    assert greedy["greedy ssd"].rules == Rules(1, 10, 0.2, 0.3, None)


def test_speed_measures_the_papers_decoders_by_their_settings(
    model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Regression: they always used measured costs. The folder's facts include the settings gsd.*."""
    overrides = [
        "part=speed",
        "speed.decoders=[ssd,gsd]",
        "speed.peers=[]",
        "speed.rounds=1",
        "speed.temperatures=[0]",
        "speed.max_new_tokens=12",
        "gsd.theta_prob=0",
        "gsd.depth=2",
        "gsd.nodes=3",
    ]
    rows = rows_of(model_dir, prompts, tmp_path / "out", *overrides)
    drafted = {
        row["decoder"]: row["drafted"] / row["verifications"]
        for row in rows
        if row["verifications"]
    }
    assert 1.7 < drafted["ssd"] <= 2 and 2.5 < drafted["gsd"] <= 3
    with pytest.raises(UserError, match="gsd"):
        rows_of(model_dir, prompts, tmp_path / "out", *overrides, "gsd.tau=1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gsd.nodes=null", "gsd.nodes must be a number with part=gsd, got null"),
        ("tensor_parallel=true", "tensor_parallel=true must run in at least 2 pro"),
    ],
)
def test_mistakes_are_one_sentence(
    model_dir: Path, prompts: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rows_of(model_dir, prompts, tmp_path / "out", "part=gsd", override)
    assert not (tmp_path / "out").exists()


def test_a_target_divided_over_processes_is_measured_beside_its_draft_model(
    model_dir: Path, base_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """The paper's 70B did not fit: each process had a whole model. Counts equal one process's."""
    shared = ["gsd.parts=[methods]", "gsd.max_new_tokens=8", f"draft={base_dir}"]
    expected = rows_of(model_dir, prompts, tmp_path / "one", "part=gsd", *shared)
    speed = [
        "speed.decoders=[hybrid,gsd]",
        "speed.peers=[assisted]",
        "speed.rounds=1",
        "speed.temperatures=[0]",
        "speed.max_new_tokens=8",
    ]
    out = tmp_path / "two"
    for part in (["part=gsd"], ["part=speed", *speed]):
        overrides = [*shared, *part, "threads=1", "tensor_parallel=true"]
        command = arguments_of(model_dir, prompts, out, *overrides)
        answer = warm.run_ranks("infer.bench", *command, ranks=2)
        assert answer.returncode == 0, answer.stderr
        assert "divided over 2 processes" in answer.stdout
    report = read_json(out / "report.json")
    rows = list(map(without_times, report["gsd"]["rows"]))
    assert rows == list(map(without_times, expected))
    decoders = {row["decoder"]: row for row in report["speed"]["rows"]}
    assert decoders["hf assisted"]["forwards"] and report["speed"]["roofline"]
    for name in ("hybrid", "gsd"):
        assert decoders[name]["same"] == decoders[name]["compared"] == 1

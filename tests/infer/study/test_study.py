import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf import UserError, settings
from infer.api import Model
from infer.config import DecodeConfig
from infer.measure.runs import Measured
from infer.methods import rules_of
from infer.study import PARTS, StudyConfig, measurements
from infer.study.__main__ import main
from infer.study.measurements import PARTS as TIMES
from infer.study.measurements import divergences, log_q, lossy, recurring
from infer.study.models import Counts, DraftedRun, StudyModels, figures, rank_shares
from infer.trees.token_graph import Outcome, TokenGraph, unroll
from tests import warm

Y, A, B, C, D = range(5)


def tree_of(*parents_and_tokens: tuple[int, int]) -> TokenGraph:
    graph = TokenGraph([Y])
    for parent, token in parents_and_tokens:
        graph.add(parent, token, 0.5)
    return graph


def test_an_accepted_path_behind_a_merged_node_is_a_success() -> None:
    """The figure of counts.py: b's child a is merged into the root's."""
    graph = tree_of((0, B), (0, A), (1, A), (2, C))
    graph.merge(3, 2)
    drafts = unroll(graph, [0.0] * 10, depth=10)
    assert sorted(drafts.nodes) == [0, 1, 2, 3, 4, 4]

    def item(*nodes: int) -> Counts:
        path = [0]
        for node in nodes:
            behind = (at for at, parent in enumerate(drafts.parents) if parent == path[-1])
            path.append(next(at for at in behind if drafts.nodes[at] == node))
        tokens = [*(drafts.tokens[at] for at in path[1:]), D]
        return Counts.of(Outcome(graph, drafts, path, tokens, rows=4))

    assert item() == Counts(3, 2, 4, 1, (), False)
    assert item(2, 4) == Counts(3, 2, 4, 3, (2, 1), False)
    assert item(1, 3) == Counts(3, 2, 4, 3, (1, 1), False)  # merged itself, but no copy
    assert item(1, 3, 4) == Counts(3, 2, 4, 4, (1, 1, 1), True)  # three of two levels: a copy lies deeper


def test_n_grams_recur_in_other_branches() -> None:
    """The figure of measurements.py; what repeats itself along a path does not recur."""
    tree = tree_of((0, A), (1, B), (2, C), (0, D), (4, A), (5, B), (6, C))
    assert recurring(tree, 1) == recurring(tree, 2) == recurring(tree, 3) == {1, 2, 3, 5, 6, 7}
    assert recurring(tree, 4) == set()
    chain = tree_of((0, A), (1, A), (2, A), (3, A))
    assert recurring(chain, 1) == recurring(chain, 2) == set()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=24), st.integers(1, 4))
def test_recurrence_is_that_of_all_pairs_of_paths(nodes: list[tuple[int, int]], n: int) -> None:
    tree = tree_of(*((parent % (index + 1), token) for index, (parent, token) in enumerate(nodes)))
    paths = [[]]
    for node in range(1, len(tree.tokens)):
        paths.append([*paths[tree.parents[node]], node])
    expected = set()
    for item in range(1, len(paths)):
        for other in range(1, len(paths)):
            related = item in paths[other] or other in paths[item]
            grams = [[tree.tokens[node] for node in path[-n:]] for path in (paths[item], paths[other])]
            if not related and len(grams[0]) == n and grams[0] == grams[1]:
                expected |= {*paths[item][-n:], *paths[other][-n:]}
    assert recurring(tree, n) == expected


def test_rates_are_those_of_the_runs() -> None:
    """Of five steps the last has none, and one drafted nothing."""
    counts = (
        Counts(12, 4, 3, 2, (2,), False),
        Counts(8, 3, 2, 3, (1, 1), True),
        Counts(4, 3, 1, 2, (1,), False),
    )
    rates = figures([DraftedRun([1] * 10, 1.0, 5, 20, 5, counts)])
    assert rates == {
        "acceptance_rate": 4 / 10,
        "drafted_share": 0.5,
        "accepted_per_step": 1.0,
        "drafted_per_token": 24 / 8,
        "fed_per_token": 6 / 8,
        "graph_success": 1 / 3,
    }
    assert rank_shares((2, 1, 1, 1), 3) == [0.75, 0.25, 0] and rank_shares((), 4) is None
    assert set(figures([DraftedRun([1, 2], 1.0, 2, 0, 0, ())]).values()) == {None}


def test_acceptance_is_by_level_drafted_as_the_authors_count() -> None:
    """It was the share of the emitted tokens, and fell with θ_prob where the paper has it rise. The authors add
    the levels of every draft, divide the accepted drafts by them, and take the mean of the texts.
    """
    strict = (Counts(1, 1, 1, 2, (1,), False), Counts(2, 2, 2, 3, (1, 1), False))
    loose = (Counts(40, 8, 9, 4, (1, 2, 1), False), Counts(44, 8, 9, 6, (1, 1, 1, 3, 1), False))
    runs = [DraftedRun([1] * 9, 1.0, 3, 44, 8, counts) for counts in (strict, loose)]
    rates = [figures(subset)["acceptance_rate"] for subset in (runs[:1], runs[1:], runs)]
    assert rates == [3 / 3, 8 / 16, (3 / 3 + 8 / 16) / 2]


def test_the_authors_tau_counts_the_tokens_before_the_merged_one() -> None:
    """Their tau=0 merges nodes of the same token, as tau=1 of the paper's text does; it was refused."""
    for tau in range(4):
        preceding = rules_of(DecodeConfig("gsd", tau=tau, tau_reading="preceding"))
        assert preceding == rules_of(DecodeConfig("gsd", tau=tau + 1))
    assert rules_of(DecodeConfig("gsd", tau_reading="preceding")).tau == 3
    assert rules_of(DecodeConfig("tsd")).tau is None


def test_only_what_promised_the_same_tokens_is_lossy() -> None:
    row = {"prompt_set": "a", "decoding": "top-p", "method": "gsd", "prompts": 3, "identical": 2}
    result = lossy(
        [row | {"verify": "ratio"}, row | {"verify": "pick"}, row | {"verify": None, "identical": 3}]
    )
    assert result == ["top-p gsd on a"]


def test_merging_is_held_against_the_draft_models_forward_on_each_path(model: Model) -> None:
    context = [7, 50, 9, 100]
    graph = tree_of((0, 50), (0, 9), (1, 9), (2, 60))
    graph.tokens[0] = context[-1]
    graph.merge(3, 2)
    paths = [context, [*context, 50], [*context, 9], [*context, 50, 9], [*context, 9, 60]]
    with torch.inference_mode():
        expected = torch.stack(
            [model.lm(torch.tensor([path])).logits[0, -1].double().log_softmax(-1) for path in paths]
        )
        result = log_q(model.lm, context, graph)
    assert torch.allclose(result, expected, atol=1e-4)
    kl = torch.nn.functional.kl_div(expected[2], expected[3], log_target=True, reduction="sum")
    assert divergences(result, graph) == pytest.approx([float(kl)], rel=1e-3)
    assert divergences(result, tree_of((0, 50))) == []


SIZE = ("rounds=1", "nodes=12")


@pytest.fixture
def given_settings(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model's first layer drafts for it, on two texts."""
    texts = ["def first(n):\n    return n", "import json\n\nclass Reader:\n", "for line in lines:\n"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prompts = ["~prompts.humaneval", "prompts.held_out.key=text", "prompts.held_out.count=2"]
    prompts += [f"prompts.held_out.path={tmp_path / 'texts.jsonl'}", "max_new_tokens=8"]
    return [
        f"model={model_dir}",
        "draft=self:1",
        f"out={tmp_path / 'study'}",
        "experiment=demo",
        *prompts,
        *SIZE,
    ]


def test_a_study_measures_each_part_once(
    given_settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("study", StudyConfig, given_settings)
    main(config)
    out = Path(config.out)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {path.stem for path in out.glob("*.png")} == set(PARTS) <= report.keys()
    assert report["date"] and report["hardware"]["cores"]
    first = capsys.readouterr().out
    assert "held_out" in first and "(Table 5)" in first and "…" not in first
    assert all(row["identical"] == row["prompts"] == 2 for row in report["methods"])
    for row in report["time"]:
        assert row["steps"] and row["draft"] > 0 and row["verification"] > 0 and row["others"] > 0
    gsd = {row["value"]: row for row in report["ablation"] if row["setting"] == "theta_prob"}
    assert gsd[0.1]["drafted_per_token"] >= gsd[0.6]["drafted_per_token"]
    monkeypatch.setattr("infer.study.run.StudyModels", None)
    main(config)
    assert "nothing to do" in capsys.readouterr().out


def test_counts_are_those_of_the_drafts(given_settings: list[str]) -> None:
    """Every step but the last has its one, and the graph that `outcomes` gives is the one counted."""
    models = StudyModels(settings("study", StudyConfig, given_settings))
    decode = models.decode("gsd", theta_prob=0.01)
    runs = models.run(decode)
    for run, prompt in zip(runs, models.all_prompts, strict=True):
        assert len(run.counts) == run.forwards - 1
        assert tuple(map(Counts.of, models.outcomes(decode, prompt))) == run.counts
        assert sum(item.tokens for item in run.counts) < len(run.tokens)
        accepted = sum(len(item.ranks) for item in run.counts)
        assert accepted == sum(item.tokens - 1 for item in run.counts) <= run.accepted
        assert all(item.nodes >= item.rows > 0 for item in run.counts[1:])
    with pytest.raises(UserError, match="max_new_tokens=600: .* the model's 512 positions, got 6"):
        StudyModels(settings("study", StudyConfig, [*given_settings, "max_new_tokens=600"]))


def test_a_lossy_method_fails_the_study_and_every_later_one(
    given_settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measurements.measure
    monkeypatch.setattr(measurements, "measure", lambda *args, **kwargs: spoiled(real(*args, **kwargs)))

    def spoiled(result: dict[measurements.MethodKey, Measured]) -> dict[measurements.MethodKey, Measured]:
        key = next(key for key in result if key.method == "gsd")
        result[key].rounds[0][0].tokens.append(1)
        return result

    config = settings("study", StudyConfig, [*given_settings, "parts=[methods]"])
    for _ in range(2):
        with pytest.raises(UserError, match="must all be those .* greedy gsd on held_out"):
            main(config)
        assert (Path(config.out) / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["draft=null"], "draft must be a model, .* got none"),
        (["draft.adaptive=true"], "draft.adaptive must be false, .* got true"),
        (["parts=[methods,figures]"], "parts must be some of methods, .* got figures"),
        (["parts=[]"], "parts must be some of methods, .* got none"),
        (["dtype=int8"], "dtype must be one of .* got int8"),
        (["rounds=0"], "rounds must be at least 1, got 0"),
        (["divide=layers"], "divide must be prompts or model, got layers"),
        # It was refused once models were loaded and six parts measured.
        (["nodes=3"], "nodes must be at least 4 with sampling among parts, .* got 3"),
    ],
)
def test_what_cannot_be_studied_is_refused(
    given_settings: list[str], overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        settings("study", StudyConfig, [*given_settings, *overrides])


def test_two_ranks_measure_what_one_process_does(given_settings: list[str], tmp_path: Path) -> None:
    """Every rank measured all prompts, and all of them wrote one folder. Of three prompts a rank has one. A
    target that one GPU does not hold could not be studied at all: two ranks of one model do.
    """
    given = [*given_settings, "prompts.held_out.count=3", "parts=[sampling,recurrence,merging,ranks,time]"]
    main(settings("study", StudyConfig, given))
    single = json.loads((tmp_path / "study" / "report.json").read_text(encoding="utf-8"))
    assert single["processes"] == 1
    for divide in ("prompts", "model"):
        out = tmp_path / divide
        answer = warm.run_ranks("infer.study", *given, f"out={out}", f"divide={divide}", ranks=2)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.count("(Table 5)") == 1  # one rank prints
        divided = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert divided["processes"] == 2
        for part in ("recurrence", "merging", "ranks"):
            assert divided[part] == single[part]
        assert without(TIMES, divided["time"]) == without(TIMES, single["time"])
        timed = ("speedup", "speedup_range", "tokens_per_second")
        assert without(timed, divided["sampling"]) == without(timed, single["sampling"])


def without(timed: Iterable[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their times."""
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]

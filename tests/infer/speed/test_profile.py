"""Parts of a step's time, memory and graphs, of one decoded text; L(q) as reports measure it."""

from functools import partial
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import LlamaForCausalLM

from infer import Model
from infer.config import DecodeConfig, DraftConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.costs import ROWS
from infer.engine.output import Request
from infer.engine.pick import candidates, pick
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits, decode
from infer.methods import DraftMethods
from infer.models.draft import load_draft
from infer.speed import profile as module
from infer.speed.profile import StepTimer, context_for, measure_costs, peak_memory, profile, timed
from infer.study.models import Counts
from infer.trees.token_graph import Outcome
from tests.conftest import tiny_llama
from tests.infer.engine.test_families import tiny

CPU = torch.device("cpu")
REQUEST, LIMITS = Request([5, 17, 40, 3]), Limits(24)


class Hands:
    """A clock that others advance."""

    time = 0.0

    def __call__(self) -> float:
        return self.time

    def after(self, seconds: float, work):
        def timed(*args, **kwargs):
            self.time += seconds
            return work(*args, **kwargs)

        return timed


def test_each_part_has_the_time_of_its_verbs(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    verbs = [(Drafter, "propose", 3), (Drafter, "observe", 2), (Runner, "forward", 50), (Runner, "commit", 7)]
    for kind, verb, ms in (*verbs, (Runner, "prefill", 1000)):
        monkeypatch.setattr(kind, verb, clock.after(ms / 1e3, getattr(kind, verb)))
    runner = Runner(llama, capacity=64, max_rows=1)
    steps = timed(runner, Drafters(Drafter), REQUEST, Limits(5), clock=clock)
    assert [pytest.approx(spent) for _, spent in steps] == [(1003, 50, 9), *[(3, 50, 9)] * 3, (3, 50, 7)]
    assert profile(runner, Drafters(Drafter), REQUEST, Limits(1), device=CPU).ms_forward is None  # one step


def test_a_profiled_text_is_the_text_on_the_runner_that_is_there(llama: LlamaForCausalLM) -> None:
    runner = Runner(llama, capacity=64, max_rows=8)
    drafters = Drafters(partial(AdaptiveDrafter, [7], FixedPolicy(3)))
    profiled = [step.tokens for step, _ in timed(runner, drafters, REQUEST, LIMITS)]
    assert profiled == [step.tokens for (step,) in decode(runner, [REQUEST], drafters, LIMITS)]


def test_a_draft_models_graphs_are_counted(model: Model) -> None:
    draft = load_draft(DraftConfig("self:1"), model.lm, rows=model.lm.config.vocab_size, adaptive=None)
    outcomes, settings = list[Outcome](), DecodeConfig(method="gsd", tau=1, theta_prob=0.01, nodes=12)
    methods = DraftMethods(model.lm, draft)
    drafters = methods.drafters(settings, batch=1, capacity=64, left=50, watch=outcomes.append)
    runner = Runner(model.lm, capacity=64, max_rows=drafters.max_rows)
    # What the first was given is not counted again of the second.
    profiles = [profile(runner, drafters, REQUEST, LIMITS, device=CPU, outcomes=outcomes) for _ in range(2)]
    counts = [Counts.of(item) for item in outcomes]
    assert len(counts) % 2 == 0 and counts[: len(counts) // 2] == counts[len(counts) // 2 :]
    for item in profiles:
        assert item.drafted_nodes == fmean(item.nodes for item in counts)
        assert item.graph_success == fmean(item.succeeded for item in counts)
        assert item.ms_draft and item.ms_forward and item.ms_rest


def test_the_peak_is_of_the_work_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed in a process that had 64 MiB free in its heap, which a bytearray took: no page was added."""

    def work(size: int) -> int:
        with mmap(-1, size) as memory:
            for page in range(0, size, PAGESIZE):
                memory[page] = 1
        return size

    (_, least), (size, high), (_, after) = (peak_memory(CPU, partial(work, size)) for size in (1, 2**26, 1))
    assert size == 2**26
    if least is not None and high is not None and after is not None:  # the peak can be reset here
        assert high - least > 2**25 and high - after > 2**25
    monkeypatch.setattr(module, "PROCESS", tmp_path / "absent")
    assert peak_memory(CPU, partial(work, 7)) == (7, None)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, 10, 0.9)])
def test_a_table_is_measured_with_the_texts_own_choices(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were measured greedily: of sampled text the drafts take several times as long to read, and drafting
    that lost a sixth was believed to pay. And 256 columns were too many for a table of 128 positions.
    """
    used = {"pick": set[Sampling](), "candidates": set[Sampling]()}
    monkeypatch.setattr("infer.speed.profile.SECONDS", 0.05)
    for name, work in (("pick", pick), ("candidates", candidates)):
        noted = lambda logits, how, *keys, seen=used[name], work=work: seen.add(how) or work(logits, how, *keys)  # noqa: E731
        monkeypatch.setattr(f"infer.engine.output.{name}", noted)
    lm = tiny("opt", max_position_embeddings=128, ffn_dim=64)
    actual = measure_costs(lm, batch=2, context=context_for(100, lm), sampling=sampling)
    assert used["pick"] == used["candidates"] == {sampling}
    assert actual.rows[0] == 1 and actual.ms[0] > 0 and list(actual.ms) == sorted(actual.ms)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [(GREEDY, 15.0), (Sampling(1.0, top_k=5), 15.0), (Sampling(1.0), 10.0), (Sampling(0.5, top_p=0.9), 10.0)],
)
def test_picks_that_are_paid_for_by_the_token_are_in_no_table(
    sampling: Sampling, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pick looks at all tokens it is made for the path alone: plain decoding makes as many."""
    hands, bench = Hands(), StepTimer(tiny_llama(), batch=1, context=128, sampling=sampling)
    bench._clock = hands
    monkeypatch.setattr("infer.engine.output.pick", hands.after(5.0, pick))
    monkeypatch.setattr(Runner, "forward", hands.after(10.0, Runner.forward))
    assert bench.step(1) == pytest.approx(left)
    monkeypatch.setattr("infer.engine.output.candidates", hands.after(3.0, candidates))
    assert bench.step(4) == pytest.approx(left + 3.0)


def test_fixed_shapes_of_all_rows_have_the_same_columns() -> None:
    """From 48 rows on a forward was measured over more columns of the cache: `auto` found its rows too dear."""
    bench = StepTimer(tiny_llama(), batch=1, context=256, static=True)
    for q in ROWS:
        bench.step(q)
    assert {shape.columns for shape in bench._runner._forward._graphs[GREEDY]} == {256}  # type: ignore[attr-defined]

"""Parts of a step's time, memory and graphs, of one decoded text."""

from collections.abc import Sequence
from functools import partial
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from infer import Model
from infer.config import DecodeConfig, DraftConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.drafters.outcome import Outcome
from infer.engine.reading import Request
from infer.engine.runner import Runner
from infer.loop import Drafter, Drafters, Limits, decode
from infer.methods import DraftMethods
from infer.models.draft import load_draft
from infer.speed import profile as module
from infer.speed.profile import peak_memory, profile, timed
from infer.study.models import Counts

CPU = torch.device("cpu")
REQUEST = Request([5, 17, 40, 3])
LIMITS = Limits(24)


class Watchmaker:
    """Time that passes only where it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def slowed(self, verb: Any, ms: float) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += ms / 1e3
            return verb(*args, **kwargs)

        return slow


def test_each_part_has_the_time_of_its_verbs(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Watchmaker()
    for kind, verb, ms in ((Drafter, "propose", 3), (Runner, "forward", 50), (Runner, "commit", 7)):
        monkeypatch.setattr(kind, verb, clock.slowed(getattr(kind, verb), ms))
    monkeypatch.setattr(Drafter, "observe", clock.slowed(Drafter.observe, 2))
    monkeypatch.setattr(Runner, "prefill", clock.slowed(Runner.prefill, 1000))
    runner = Runner(llama, capacity=64, max_rows=1)
    steps = timed(runner, Drafters(Drafter), REQUEST, Limits(5), clock=clock)
    assert [pytest.approx(spent) for _, spent in steps] == [(1003, 50, 9), *[(3, 50, 9)] * 3, (3, 50, 7)]


def test_a_profiled_text_is_the_text_on_the_runner_that_is_there(llama: LlamaForCausalLM) -> None:
    runner = Runner(llama, capacity=64, max_rows=8)
    drafters = Drafters(partial(AdaptiveDrafter, [7], FixedPolicy(3)))
    texts = [
        [step.tokens for step, _ in timed(runner, drafters, REQUEST, LIMITS)],
        [step.tokens for (step,) in decode(runner, [REQUEST], drafters, LIMITS)],
    ]
    assert texts[0] == texts[1]


def test_a_text_of_one_step_has_no_parts(llama: LlamaForCausalLM) -> None:
    runner = Runner(llama, capacity=64, max_rows=1)
    found = profile(runner, Drafters(Drafter), REQUEST, Limits(1), device=CPU)
    assert (found.ms_draft, found.ms_forward, found.ms_rest) == (None, None, None)
    assert found.drafted_nodes is None and found.graph_success is None


def test_a_draft_models_graphs_are_counted(model: Model) -> None:
    draft = load_draft(DraftConfig("self:1"), model.lm, rows=model.lm.config.vocab_size, adaptive=None)
    told = list[Outcome]()
    settings = DecodeConfig(method="gsd", tau=1, theta_prob=0.01, nodes=12)
    drafters = DraftMethods(model.lm, draft).drafters(
        settings, batch=1, capacity=64, left=50, watch=told.append
    )
    runner = Runner(model.lm, capacity=64, max_rows=drafters.max_rows)
    profiles = [
        profile(runner, drafters, REQUEST, LIMITS, device=CPU, outcomes=told) for _ in range(2)
    ]  # of the second, what the first was told is not counted again
    counts = [Counts.of(one) for one in told]
    assert len(counts) % 2 == 0 and counts[: len(counts) // 2] == counts[len(counts) // 2 :]
    for one in profiles:
        assert one.drafted_nodes == fmean(one.nodes for one in counts)
        assert one.graph_success == fmean(one.succeeded for one in counts)
        assert one.ms_draft and one.ms_forward and one.ms_rest


def test_the_peak_is_of_the_work_alone() -> None:
    """It failed in a process that had 64 MiB free in its heap, which a bytearray took: no page was added."""

    def work(size: int) -> int:
        with mmap(-1, size) as memory:
            for page in range(0, size, PAGESIZE):
                memory[page] = 1
        return size

    size, least = peak_memory(CPU, partial(work, 1))
    if least is None:
        pytest.skip("the peak cannot be reset here")
    high = peak_memory(CPU, partial(work, 2**26))
    after = peak_memory(CPU, partial(work, 1))[1]
    assert (size, high[0]) == (1, 2**26)
    assert high[1] is not None and after is not None
    assert high[1] - least > 2**25 and high[1] - after > 2**25


def test_the_work_is_done_where_no_peak_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROCESS", tmp_path / "absent")
    calls: Sequence[None] = []
    assert peak_memory(CPU, lambda: calls.append(None)) == (None, None) and len(calls) == 1

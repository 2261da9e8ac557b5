"""The units of a run, and how a rank does one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infer.benchmarks.prompts import TokenPrompt
from infer.measure import Decoder
from infer.speed.bench import Bench
from infer.speed.units import Group, Way, run_turn


class Unit(NamedTuple):
    """A turn of a prompt; without one, what is looked at once in a set: parts of the time, and sample texts."""

    prompt_set: str
    round: int | None = None
    prompt: int | None = None

    @property
    def name(self) -> str:
        """What it is kept as."""
        if self.round is None:
            return f"{self.prompt_set}-look"
        return f"{self.prompt_set}-{self.round:03}-{self.prompt:05}"


def units_of(prompts: Mapping[str, Sequence[TokenPrompt]], rounds: int) -> dict[str, Unit]:
    """By name, in the order in which they are done: the rounds of a prompt are as far apart as can be."""
    found = list[Unit]()
    for name, some in prompts.items():
        found += [Unit(name, round_, index) for round_ in range(rounds) for index in range(len(some))]
        found.append(Unit(name))
    return {unit.name: unit for unit in found}


class Worker:
    """Does units; warms up where a set begins."""

    def __init__(self, bench: Bench, prompts: Mapping[str, Sequence[TokenPrompt]]) -> None:
        self._bench, self._prompts = bench, prompts
        self._decoders = dict[Group, dict[Way, Decoder]]()
        self._set: str | None = None

    def __call__(self, unit: Unit) -> dict[str, Any]:
        """What is kept of it."""
        prompts = self._prompts[unit.prompt_set]
        with self._bench.enough_memory():
            if unit.round is None or unit.prompt is None:
                return {"parts": [], "samples": []}
            prompt = prompts[unit.prompt]
            self._begin(unit.prompt_set, prompt)
            groups = run_turn(self._decoders, prompt, unit.round + unit.prompt)
        return {"prompt_set": unit.prompt_set, "prompt": prompt.id, "round": unit.round, "groups": groups}

    def _begin(self, name: str, prompt: TokenPrompt) -> None:
        if name == self._set:
            return
        self._decoders = self._bench.decoders(name)
        for ways in self._decoders.values():
            for decoder in ways.values():
                decoder(prompt)
        self._set = name

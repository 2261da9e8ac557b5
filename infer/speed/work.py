"""The units of a run, and how a rank does one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from infer.benchmarks.prompts import TokenPrompt
from infer.drafters.outcome import Outcome
from infer.engine.reading import Request
from infer.measure.runs import Decoder, seed_of
from infer.speed.batches import run_batches
from infer.speed.bench import Bench, Own
from infer.speed.config import SpeedConfig
from infer.speed.prepare import Prepared
from infer.speed.profile import Profile, peak_memory, profile
from infer.speed.samples import sample, shown
from infer.speed.units import Group, Way, run_turn
from infer.speed.ways import DRAFTED


class Unit(NamedTuple):
    """A turn of a prompt. Without a prompt: a round of the batches; without a round: what is looked at once in
    a set, parts of the time and sample texts.
    """

    prompt_set: str
    round: int | None = None
    prompt: int | None = None

    @property
    def name(self) -> str:
        """What it is kept as."""
        if self.round is None:
            return f"{self.prompt_set}-look"
        if self.prompt is None:
            return f"{self.prompt_set}-{self.round:03}-batches"
        return f"{self.prompt_set}-{self.round:03}-{self.prompt:05}"


def units_of(
    prompts: Mapping[str, Sequence[TokenPrompt]], rounds: int, *, batches: bool = False
) -> dict[str, Unit]:
    """By name, in the order in which they are done: the rounds of a prompt are as far apart as can be."""
    found = list[Unit]()
    for name, some in prompts.items():
        found += [Unit(name, round_, index) for round_ in range(rounds) for index in range(len(some))]
        found += [Unit(name, round_) for round_ in range(rounds) if batches]
        found.append(Unit(name))
    return {unit.name: unit for unit in found}


class Worker:
    """Does units; warms up where a set begins."""

    def __init__(self, config: SpeedConfig, prepared: Prepared, bench: Bench) -> None:
        self._config, self._prepared, self._bench = config, prepared, bench
        self._own = dict[Group, dict[Way, Own]]()
        self._decoders = dict[Group, dict[Way, Decoder]]()
        self._set, self._warm = "", False
        self._warm_batches = set[tuple[str, str, int]]()

    def __call__(self, unit: Unit) -> dict[str, Any]:
        """What is kept of it."""
        with self._bench.enough_memory():
            if unit.prompt_set != self._set:
                self._begin(unit.prompt_set)
            prompts = self._prepared.prompts[unit.prompt_set]
            if unit.round is None:
                return self._look(prompts[0])
            if unit.prompt is None:
                return {"batches": list(self._batches(prompts, unit.round))}
            return self._turn(prompts[unit.prompt], unit.round, unit.round + unit.prompt)

    def _begin(self, name: str) -> None:
        self._own, self._decoders = {}, {}  # whose runners make room for the new ones
        self._set, self._own, self._warm = name, self._bench.own(name), False
        self._decoders = {
            group: {
                **{way: own.decoder(self._config.seed) for way, own in ways.items()},
                **self._bench.peers.decoders(group),
            }
            for group, ways in self._own.items()
        }

    def _warm_up(self, prompt: TokenPrompt) -> None:
        """Each decoder once on this prompt and once on the longest of the set, uncounted: of two texts there
        are more of the shapes that a GPU captures a graph of. Of a shape that comes up later it is captured in
        a counted run, which the median passes over where there are three rounds or more.
        """
        if self._warm:
            return
        longest = max(self._prepared.prompts[self._set], key=lambda one: len(one.ids))
        for one in dict.fromkeys((longest, prompt)):
            for ways in self._decoders.values():
                for decoder in ways.values():
                    decoder(one)
        self._warm = True

    def _turn(self, prompt: TokenPrompt, round_: int, turn: int) -> dict[str, Any]:
        self._warm_up(prompt)
        groups = run_turn(self._decoders, prompt, turn)
        return {"prompt_set": self._set, "prompt": prompt.id, "round": round_, "groups": groups}

    def _batches(self, prompts: Sequence[TokenPrompt], round_: int) -> Iterator[dict[str, Any]]:
        """Each size by plain decoding and by the default decoder; the first time after both once uncounted."""
        texts, seed = max(self._config.batches), self._config.seed
        for dtype, size in product(self._config.dtypes, self._config.batches):
            group = Group(dtype, min(self._config.temperatures))
            with self._bench.batch(self._set, group, size) as own:
                decoders = list(own.items())
                for _, one in decoders if (self._set, dtype, size) not in self._warm_batches else ():
                    run_batches(one, prompts, size, texts=size, seed=seed)
                self._warm_batches.add((self._set, dtype, size))
                records = {
                    name: run_batches(one, prompts, size, texts=texts, seed=seed)
                    for name, one in (reversed(decoders) if round_ % 2 else decoders)
                }
            yield {"prompt_set": self._set, **group._asdict(), "batch": size, **records}

    def _look(self, prompt: TokenPrompt) -> dict[str, Any]:
        """The sample texts are of the first dtype and the lowest temperature."""
        self._warm_up(prompt)
        parts = [
            {
                "prompt_set": self._set,
                **group._asdict(),
                **way._asdict(),
                **asdict(self._profile(prompt, group, way)),
            }
            for group, ways in self._decoders.items()
            for way in ways
        ]
        group = Group(self._config.dtypes[0], min(self._config.temperatures))
        samples = [
            {
                "prompt_set": self._set,
                "id": prompt.id,
                **group._asdict(),
                **way._asdict(),
                "before": prompt.before,
                "after": prompt.after,
                "pieces": sample(own, prompt, self._prepared.text, seed=self._config.seed),
            }
            for way, own in self._own[group].items()
            if way in shown(self._own[group])
        ]
        return {"parts": parts, "samples": samples}

    def _profile(self, prompt: TokenPrompt, group: Group, way: Way) -> Profile:
        """Of a peer the memory alone is known."""
        device = self._bench.lms[group.dtype].device
        if way not in self._own[group]:
            decoder = self._decoders[group][way]
            return Profile(peak_memory_bytes=peak_memory(device, partial(decoder, prompt))[1])
        own, outcomes = self._own[group][way], list[Outcome]()
        if way.decoder in DRAFTED:
            own = replace(own, drafters=self._bench.drafters(self._set, group, way, watch=outcomes.append))
        return profile(
            own.runner,
            own.drafters,
            Request(prompt.ids, seed_of(prompt, self._config.seed)),
            own.limits.of(prompt.ends, prompt.max_new_tokens),
            own.sampling,
            device=device,
            outcomes=outcomes,
        )

"""The units of a run, and how a rank does one: turns, texts side by side, and what is looked at once.

A turn is one prompt decoded once in every way. Every run stands next to one of plain decoding, its pair: what
slows the machine for seconds slows both. One run of plain decoding serves the two beside it. Of two turns a
decoder stands once before plain decoding and once behind it, and from turn to turn beside others:

    turn 0    A plain B    C plain D    E plain
    turn 1    B plain A    D plain C    plain E
    turn 2    B plain C    D plain E    A plain
    turn 3    C plain B    E plain D    plain A

Texts side by side: plain decoding and the default decoder on batches of a set's prompts. Every size decodes the
same texts. One decoder runs right after the other, in an order that turns from round to round. A rate is the
tokens of all texts per second, behind the first step of each batch.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice, pairwise, product
from statistics import median
from typing import Any, NamedTuple, TypeVar

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.output import Request
from infer.loop import decode
from infer.measure.runs import Decoder, Run, clock, loop_decoder, seed_of
from infer.speed import DRAFTED, PLAIN, Condition, DecoderSpec, SpeedConfig
from infer.speed.models import DecoderSetup, ModelPool, Prepared
from infer.speed.profile import Profile, peak_memory, profile
from infer.speed.statistics import Weighed, estimate
from infer.text import Output, Text, in_pieces
from infer.trees.token_graph import Outcome

K = TypeVar("K")


def blocks(names: Sequence[K], plain: K, turn: int) -> list[list[K]]:
    """Return the order of a turn: the pair of a name is the `plain` of its block."""
    if not names:
        return [[plain]]
    shift = turn // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    turns = [[rotated[at], plain, *rotated[at + 1 : at + 2]] for at in range(0, len(names), 2)]
    return [block[::-1] for block in turns] if turn % 2 else turns


def run_turn(
    decoders: Mapping[Condition, Mapping[DecoderSpec, Decoder]], prompt: TokenPrompt, turn: int
) -> list[dict[str, Any]]:
    """Return the records of a turn, a group each, in the order in which they ran."""
    groups = []
    for group, specs in decoders.items():
        ways = blocks([way for way in specs if way != PLAIN], PLAIN, turn)
        records = [[{**way._asdict(), **record(specs[way](prompt))} for way in block] for block in ways]
        groups.append({**group._asdict(), "blocks": records})
    return groups


def record(run: Run) -> dict[str, Any]:
    """Return a run in numbers: its counts and times, a fingerprint of its text, and by position how many drafts
    were judged, how many of them stood behind accepted drafts alone, and how many were accepted.
    """
    names = ("seconds", "first_tokens", "first_seconds", "forwards", "rows", "drafted", "accepted")
    milliseconds = Counter[str]()  # of a token, to three digits; those of the first step wait for the prompt
    for (_, before), (tokens, after) in pairwise(run.arrivals):
        milliseconds[f"{1e3 * (after - before) / tokens:.3g}"] += tokens
    return {
        "tokens": len(run.tokens),
        **{name: getattr(run, name) for name in (*names, "verifications", "levels")},
        "judged": by_position(run.depths),
        "right": by_position(run.accepts),
        "reached": by_position([min(deep, right + 1) for deep, right in zip(run.depths, run.accepts)]),
        "proposed": dict(run.proposed),
        "sources": dict(run.sources),
        "token_ms": dict(milliseconds),
        "text": _digest(run.tokens),
    }


def _digest(tokens: Iterable[int]) -> str:
    return hashlib.sha256(str(list(tokens)).encode()).hexdigest()[:16]


def by_position(depths: Sequence[int]) -> list[int]:
    """Return how many of these depths reach position 1, 2, ... of a draft."""
    return [sum(depth >= position for depth in depths) for position in range(1, max(depths, default=0) + 1)]


KEY = ("prompt_set", "dtype", "temperature", "batch")


def run_batches(
    own: DecoderSetup, prompts: Sequence[TokenPrompt], size: int, *, texts: int, seed: int
) -> dict[str, Any]:
    """Decode `texts` prompts, a small set's more than once, `size` side by side; return the record of it.

    What comes before the second step of a batch is not counted.
    """
    chosen, tokens, seconds, digests = list(islice(cycle(prompts), texts)), 0, 0.0, list[str]()
    limits = own.limits.of(prompts[0].ends, prompts[0].max_new_tokens)  # those of the whole set
    for at in range(0, texts, size):
        requests = [Request(prompt.ids, seed_of(prompt, seed)) for prompt in chosen[at : at + size]]
        outputs, first = [list[int]() for _ in requests], 0.0
        for steps in decode(own.runner, requests, own.drafters, limits, own.sampling):
            for step in steps:
                outputs[step.sequence] += step.tokens
            if not first:
                first, tokens = clock(), tokens - sum(map(len, outputs))
        tokens, seconds = tokens + sum(map(len, outputs)), seconds + clock() - first
        digests += map(_digest, outputs)
    return {"tokens": tokens, "seconds": seconds, "texts": digests}


def batch_rows(units: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each set, dtype and batch, of all rounds."""
    rounds_by_key: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for record in (record for unit in units for record in unit.get("batches", [])):
        if record["plain"]["tokens"] and record["auto"]["tokens"]:
            rounds = rounds_by_key.setdefault(tuple(record[name] for name in KEY), [])
            rounds.append((record["plain"], record["auto"]))
    rows = []
    for key, rounds in sorted(rounds_by_key.items()):
        rates = [[run["tokens"] / run["seconds"] for run in pair] for pair in rounds]
        speedup = estimate([[Weighed(run["seconds"], b / a) for (run, _), (a, b) in zip(rounds, rates)]])
        assert speedup
        rate = median(plain for plain, _ in rates)
        same = [a == b for plain, auto in rounds for a, b in zip(plain["texts"], auto["texts"], strict=True)]
        figures = {
            "rounds": len(rounds),
            "plain_tokens_per_second": rate,
            "tokens_per_second": rate * speedup.value,
            "speedup": speedup.value,
            "speedup_interval": speedup.interval,
            "identical": sum(same),
            "compared": len(same),
        }
        rows.append(dict(zip(KEY, key)) | figures)
    return rows


def sample(own: DecoderSetup, prompt: TokenPrompt, text: Text, *, seed: int) -> list[list[str]]:
    """Return the text in pieces of [kind, text], as Step.kinds has them."""
    output = Output(text.stream(opens=not prompt.before), ends=prompt.ends)
    limits = replace(own.limits.of((), prompt.max_new_tokens), stop=lambda _: output)
    request = Request(prompt.ids, seed_of(prompt, seed))
    steps = (step for (step,) in decode(own.runner, [request], own.drafters, limits, own.sampling))
    return in_pieces(
        tokens for step in steps for tokens in zip(step.kinds, output.take(finished=step.finished), strict=True)
    )


class Unit(NamedTuple):
    """A turn of a prompt. Without a prompt: a round of the batches; without a round: what is looked at once in
    a set, parts of the time and sample texts.
    """

    prompt_set: str
    round: int | None = None
    prompt: int | None = None

    @property
    def name(self) -> str:
        """The name that it is stored by."""
        if self.round is None:
            return f"{self.prompt_set}-look"
        if self.prompt is None:
            return f"{self.prompt_set}-{self.round:03}-batches"
        return f"{self.prompt_set}-{self.round:03}-{self.prompt:05}"


def units_of(
    prompts: Mapping[str, Sequence[TokenPrompt]], rounds: int, *, batches: bool = False
) -> dict[str, Unit]:
    """Return units by name, in the order of work: rounds of a prompt are as far apart as can be."""
    units = list[Unit]()
    for name, prompt_set in prompts.items():
        units += [Unit(name, round_, index) for round_ in range(rounds) for index in range(len(prompt_set))]
        units += [Unit(name, round_) for round_ in range(rounds) if batches]
        units.append(Unit(name))
    return {unit.name: unit for unit in units}


class Worker:
    """Does units; warms up where a set begins."""

    def __init__(self, config: SpeedConfig, prepared: Prepared, bench: ModelPool) -> None:
        self._config, self._prepared, self._bench = config, prepared, bench
        self._own = dict[Condition, dict[DecoderSpec, DecoderSetup]]()
        self._decoders = dict[Condition, dict[DecoderSpec, Decoder]]()
        self._set, self._warm = "", False
        self._warm_batches = set[tuple[str, str, int]]()

    def __call__(self, unit: Unit) -> dict[str, Any]:
        """Return the measurements of a unit."""
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
        for group, specs in self._own.items():
            ours = {
                way: loop_decoder(own.runner, own.drafters, own.limits, own.sampling, seed=self._config.seed)
                for way, own in specs.items()
            }
            self._decoders[group] = ours | self._bench.peers.by_group[group]

    def _warm_up(self, prompt: TokenPrompt) -> None:
        """Run each decoder on this prompt and on the longest of the set, uncounted: two texts have more of the
        shapes that a GPU captures a graph of. Others are captured in counted runs, of which medians are taken.
        """
        if self._warm:
            return
        longest = max(self._prepared.prompts[self._set], key=lambda prompt_: len(prompt_.ids))
        for text, specs in product(dict.fromkeys((longest, prompt)), self._decoders.values()):
            for decoder in specs.values():
                decoder(text)
        self._warm = True

    def _turn(self, prompt: TokenPrompt, round_: int, turn: int) -> dict[str, Any]:
        self._warm_up(prompt)
        groups = run_turn(self._decoders, prompt, turn)
        return {"prompt_set": self._set, "prompt": prompt.id, "round": round_, "groups": groups}

    def _batches(self, prompts: Sequence[TokenPrompt], round_: int) -> Iterator[dict[str, Any]]:
        texts, seed = max(self._config.batches), self._config.seed
        for dtype, size in product(self._config.dtypes, self._config.batches):
            group = Condition(dtype, min(self._config.temperatures))
            with self._bench.batch(self._set, group, size) as own:
                decoders = list(own.items())
                for _, setup in decoders if (self._set, dtype, size) not in self._warm_batches else ():
                    run_batches(setup, prompts, size, texts=size, seed=seed)
                self._warm_batches.add((self._set, dtype, size))
                records = {
                    name: run_batches(setup, prompts, size, texts=texts, seed=seed)
                    for name, setup in (reversed(decoders) if round_ % 2 else decoders)
                }
            yield {"prompt_set": self._set, **group._asdict(), "batch": size, **records}

    def _look(self, prompt: TokenPrompt) -> dict[str, Any]:
        """Profile all decoders; sample texts are of the first dtype, lowest temperature, and largest k."""
        self._warm_up(prompt)
        parts = [
            {"prompt_set": self._set, **group._asdict(), **way._asdict()}
            | asdict(self._profile(prompt, group, way))
            for group, specs in self._decoders.items()
            for way in specs
        ]
        group = Condition(self._config.dtypes[0], min(self._config.temperatures))
        place = {"prompt_set": self._set, "id": prompt.id, **group._asdict()}
        given, seed = {"before": prompt.before, "after": prompt.after}, self._config.seed
        deepest = max((way.k for way in self._own[group] if way.decoder == "sdsat"), default=0)
        samples = [
            {**place, **way._asdict(), **given, "pieces": sample(own, prompt, self._prepared.text, seed=seed)}
            for way, own in self._own[group].items()
            if way.decoder != "base" and way.k in (0, deepest)
        ]
        return {"parts": parts, "samples": samples}

    def _profile(self, prompt: TokenPrompt, group: Condition, way: DecoderSpec) -> Profile:
        device = self._bench.lms[group.dtype].device
        if way not in self._own[group]:
            decoder = self._decoders[group][way]
            return Profile(peak_memory_bytes=peak_memory(device, partial(decoder, prompt))[1])
        own, outcomes = self._own[group][way], list[Outcome]()
        if way.decoder in DRAFTED:
            own = replace(own, drafters=self._bench.drafters(self._set, group, way, watch=outcomes.append))
        request = Request(prompt.ids, seed_of(prompt, self._config.seed))
        limits = own.limits.of(prompt.ends, prompt.max_new_tokens)
        return profile(
            own.runner, own.drafters, request, limits, own.sampling, device=device, outcomes=outcomes
        )

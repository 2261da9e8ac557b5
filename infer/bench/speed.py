"""Speed: prompts decoded plainly and with drafts, in pairs.

Every run stands next to one of plain decoding, its pair: what slows the machine for seconds slows both. One
run of plain decoding serves the two beside it, and from turn to turn a decoder stands beside others:

    turn 0    A plain B    C plain D    E plain
    turn 1    B plain A    D plain C    plain E
    turn 2    B plain C    D plain E    A plain

A run's time is that of the whole text, its prompt included.
"""

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any, TypeVar

from infer.api import Model, generate
from infer.bench import statistics
from infer.bench.config import BenchConfig
from infer.bench.peers import peer_decoders
from infer.bench.prompts import Prompt
from infer.config import SOURCES, DecodeConfig
from infer.engine.runner import duration
from infer.engine.sampling import SEEDS
from infer.loop import Step

K = TypeVar("K")
PLAIN = "plain"
BASE = "base, plain"
PEER = "hf "  # begins the name of a decoder of Transformers
WARM_UP = 8  # new tokens of each decoder's first run, which is not counted


@dataclass
class Run:
    """One prompt decoded once; times are in seconds from the prompt on.

    A verification is a forward that judged at least one draft. `judged`, `reached` and `right` count by
    position the drafts that were judged, those of them behind accepted drafts alone, and the accepted ones.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float = 0.0  # until the first tokens were there
    forwards: int = 0
    rows: int = 0  # fed in all forwards but the prompt's
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    proposed: dict[str, int] = field(default_factory=dict)  # drafts by source
    sources: dict[str, int] = field(default_factory=dict)  # accepted drafts by source

    def record(self) -> dict[str, Any]:
        """Return the run as JSON, with the number and a fingerprint of its tokens."""
        text = hashlib.sha256(str(self.tokens).encode()).hexdigest()[:16]
        return asdict(self) | {"tokens": len(self.tokens), "text": text}


Decoder = Callable[[Prompt], Run]


def decoder(model: Model, decode: DecodeConfig, *, seed: int) -> Decoder:
    """Return a way to decode as a function of the prompt."""

    def run(prompt: Prompt) -> Run:
        began = time.perf_counter()
        first = 0.0
        steps: list[Step] = []
        for step in generate(
            model, [prompt.ids], decode, seeds=[seed_of(prompt, seed)]
        ):
            first = first or time.perf_counter()  # the tokens are on the host
            steps.append(step)
        return run_of(
            steps,
            seconds=duration(began, time.perf_counter()),
            first_seconds=first - began,
        )

    return run


def run_of(steps: Sequence[Step], *, seconds: float, first_seconds: float) -> Run:
    """Return what the steps of one text came to."""
    # An end within the accepted drafts hides those behind it.
    judged = [
        step.accepted if step.accepted == len(step.tokens) else step.depth
        for step in steps
    ]
    right = [step.accepted for step in steps]
    return Run(
        tokens=[token for step in steps for token in step.tokens],
        seconds=seconds,
        first_seconds=first_seconds,
        forwards=len(steps),
        rows=sum(step.rows for step in steps),
        verifications=sum(step.drafted > 0 for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(right),
        judged=by_position(judged),
        reached=by_position([min(deep, done + 1) for deep, done in zip(judged, right)]),
        right=by_position(right),
        proposed=dict(Counter(source for step in steps for source in step.proposed)),
        sources=dict(Counter(source for step in steps for source in step.sources)),
    )


def by_position(depths: Sequence[int]) -> list[int]:
    """Return how many of these depths reach position 1, 2, ... of a draft."""
    return [
        sum(depth >= position for depth in depths)
        for position in range(1, max(depths, default=0) + 1)
    ]


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return a seed of the prompt alone: the same in every round, for every decoder and on every rank."""
    return (seed + zlib.crc32(prompt.id.encode())) % SEEDS


def decoders_of(
    config: BenchConfig, model: Model, base: Model | None
) -> dict[float, dict[str, Decoder]]:
    """Return the decoders by temperature and name, plain decoding first."""
    result: dict[float, dict[str, Decoder]] = {}
    for temperature in config.speed.temperatures:
        decodes = config.speed.decodes(temperature, draft=model.draft is not None)
        named = {
            name: decoder(model, decode, seed=config.seed)
            for name, decode in decodes.items()
        }
        if base:
            named[BASE] = decoder(base, decodes[PLAIN], seed=config.seed)
        for name, generated in peer_decoders(
            model, decodes[PLAIN], config.speed.peers
        ).items():
            named[f"{PEER}{name}"] = peer_runs(generated, config.seed)
        result[temperature] = named
    return result


def peer_runs(
    generated: Callable[[Prompt, int], Mapping[str, Any]], seed: int
) -> Decoder:
    """Return a peer as a function of the prompt; its seed is that of our decoders."""
    return lambda prompt: Run(**generated(prompt, seed_of(prompt, seed)))


def blocks(names: Sequence[K], plain: K, turn: int) -> list[list[K]]:
    """Return the order of a turn: the pair of a name is the `plain` of its block."""
    if not names:
        return [[plain]]
    shift = turn // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    turns = [
        [rotated[at], plain, *rotated[at + 1 : at + 2]]
        for at in range(0, len(names), 2)
    ]
    return [block[::-1] for block in turns] if turn % 2 else turns


def measure_turn(
    decoders: Mapping[float, Mapping[str, Decoder]], prompt: Prompt, turn: int
) -> list[dict[str, Any]]:
    """Return the runs of a prompt by every decoder, each with the seconds, tokens and text of its pair."""
    records = []
    for temperature, named in decoders.items():
        for block in blocks([name for name in named if name != PLAIN], PLAIN, turn):
            runs = {name: named[name](prompt).record() for name in block}
            plain = {name: runs[PLAIN][name] for name in ("seconds", "tokens", "text")}
            for name, run in runs.items():
                records.append(
                    {"decoder": name, "temperature": temperature, "plain": plain, **run}
                )
    return records


def rows_of(
    records: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the report's rows of the records of turns: one for each prompt set, temperature and decoder.

    Rows are in the order of the sets, of rising temperature and of the decoders' `order`.
    """
    groups: dict[tuple[str, float, str], dict[str, list[dict[str, Any]]]] = {}
    for name, turn in records.items():
        for run in turn["runs"]:
            by_prompt = groups.setdefault(
                (turn["prompt_set"], run["temperature"], run["decoder"]), {}
            )
            by_prompt.setdefault(turn["prompt"], []).append({"turn": name, **run})
    sets = list(dict.fromkeys(name for name, _, _ in groups))
    keys = sorted(
        groups, key=lambda key: (sets.index(key[0]), key[1], order.index(key[2]))
    )
    rows: list[dict[str, Any]] = []
    rates: dict[tuple[str, float], float] = {}
    for prompt_set, temperature, name in keys:
        row: dict[str, Any] = {
            "prompt_set": prompt_set,
            "temperature": temperature,
            "decoder": name,
        }
        row |= row_of(list(groups[prompt_set, temperature, name].values()))
        if name == PLAIN:
            rates[prompt_set, temperature] = row["measured_tokens_per_second"]
        # A decoder's own rate is of other moments than plain decoding's median, and may contradict its pairs.
        row["output_tokens_per_second"] = (
            rates[prompt_set, temperature] * row["speedup"]
        )
        # Plain decoding is its own pair; a base and a sampling peer have other texts by their nature.
        if name in (PLAIN, BASE) or (temperature and name.startswith(PEER)):
            row["same"] = row["compared"] = 0
        rows.append(row)
    return rows


def row_of(prompts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one decoder on a set; `prompts[p]` are the runs of prompt p.

    mean_acceptance_length is 1 + accepted / verifications, draft_acceptance_rate accepted over drafted tokens;
    survival is vLLM's acceptance rate per position: the share of verifications whose drafts were accepted up to
    that place; conditional is the share of the drafts that were reached there.
    """
    runs = [run for runs in prompts for run in runs]
    names = ("tokens", "forwards", "rows", "verifications", "drafted", "accepted")
    total = {name: sum(run[name] for run in runs) for name in names}
    ratios = [
        [
            (run["plain"]["seconds"], _rate(run) / _rate(run["plain"]))
            for run in of_prompt
        ]
        for of_prompt in prompts
    ]
    speedup, interval = statistics.speedup(ratios)
    verifications = total["verifications"]
    forwards = total["forwards"]
    right = _summed(run["right"] for run in runs)
    reached = _summed(run["reached"] for run in runs)
    return {
        "prompts": len(prompts),
        "rounds": max(len({run["turn"] for run in of_prompt}) for of_prompt in prompts),
        **total,
        "measured_tokens_per_second": median(_rate(run) for run in runs),
        "speedup": speedup,
        "speedup_interval": interval,
        "first_token_ms": 1e3 * median(run["first_seconds"] for run in runs),
        "tokens_per_forward": total["tokens"] / forwards if forwards else None,
        "rows_per_forward": total["rows"] / forwards if forwards else None,
        "mean_acceptance_length": 1 + total["accepted"] / verifications
        if verifications
        else None,
        "draft_acceptance_rate": total["accepted"] / total["drafted"]
        if total["drafted"]
        else None,
        "survival": [count / verifications for count in right],
        "conditional": [a / b for a, b in zip(right, reached)],
        "sources": _by_source(runs),
        "same": sum(run["text"] == run["plain"]["text"] for run in runs),
        "compared": len(runs),
    }


def _rate(run: Mapping[str, Any]) -> float:
    return run["tokens"] / run["seconds"]


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(places) for places in zip_longest(*counts, fillvalue=0)]


def _by_source(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by source its share of the accepted drafts, and the share of its drafts that was accepted."""
    result = {}
    accepted = sum(sum(run["sources"].values()) for run in runs)
    for source in SOURCES:
        proposed = sum(run["proposed"].get(source, 0) for run in runs)
        own = sum(run["sources"].get(source, 0) for run in runs)
        if proposed:
            result[source] = {
                "share": own / accepted if accepted else 0.0,
                "acceptance": own / proposed,
            }
    return result

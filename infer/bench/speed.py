"""Speed: prompts decoded plainly and with drafts, in pairs.

Every run stands beside a run of plain decoding, its pair, so that a change of the machine's
speed meets both. One run of plain decoding serves its two neighbours, and the order changes
from turn to turn:

    turn 0    A plain B    C plain D    E plain
    turn 1    B plain A    D plain C    plain E
    turn 2    B plain C    D plain E    A plain

The time of a run is that of the whole text, its prompt included.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from conf.console import print_line
from infer.api import Model
from infer.bench import statistics
from infer.bench.config import BenchConfig
from infer.bench.harness import Part, WorkerGroup
from infer.bench.peers import peer_decoders
from infer.bench.progress import progress
from infer.bench.prompts import Prompt
from infer.bench.roofline import measure_roofline
from infer.bench.runs import Decoder, decoder

K = TypeVar("K")
Row = dict[str, Any]
PLAIN = "plain"
BASE = "base, plain"
SDSAT = "sdsat k="  # begins the names of the paper's decoder
PEER = "hf "  # begins the names of Transformers' decoders
TOTALS = ("tokens", "forwards", "verifications", "drafted", "accepted")


class SpeedPart(Part):
    """part=speed: a record is a turn, in which each decoder decodes a prompt once."""

    title = "speed"

    @property
    def tasks(self) -> dict[str, tuple[str, int, int]]:  # type: ignore[override]
        """The set, round and prompt of each turn."""
        return {
            f"{name}-{round_:03}-{index:05}": (name, round_, index)
            for name, prompts in self.sets.items()
            for round_ in range(self.config.speed.rounds)
            for index in range(len(prompts))
        }

    def load(self, workers: WorkerGroup) -> None:
        """Load the models, and decode the longest prompt once by each decoder."""
        super().load(workers)
        self._decoders = decoders_of(self.config, self.model, self.base)
        prompts = [prompt for prompts in self.sets.values() for prompt in prompts]
        longest = max(prompts, key=lambda prompt: len(prompt.ids))
        warm_up = [
            decode
            for decoders in self._decoders.values()
            for decode in decoders.values()
        ]
        title = "warm-up: decoders"
        with progress(title, len(warm_up), silent=not workers.first) as advance:
            for decode in warm_up:
                decode(longest)
                advance()

    def measure(self, task: tuple[str, int, int]) -> Row:
        """Return the runs of a turn."""
        prompt_set, round_, index = task
        prompt = self.sets[prompt_set][index]
        runs = measure_turn(self._decoders, prompt, round_ + index)
        return {"prompt_set": prompt_set, "prompt": prompt.id, "runs": runs}

    def result(self, records: Mapping[str, Row], folder: Path) -> dict[str, Any]:
        """Return the rows of the report, and the roofline."""
        print_line("bench: measuring the time of a forward by its rows ...")
        order = list(next(iter(self._decoders.values())))
        return {
            "rows": rows_of(records, order),
            "roofline": measure_roofline(self.model.lm),
            "chat": [
                name
                for name, prompts in self.sets.items()
                if any(prompt.chat for prompt in prompts)
            ],
        }


def decoders_of(
    config: BenchConfig, model: Model, base: Model | None
) -> dict[float, dict[str, Decoder]]:
    """Return the decoders by temperature and name, plain decoding first."""
    decoders: dict[float, dict[str, Decoder]] = {}
    for temperature in config.speed.temperatures:
        configs = config.speed.decode_configs(
            temperature, max_k=max_k(model), draft=model.draft is not None
        )
        named = {
            name: decoder(model, decode, seed=config.seed)
            for name, decode in configs.items()
        }
        if base:
            named[BASE] = decoder(base, configs[PLAIN], seed=config.seed)
        peers = peer_decoders(model, configs[PLAIN], config.speed.peers, config.seed)
        named |= {f"{PEER}{name}": peer for name, peer in peers.items()}
        decoders[temperature] = named
    return decoders


def max_k(model: Model) -> int:
    """Return how many adaptive tokens the model can have in a row."""
    ids = model.adaptive.ids if model.adaptive else ()
    return sys.maxsize if len(ids) == 1 else len(ids)  # one id may be repeated


def blocks(names: Sequence[K], plain: K, turn: int) -> list[list[K]]:
    """Return the order of a turn, in blocks of a run of `plain` and its neighbours."""
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
) -> list[Row]:
    """Return a prompt's run by each decoder, with seconds, tokens and text of its pair."""
    records = []
    for temperature, named in decoders.items():
        for block in blocks([name for name in named if name != PLAIN], PLAIN, turn):
            runs = {name: named[name](prompt).record() for name in block}
            plain = {name: runs[PLAIN][name] for name in ("seconds", "tokens", "text")}
            for name, run in runs.items():
                key = {"decoder": name, "temperature": temperature}
                records.append({**key, "plain": plain, **run})
    return records


def rows_of(records: Mapping[str, Row], order: Sequence[str]) -> list[Row]:
    """Return a row for each prompt set, temperature and decoder, in this order.

    `order` has all decoders.
    """
    groups: dict[tuple[str, float, str], dict[str, list[Row]]] = {}
    for turn in records.values():
        for run in turn["runs"]:
            key = (turn["prompt_set"], run["temperature"], run["decoder"])
            groups.setdefault(key, {}).setdefault(turn["prompt"], []).append(run)
    sets = list(dict.fromkeys(name for name, _, _ in groups))
    keys = sorted(groups, key=lambda k: (sets.index(k[0]), k[1], order.index(k[2])))
    rows: list[Row] = []
    plain_rate = 0.0
    for key in keys:
        prompt_set, temperature, name = key
        row = figures(list(groups[key].values()), k=k_of(name))
        if name == PLAIN:
            plain_rate = row["measured_tokens_per_second"]
        # The decoder's own rate is of other moments than plain decoding's median, and may
        # contradict its pairs.
        row["output_tokens_per_second"] = plain_rate * row["speedup"]
        # Plain decoding is its own pair. A base and sampling peers give other texts.
        if name in (PLAIN, BASE) or (temperature and name.startswith(PEER)):
            row["same"] = row["compared"] = 0
        place = {"prompt_set": prompt_set, "temperature": temperature, "decoder": name}
        rows.append({**place, **row})
    return rows


def k_of(name: str) -> int | None:
    """Return the k of a decoder named "sdsat k=5"; None for another decoder."""
    return int(name.removeprefix(SDSAT)) if name.startswith(SDSAT) else None


def figures(prompts: Sequence[Sequence[Row]], *, k: int | None = None) -> Row:
    """Return the figures of one decoder on a set; `prompts[p]` are the runs of prompt p.

    acceptance_rate is SDSAT's for its `k`, accepted / (k x verifications), also where a tree
    has more nodes; without `k` it is draft_acceptance_rate.
    mean_acceptance_length is 1 + accepted / verifications, draft_acceptance_rate accepted over
    drafted tokens. survival is vLLM's acceptance rate per position, the share of verifications
    whose drafts were accepted up to there.
    """
    runs = [run for runs in prompts for run in runs]
    total = {name: sum(run[name] for run in runs) for name in TOTALS}
    pairs = [
        [(run["plain"]["seconds"], _rate(run) / _rate(run["plain"])) for run in runs]
        for runs in prompts
    ]
    speedup, interval = statistics.speedup(pairs)
    verifications = total["verifications"]
    right = [sum(n) for n in zip_longest(*(run["right"] for run in runs), fillvalue=0)]
    return {
        "prompts": len(prompts),
        **total,
        "measured_tokens_per_second": median(map(_rate, runs)),
        "speedup": speedup,
        "speedup_interval": interval,
        "first_token_ms": 1e3 * median(run["first_seconds"] for run in runs),
        "tokens_per_forward": _ratio(total["tokens"], total["forwards"]),
        "mean_acceptance_length": _ratio(
            verifications + total["accepted"], verifications
        ),
        "acceptance_rate": _ratio(
            total["accepted"], k * verifications if k else total["drafted"]
        ),
        "draft_acceptance_rate": _ratio(total["accepted"], total["drafted"]),
        "survival": [count / verifications for count in right],
        "sources": _shares_by_source(runs),
        "same": sum(run["text"] == run["plain"]["text"] for run in runs),
        "compared": len(runs),
    }


def _rate(run: Row) -> float:
    return run["tokens"] / run["seconds"]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares_by_source(runs: Sequence[Row]) -> dict[str, float]:
    """Return each source's share of the accepted drafts."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run["sources"])
    return {source: counts[source] / counts.total() for source in sorted(counts)}

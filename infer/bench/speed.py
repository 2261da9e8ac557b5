"""Measure the speed of decoders: prompts are decoded with and without drafts, in turns.

A run of plain decoding comes between each two other runs, and the order changes from turn to
turn (runs.blocks), so that changes of the machine's speed affect all decoders equally. Every
step is timed. The time of a text is computed from the fast steps of the same shape in all texts
(timing.py), and a speedup from the times of all texts of a set. Plain decoding is measured a
second time as if it were another decoder: its speedup must be 1 (marks.py).
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

from conf.console import print_once
from infer.api import Model
from infer.bench.config import BenchConfig
from infer.bench.harness import Part, Record, WorkerGroup, digest
from infer.bench.marks import busy_warnings, mark_rows
from infer.bench.names import BASE, PEER, PLAIN, PLAIN_AGAIN, k_of
from infer.bench.peers import peer_decoders
from infer.bench.progress import progress
from infer.bench.prompts import Prompt
from infer.bench.roofline import measure_roofline
from infer.bench.runs import Decoder, blocks, decoder
from infer.bench.timing import (
    StepTimes,
    TextTimes,
    TimedStep,
    speedup,
    speedup_interval,
)
from infer.config import Infill
from infer.prompts import Document, prompt_of

TOTALS = ("tokens", "forwards", "verifications", "drafted", "accepted")


class SpeedPart(Part):
    """part=speed. A record is a turn: each decoder decodes a prompt once."""

    title = "speed"

    @property
    def tasks(self) -> dict[str, tuple[str, int, int]]:  # type: ignore[override]
        """The prompt set, round and prompt of each turn."""
        return {
            f"{name}-{round_:03}-{index:05}": (name, round_, index)
            for name, prompts in self.sets.items()
            for round_ in range(self.config.speed.rounds)
            for index in range(len(prompts))
        }

    def load(self, workers: WorkerGroup) -> None:
        """Load the models, and decode the longest prompt once by each decoder."""
        super().load(workers)
        most = max_k(self.model)
        larger = [k for k in self.config.speed.k if k > most]
        if most and larger and "sdsat" in self.config.speed.decoders:
            print_once(
                f"bench: speed.k={','.join(map(str, larger))} left out: the model has {most} "
                "different adaptive tokens",
                error=True,
            )
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

    def measure(self, task: tuple[str, int, int]) -> Record:
        """Return the runs of a turn."""
        prompt_set, round_, index = task
        prompt = self.sets[prompt_set][index]
        runs = measure_turn(self._decoders, prompt, round_ + index)
        return {"prompt_set": prompt_set, "prompt": prompt.id, "runs": runs}

    def result(self, records: Mapping[str, Record], folder: Path) -> dict[str, Any]:
        """Return the rows of the report, the prompt sets with chats, and sets by prompt length."""
        order = list(next(iter(self._decoders.values())))
        scale = 1.0
        if self.base:
            scale = self.model.lm.num_parameters() / self.base.lm.num_parameters()
        rows = rows_of(records, order, base_scale=scale)
        return {
            "rows": rows,
            "warnings": busy_warnings(rows),
            "content": {
                name: digest([self._source(prompt) for prompt in prompts])
                for name, prompts in self.sets.items()
            },
            "chat": [
                name
                for name, prompts in self.sets.items()
                if any(prompt.chat for prompt in prompts)
            ],
            "lengths": {
                name: [name.removesuffix(f"-{length}"), length]
                for name in self.sets
                for length in self.config.prompt_lengths
                if name.endswith(f"-{length}")
            },
        }

    def _source(self, prompt: Prompt) -> Any:
        """Return what a prompt is made from: models with different tokenizers can be compared."""
        form = prompt_of(prompt.row)
        if isinstance(form, Document):
            return [prompt.row, self.config.prompt_tokens]
        if isinstance(form, Infill):
            return [prompt.row, self.config.infilling_order]
        return prompt.row

    def measure_model(self) -> Record:
        """Return the roofline: measured and smallest possible times of a forward by its number of rows."""
        print_once("bench: measuring the time of a forward by its rows ...")
        return {"roofline": measure_roofline(self.model.lm)}


def decoders_of(
    config: BenchConfig, model: Model, base: Model | None
) -> dict[float, dict[str, Decoder]]:
    """Return the decoders by temperature and name, with the two of plain decoding first."""
    decoders: dict[float, dict[str, Decoder]] = {}
    for temperature in config.speed.temperatures:
        configs = config.speed.decode_configs(
            temperature,
            max_k=max_k(model),
            draft=model.draft is not None,
            gsd=config.gsd,
        )
        named = {
            name: decoder(model, decode, seed=config.seed)
            for name, decode in configs.items()
        }
        named = {PLAIN: named[PLAIN], PLAIN_AGAIN: named[PLAIN], **named}
        if base:
            named[BASE] = decoder(base, configs[PLAIN], seed=config.seed)
        peers = peer_decoders(model, configs[PLAIN], config.speed.peers, config.seed)
        named |= {f"{PEER}{name}": peer for name, peer in peers.items()}
        decoders[temperature] = named
    return decoders


def max_k(model: Model) -> int:
    """Return the largest number of consecutive adaptive tokens that the model supports."""
    mask = model.methods.mask
    return sys.maxsize if mask.most is None else mask.most


def measure_turn(
    decoders: Mapping[float, Mapping[str, Decoder]], prompt: Prompt, turn: int
) -> list[Record]:
    """Decode a prompt by each decoder; return the runs, with the text of the paired plain run."""
    records = []
    for temperature, named in decoders.items():
        for block in blocks([name for name in named if name != PLAIN], PLAIN, turn):
            runs = {name: named[name](prompt).record() for name in block}
            plain = runs[PLAIN]["text"]
            for name, run in runs.items():
                key = {"decoder": name, "temperature": temperature}
                records.append({**key, "plain_text": plain, **run})
    return records


def rows_of(
    records: Mapping[str, Record], order: Sequence[str], *, base_scale: float = 1.0
) -> list[Record]:
    """Return a marked row for each prompt set, temperature and decoder, in this order.

    `order` has all decoders. `base_scale` is the number of the model's weights over the number
    of its base's weights.
    """
    groups: dict[tuple[str, float, str], dict[str, list[Record]]] = {}
    fastest_first: dict[tuple[str, str], float] = {}
    for turn in records.values():
        prompt = turn["prompt_set"], turn["prompt"]
        first = [fastest_first.get(prompt, math.inf)]
        first += [run["first_seconds"] for run in turn["runs"]]
        fastest_first[prompt] = min(first)
        for run in turn["runs"]:
            key = (turn["prompt_set"], run["temperature"], run["decoder"])
            groups.setdefault(key, {}).setdefault(turn["prompt"], []).append(run)
    sets = list(dict.fromkeys(name for name, _, _ in groups))
    keys = sorted(groups, key=lambda k: (sets.index(k[0]), k[1], order.index(k[2])))
    rows: list[Record] = []
    for prompt_set, temperature, name in keys:
        plain = groups[prompt_set, temperature, PLAIN]
        runs = groups[prompt_set, temperature, name]
        row = figures(
            list(runs.values()),
            [plain[prompt] for prompt in runs],
            [fastest_first[prompt_set, prompt] for prompt in runs],
            k=k_of(name),
        )
        # Plain decoding is its own pair. Texts of a base and of sampling peers always differ.
        if name in (PLAIN, BASE) or (temperature and name.startswith(PEER)):
            row["same"] = row["compared"] = 0
        columns = {
            "prompt_set": prompt_set,
            "temperature": temperature,
            "decoder": name,
        }
        rows.append({**columns, **row})
    return mark_rows(rows, base_scale=base_scale)


def figures(
    prompts: Sequence[Sequence[Record]],
    plain: Sequence[Sequence[Record]],
    fastest_first: Sequence[float],
    *,
    k: int | None = None,
) -> Record:
    """Return the figures of one decoder on a prompt set.

    `prompts[p]` are the runs of prompt p, and `plain[p]` its runs by plain decoding.
    `fastest_first[p]` is the time in seconds of the prompt's fastest first step by any decoder.

    mean_acceptance_length   1 + accepted / verifications
    draft_acceptance_rate    accepted / drafted tokens
    acceptance_rate          SDSAT's for its `k`: accepted / (k * verifications), even if a tree
                             has more nodes; without `k` the draft_acceptance_rate
    survival                 vLLM's acceptance rate per position: the share of verifications
                             that accepted the drafts up to a position
    seconds, cpu_seconds     measured by the clock, sums over all runs
    """
    runs = [run for runs in prompts for run in runs]
    total = {name: sum(run[name] for run in runs) for name in TOTALS}
    verifications = total["verifications"]
    right = [sum(n) for n in zip_longest(*(run["right"] for run in runs), fillvalue=0)]
    return {
        "prompts": len(prompts),
        **total,
        **speeds(prompts, plain, fastest_first),
        **machine_load(runs),
        "first_token_ms": 1e3
        * median(min(run["first_seconds"] for run in runs) for runs in prompts),
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
        "same": sum(run["text"] == run["plain_text"] for run in runs),
        "compared": len(runs),
    }


def speeds(
    prompts: Sequence[Sequence[Record]],
    plain: Sequence[Sequence[Record]],
    fastest_first: Sequence[float],
) -> Record:
    """Return the speedup over plain decoding and the tokens per second.

    speedup_of_whole_texts is computed from each prompt's fastest runs.
    """
    tokens = [fmean(run["tokens"] for run in runs) for runs in plain]
    own = [fmean(run["tokens"] for run in runs) for runs in prompts]
    scale = [of_plain / of_decoder for of_plain, of_decoder in zip(tokens, own)]
    whole = whole_texts(plain), whole_texts(prompts)
    times = whole
    # Times from steps are not compared with times of whole texts.
    if all(
        has_steps(run) for each in (plain, prompts) for runs in each for run in runs
    ):
        times = (
            TextTimes(timed_steps(plain), fastest_first),
            TextTimes(timed_steps(prompts), fastest_first),
        )
    value = float(speedup(*times, scale)[0])
    return {
        "speedup": value,
        "speedup_interval": speedup_interval(*times, scale),
        "speedup_of_whole_texts": float(speedup(*whole, scale)[0]),
        "output_tokens_per_second": value * sum(tokens) / times[0].seconds,
    }


def has_steps(run: Record) -> bool:
    """Return True if the clock measured each step of a run."""
    return bool(run.get("steps")) and StepTimes.parse(run["steps"]).resolved


def timed_steps(prompts: Sequence[Sequence[Record]]) -> list[list[list[TimedStep]]]:
    """Return the timed steps of a decoder's runs, by prompt."""
    return [[StepTimes.parse(run["steps"]).timed() for run in runs] for runs in prompts]


def whole_texts(prompts: Sequence[Sequence[Record]]) -> TextTimes:
    """Return the times of a decoder's whole texts."""
    return TextTimes.of_whole_texts([[run["seconds"] for run in r] for r in prompts])


def machine_load(runs: Sequence[Record]) -> Record:
    """Return the seconds, CPU seconds and involuntary context switches of runs."""
    timed = [StepTimes.parse(run["steps"]) for run in runs if run.get("steps")]
    return {
        "seconds": sum(run["seconds"] for run in runs),
        "cpu_seconds": sum(1e-6 * sum(run.cpu_microseconds) for run in timed),
        "involuntary_switches": sum(sum(run.switches) for run in timed),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares_by_source(runs: Sequence[Record]) -> dict[str, float]:
    """Return each source's share of the accepted drafts."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run["sources"])
    return {source: counts[source] / counts.total() for source in sorted(counts)}

"""A folder of a report as infer.speed and infer.quality leave it, of plausible figures that a seed draws."""

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

HARDWARE = {"cpu": "AMD EPYC 9354", "cores": 32, "threads": 1, "gpu": "NVIDIA H200"}
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.4.6"}
HEAD = {
    "date": "2026-11-21T18:00:00+00:00",
    "commit": "0123456789abcdef",
    "hardware": HARDWARE,
    "versions": VERSIONS,
}
KS = (1, 3, 5, 7, 9, 13)
# decoder: chance of the first draft, what is left of it from place to place, depth, rows of a forward
OWN = {
    "adaptive": (0.9, 0.93, 7, 12.0),
    "auto": (0.93, 0.95, 9, 14.0),
    "ngrams": (0.8, 0.95, 12, 9.0),
    "prompt lookup": (0.62, 0.85, 5, 6.0),
    "ssd": (0.85, 0.93, 10, 11.0),
    "tsd": (0.88, 0.93, 10, 40.0),
    "gsd": (0.9, 0.94, 10, 60.0),
    "gsd probes": (0.8, 0.9, 5, 20.0),
}
SOURCES = {  # of what was accepted, the share of each
    "sdsat": {"adaptive": 1.0},
    "adaptive": {"adaptive": 1.0},
    "auto": {"adaptive": 0.5, "text": 0.2, "ngrams": 0.3},
    "ngrams": {"text": 0.4, "ngrams": 0.6},
    "prompt lookup": {"text": 1.0},
}
PEERS = {
    "generate": (0.0, 0.0, 0, 1.0),
    "generate prompt lookup": (0.55, 0.8, 5, 6.0),
    "generate assisted": (0.8, 0.9, 8, 9.0),
    "vllm": (0.88, 0.9, 5, 6.0),
}
SETS = {"humaneval": 1.0, "infilling": 0.93, "spec_bench": 0.8}
LANGUAGES = {"cpp": 0.329, "java": 0.272, "php": 0.242, "ts": 0.333, "cs": 0.203, "sh": 0.089}


def speed(
    *,
    sets: tuple[str, ...] = tuple(SETS),
    dtypes: tuple[str, ...] = ("bfloat16",),
    temperatures: tuple[float, ...] = (0.0, 0.2, 1.0),
    rounds: int = 3,
    prompts: int = 20,
    peers: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """speed.json. A second dtype is the slower one, in which all is identical."""
    rng = np.random.default_rng(seed)
    size = {"prompts": prompts, "rounds": rounds}
    costs = [1, 2, 4, 8, 16, 32, 64]
    limit = {
        "weights_bytes": 13_476_839_424,
        "copy_bytes_per_second": 3.9e12,
        "read_bytes_per_second": 4.1e12,
        "flops_per_second": 7.2e14,
        "forward_ms": [[q, max(3.29, 0.018 * q)] for q in costs],
    }
    return {
        "schema": 4,
        **HEAD,
        "settings": {"model": "runs/7b/model", "max_new_tokens": 256, "rounds": rounds, "k": list(KS)},
        "model": "7b",
        "units": {"all": 60, "done": 60},
        "ranks": 8,
        "limits": [{"dtype": dtype, **limit} for dtype in dtypes],
        "costs": [{"dtype": dtype, "rows": costs, "ms": [_cost(q) for q in costs]} for dtype in dtypes],
        "rows": [
            row
            for name, dtype, temperature in product(sets, dtypes, temperatures)
            for row in _group(rng, name, dtype, temperature, peers=peers, size=size)
        ],
        "batches": [_batch(name, dtypes[0], size) for name in sets for size in (1, 4, 8)],
        "samples": [_sample(name, dtypes[0]) for name in sets[:2]],
    }


def _batch(name: str, dtype: str, size: int) -> dict[str, Any]:
    speedup = 3 - 0.2 * size
    return {
        "prompt_set": name,
        "dtype": dtype,
        "temperature": 0.0,
        "batch": size,
        "rounds": 3,
        "plain_tokens_per_second": 110.0 * size,
        "tokens_per_second": 110.0 * size * speedup,
        "speedup": speedup,
        "speedup_interval": [speedup - 0.1, speedup + 0.1],
        "identical": 3 * size,
        "compared": 3 * size,
    }


def _cost(rows: float) -> float:
    return 8.0 + 0.035 * rows


def _group(
    rng: np.random.Generator, name: str, dtype: str, temperature: float, *, peers: bool, size: dict[str, int]
) -> list[dict[str, Any]]:
    """Every decoder on a set of prompts, plain decoding first."""
    heat = SETS[name] * (1 - 0.2 * temperature)
    slow = 1.0 if dtype == "bfloat16" else 0.6
    drafts = {("sdsat", k): (0.9, 0.9, k, 1.0 + 2 * k) for k in KS}
    drafts |= {(decoder, 0): shape for decoder, shape in OWN.items()}
    drafts |= {(decoder, 0): shape for decoder, shape in PEERS.items()} if peers else {}
    base = {"prompt_set": name, "dtype": dtype, "temperature": temperature, **size}
    result = [_row(rng, base, "plain", 0, (0.0, 0.0, 0, 1.0), slow)]
    result += [
        _row(rng, base, decoder, k, (shape[0] * heat, *shape[1:]), slow, plain=result[0])
        for (decoder, k), shape in drafts.items()
    ]
    return result


def _row(
    rng: np.random.Generator,
    base: dict[str, Any],
    decoder: str,
    k: int,
    shape: tuple[float, float, int, float],
    slow: float,
    plain: dict[str, Any] | None = None,
) -> dict[str, Any]:
    chance, remaining, depth, rows = shape
    places = [min(1.0, chance * remaining**place) for place in range(depth)]
    emitted = 1 + float(np.sum(np.cumprod(places)))
    drawn = decoder in ("ssd", "tsd", "gsd", "generate assisted")
    parts = {"ms_draft": 0.9 * depth if drawn else 0.05, "ms_forward": _cost(rows) / slow, "ms_rest": 0.6}
    peer = decoder in PEERS
    rate = 1e3 * emitted / sum(parts.values()) * (0.8 if peer and decoder != "vllm" else 1.0)
    rate *= float(rng.normal(1, 0.01))
    ratio = rate / plain["tokens_per_second"] if plain else 1.0
    same = base["prompts"] - int(peer and base["temperature"] > 0) * 9
    same -= int(decoder in ("gsd", "generate assisted") and base["dtype"] == "bfloat16")
    reached = np.cumprod(places)
    sources = {
        name: {
            "accepted": int(100 * share),
            "proposed": int(150 * share),
            "share": share,
            "acceptance": 2 / 3,
            "by_place": (share * reached).tolist(),
        }
        for name, share in SOURCES.get(decoder, {}).items()
    }
    return {
        **base,
        "decoder": decoder,
        "k": k,
        "peer": peer,
        "tokens": 256 * base["prompts"] * base["rounds"],
        "forwards": int(256 * base["prompts"] * base["rounds"] / emitted),
        "tokens_per_second": rate,
        "tokens_per_second_quartiles": [0.97 * rate, 1.02 * rate],
        "speedup": ratio,
        "speedup_interval": [0.97 * ratio, 1.03 * ratio] if plain else [1.0, 1.0],
        "speedup_quartiles": [0.95 * ratio, 1.04 * ratio] if plain else [1.0, 1.0],
        "speedup_whole": 0.98 * ratio if plain else 1.0,
        "first_ms": 21.5 + 5 * drawn,
        "acceptance_rate": float(np.mean(reached)) if depth else None,
        "mean_acceptance_length": emitted if depth else None,
        "node_efficiency": float(np.mean(reached)) if depth else None,
        "acceptance_by_position": reached.tolist(),
        "acceptance_where_reached": places,
        "acceptance_where_reached_low": [0.9 * share for share in places],
        "acceptance_where_reached_high": [min(1, 1.1 * share) for share in places],
        "reached": [max(1, int(400 * share)) for share in [1, *reached[:-1]]][:depth],
        **({"token_ms_p50": 1e3 / rate, "token_ms_p99": 3e3 / rate, **parts} if not peer else {}),
        "sources": sources,
        "tokens_per_forward": emitted,
        "rows_per_forward": rows,
        "ms_per_forward": sum(parts.values()),
        "drafted": depth * 256,
        "drafted_nodes": 3100 if drawn else None,
        "graph_success": 0.12 if decoder == "gsd" else None,
        "peak_memory_bytes": 14_800_000_000 + (2_100_000_000 if drawn else 0),
        "limit_share": None if peer else 3.29 / sum(parts.values()),
        "identical": same,
        "compared": base["prompts"],
        "exact": same == base["prompts"],
    }


def _sample(name: str, dtype: str) -> dict[str, Any]:
    pieces = [["own", "    best = "], ["drafted", "float('inf')\n    for i, a in"], ["own", " enumerate"]]
    pieces += [["drafted", "(numbers):\n        for b in "], ["shared", "numbers[i + 1:]:\n"]]
    pieces += [["own", "\t\x1b[2J<script>alert('&amp;')</script>"], ["drafted", "        return best"]]
    return {
        "prompt_set": name,
        "id": f"{name}/0",
        "dtype": dtype,
        "temperature": 0.0,
        "decoder": "gsd",
        "k": 0,
        "before": 'def closest(numbers: list[float]) -> float:\n    """The least difference."""\n',
        "after": "\n\nprint(closest([1.0, 2.5]))" if name == "infilling" else "",
        "pieces": pieces,
    }


def quality(*, base: bool = True, seed: int = 0) -> dict[str, Any]:
    """quality.json."""
    rng = np.random.default_rng(seed)
    expected = [("humaneval", "python", "pass@1", 0.311, 164), ("mbpp", "python", "pass@1", 0.498, 257)]
    expected += [("multipl_e", language, "pass@1", value, 160) for language, value in LANGUAGES.items()]
    languages = zip(("python", "java", "js"), (0.723, 0.79, 0.821))
    expected += [("infilling", language, "exact match", value, 1033) for language, value in languages]
    who = [("model", "plain"), ("model", "sdsat"), *([("base", "plain")] if base else [])]
    rows = []
    for benchmark, language, metric, value, problems in expected:
        result = {"model": value, "base": value + float(rng.normal(0, 0.012))}
        place = (benchmark, language, metric)
        rows += [_score(*place, item, decoder, 0.0, result[item], problems) for item, decoder in who]
    rows += [
        _score("humaneval", "python", f"pass@{k}", "model", "plain", 0.8, value, 164)
        for k, value in ((1, 0.29), (10, 0.55))
    ]
    same = [
        {
            **{name: row[name] for name in ("benchmark", "language", "who", "decoder", "temperature")},
            "against": "plain",
            "identical": row["problems"],
            "compared": row["problems"],
        }
        for row in rows
        if row["decoder"] == "sdsat"
    ]
    sample = {
        "before": "def add(a, b):\n",
        "after": "",
        "pieces": [["own", "    return"], ["drafted", " a + b\n"]],
    }
    return {
        "schema": 1,
        **HEAD,
        "settings": {"model": "runs/7b/model", "base": "codellama/7b" if base else None, "dtype": "float32"},
        "units": {"all": 90, "done": 90},
        "sandbox": {"level": "namespaces", "told": "namespaces (no network, no files, 1 GB, 10 s)"},
        "rows": rows,
        "differences": _differences(rows),
        "same": same,
        "skipped": [{"benchmark": "multipl_e", "language": "rs", "reason": "no rustc on this machine"}],
        "rules": {
            "humaneval": "An answer ends before the next line that begins a top-level class, def, # or if.",
            "infilling": "Suffix-prefix-middle; the answer ends with EOT, and its first line counts.",
        },
        "samples": [
            {
                "benchmark": "humaneval",
                "id": "HumanEval/0",
                "who": "model",
                "decoder": "sdsat",
                "verdict": "passed",
            }
            | sample
        ],
    }


def training() -> dict[str, Any]:
    """training.json."""
    settings = {"objective": {"name": "branch", "L": 5}, "steps": 1000, "global_batch": 4}
    data = {"documents": 35978, "tokens": 10711749, "languages": ["py"], "decontaminated": ["humaneval"]}
    curve = {
        step: {"step": step, "standard_loss": 1.3, "masked_loss": 5.0 - step / 400} for step in range(1010)
    }
    return {
        "schema": 1,
        "name": "tuned",
        "settings": settings,
        "parameters": 6_738_546_688,
        "ranks": 8,
        "data": data | {"own": {"documents": 456, "tokens": 134682, "share": 0.25}},
        "validation": [curve[step] | {"accepted": step / 900} for step in (0, 500, 1000)],
        "log": [curve[step] for step in range(10, 1010, 10)],
        "tokens": 2_048_000,
        "stages": {"data_prep": 8.6, "training": 195.0},
        "commit": "0123456789abcdef",
        "date": "2026-11-21T17:00:00+00:00",
    }


def _differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the models' scores, with the narrower intervals that pairs of answers have."""
    names = ("benchmark", "language", "metric", "temperature")
    plain = {(row["who"], *(row[name] for name in names)): row for row in rows if row["decoder"] == "plain"}
    result = []
    for (who, *place), row in plain.items():
        base = plain.get(("base", *place))
        if who == "model" and base:
            gap = row["value"] - base["value"]
            message = {"value": gap, "interval": [gap - 0.03, gap + 0.03], "problems": row["problems"]}
            result.append(dict(zip(names, place)) | message)
    return result


def _score(
    benchmark: str, language: str, metric: str, who: str, decoder: str, temperature: float, value: float, n: int
) -> dict[str, Any]:
    half = 1.96 * (value * (1 - value) / n) ** 0.5
    return {
        "benchmark": benchmark,
        "language": language,
        "who": who,
        "name": {"model": "7b", "base": "codellama-7b"}[who],
        "decoder": decoder,
        "temperature": temperature,
        "metric": metric,
        "value": value,
        "problems": n,
        "interval": [value - half, value + half],
        "samples": 1 if metric != "pass@10" else 20,
    }


def faster(result: dict[str, Any], factor: float, decoder: str = "auto") -> dict[str, Any]:
    """The same speed.json with one decoder's rates, ratios and their intervals multiplied."""
    other = copy.deepcopy(result)
    for row in (row for row in other["rows"] if row["decoder"] == decoder):
        for name in ("tokens_per_second", "speedup", "speedup_whole"):
            row[name] *= factor
        for name in ("tokens_per_second_quartiles", "speedup_interval", "speedup_quartiles"):
            row[name] = [factor * value for value in row[name]]
    return other


def write_parts(folder: Path, **parts: dict[str, Any] | None) -> Path:
    """The stage folders `speed` and `quality` of a report, finished; returns the folder."""
    for kind, part in parts.items():
        if part is not None:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            (folder / kind / f"{kind}.json").write_text(json.dumps(part))
            (folder / kind / "manifest.json").write_text(json.dumps({"schema": 1, "kind": kind}))
    return folder

"""Rows of figures: which fields they have, by what name a decoder goes, and how a figure is spelled."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from infer.view import KINDS

Row = Mapping[str, Any]

GATED = "gated adapter, base weights bit-exact"
KEY = ("prompt_set", "dtype", "temperature", "decoder", "k")
SPEED = (
    *(*KEY, "peer", "prompts", "rounds", "tokens", "forwards", "tokens_per_second"),
    *("tokens_per_second_measured", "tokens_per_second_quartiles", "speedup", "speedup_interval"),
    *("speedup_quartiles", "speedup_whole", "first_ms", "acceptance_rate", "mean_acceptance_length"),
    *("node_efficiency", "acceptance_by_position", "acceptance_where_reached"),
    *("acceptance_where_reached_low", "acceptance_where_reached_high", "reached", "token_ms_p50"),
    *("token_ms_p99", "sources", "tokens_per_forward", "rows_per_forward", "ms_per_forward", "ms_draft"),
    *("ms_forward", "ms_rest", "drafted", "drafted_nodes", "graph_success", "peak_memory_bytes"),
    *("limit_share", "identical", "compared", "exact"),
)
SCORE_KEY = ("benchmark", "language", "who", "decoder", "temperature", "metric")
PLACE = ("benchmark", "language", "metric", "temperature")  # what is asked of a model
QUALITY = (*SCORE_KEY, "name", "value", "interval", "problems", "samples")
PAIRS = {"quartiles": ("low", "high"), "interval": ("low", "high")}  # fields of two, by the end of their name
LABELS = {
    "adaptive": "sdsat (adaptive only)",
    "auto": "sdsat",
    "ngrams": "n-grams only",
    "base": "base, plain",
    "generate prompt lookup": "generate+lookup",
    "generate assisted": "generate+draft",
}
FORWARD = (
    "sdsat (paper) drafts in one forward and verifies in the next, and its tokens by forward count both; "
    "sdsat does both in one"
)
BY_K = {"sdsat": "sdsat (paper)", "vllm": "vllm"}  # several rows of these differ in k alone
SOURCES = {name: KINDS[name].name for name in ("adaptive", "text", "ngrams")}  # of drafts, as tables name them
PLACES = 16  # of a draft, at most, in tables
LANGUAGES = {"cpp": "C++", "cs": "C#", "js": "JS", "ts": "TS", "php": "PHP", "sh": "Bash"}
BENCHMARKS = {"humaneval": "HumanEval", "mbpp": "MBPP", "multipl_e": "MultiPL-E"}


def label(row: Row) -> str:
    """Return a decoder's name in tables."""
    name: str = row["decoder"]
    return f"{BY_K[name]} k={row['k']}" if name in BY_K and row["k"] else LABELS.get(name, name)


def language(name: str) -> str:
    """Return a language's name in tables."""
    return LANGUAGES.get(name, name.capitalize())


def benchmark(name: str) -> str:
    """Return a benchmark's name in tables."""
    return BENCHMARKS.get(name, name.replace("_", " "))


def task(row: Row) -> str:
    """Return a benchmark and its language, where it has one."""
    return f"{benchmark(row['benchmark'])} {language(row['language'])}".strip()


def place_of(row: Row) -> tuple[Any, ...]:
    """Return what a score, or a difference of scores, is of."""
    return tuple(row[name] for name in PLACE)


def drafts(row: Row) -> bool:
    """Return whether this is one of ours that drafts."""
    return not row["peer"] and row["decoder"] not in ("plain", "base")


def is_compared(row: Row) -> bool:
    """Return whether its texts should be plain decoding's: not the base model's, which is another model, and
    not those that a peer samples, which have noise of their own.
    """
    return bool(row["compared"]) and row["decoder"] != "base" and not (row["peer"] and row["temperature"])


def differs(row: Row) -> bool:
    """Return whether a text should be plain decoding's and is another."""
    return is_compared(row) and not row["exact"]


def same(row: Row) -> str:
    """Return how many texts are plain decoding's, where they should be; nothing for plain decoding itself."""
    counted = is_compared(row) and row["decoder"] != "plain"
    return f"{row['identical']}/{row['compared']}" if counted else ""


def groups(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by some of their fields, in the order in which they come."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in fields), []).append(row)
    return grouped


def number(value: float | None, form: str = ".2f") -> str:
    """Return a figure; nothing where there is none."""
    return "" if value is None else format(value, form)


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share of one, in percent."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def points(value: float | None) -> str:
    """Return a difference of shares, in percentage points."""
    return "" if value is None else f"{100 * value:+.1f}"


def span(pair: Sequence[float] | None, form: str = ".2f") -> str:
    """Return an interval."""
    return "" if pair is None else "–".join(format(value, form) for value in pair)


def quantity(value: float | None, unit: str) -> str:
    """Return a large number of units with a prefix: 4.10 TB/s."""
    if value is None:
        return ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}" if prefix else f"{value:.0f} {unit}"


def flat(row: Row) -> dict[str, Any]:
    """Return a row of plain cells: pairs as two fields, other lists as text, nested values by dotted names."""
    columns: dict[str, Any] = {}
    for name, value in dotted(row):
        ends = PAIRS.get(name.rsplit("_", 1)[-1])
        if ends:
            columns |= {f"{name}_{end}": item for end, item in zip(ends, value or (None, None))}
        else:
            columns[name] = " ".join(f"{item:.6g}" for item in value) if isinstance(value, list) else value
    return columns


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to the names that the command line has for them."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

"""Make the tables of a report, for the terminal and the page, from the rows of finished parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infer.bench.marks import IMPOSSIBLE, UNRELIABLE
from infer.bench.names import LOSS, PLAIN, RANKS, TIMES
from infer.bench.statistics import Report, Row, grouped
from infer.config import SOURCES

POSITIONS = 8  # the number of draft positions in the tables
_SPEED = {
    "decoder": "plain decodes without drafts, and its second row shows the noise: the speedup should be 1. "
    "hybrid drafts by all sources, adaptive and sdsat by adaptive tokens alone, ngrams and "
    "prompt_lookup without them. base is the model before fine-tuning, hf are Transformers' decoders",
    "?": f"after a figure: {UNRELIABLE}",
    "speedup, 95 %": "speedup over plain decoding of the same prompts, with an interval over "
    "prompts if there are at least five. An interval that contains 1 shows no gain",
    "tok/fwd": "tokens per forward, which do not depend on other work on the machine; for sdsat "
    "both of its forwards count",
    "same": "texts that equal plain decoding's, token for token. In float32 all texts of this "
    "project's decoders must be equal, or the command fails; in narrow types near-ties may differ. "
    "The texts of sampling peers differ",
    "length": "mean acceptance length τ: 1 + accepted drafts / verifications, as in vLLM and SGLang",
    "tok/s": "output tokens per second of whole texts: plain decoding's speed times the speedup",
    "acc.": "draft acceptance rate: accepted / drafted tokens. All nodes of a tree count, so wide "
    "trees have low rates",
    "1st ms": "milliseconds to the first tokens, in each prompt's fastest run: mostly the time to "
    "read the prompt",
}
_QUALITY = {
    "pass@1": "share of problems that the greedy answer solves",
    "exact match": "share of missing texts that are reproduced",
    "model, base": "after and before fine-tuning",
    "same": "answers equal to plain decoding's",
    "first line, uncut": "share of answers that match in the first line, or as a whole",
    "cut off at the limit": "answers that reached `quality.max_new_tokens` without an end",
    "of": "number of problems",
    "nats a token": "loss of held-out documents; lower is better",
}
_GSD = {
    "speedup, 95 %": "over plain decoding of the same prompts, measured in turns",
    "length": "1 + accepted drafts / verifications",
    "same": "texts that equal plain decoding's",
    "acc. %": "accepted drafts / drafted levels, averaged over texts",
    "drafted a text": "tokens that the draft model drafted for a text",
    "success %": "share of verifications with an accepted path that continues after a merged node",
    "draft, verification, rest": "milliseconds of the median step",
    "1 to 4": "accepted drafts by rank among their siblings; 1 is the likeliest",
}
_LOAD = {
    "at once, of": "concurrent requests, and completed ones in all",
    "req/s, tok/s": "requests and new tokens per second",
    "TTFT": "time to the first tokens, the prompt's forward included",
    "TPOT": "time per output token of a request, without the first",
    "ITL": "time between two outputs of a request. Tokens of one step arrive together, so accepted "
    "drafts lengthen it: compare decoders by TPOT",
    "p50, p99": "median and 99th percentile. The p99 of few requests is nearly their maximum",
    "same": "texts that equal plain decoding's, whatever is decoded beside them",
}
#: The meanings of the columns of each part, by their heads on one line
MEANINGS = {"speed": _SPEED, "quality": _QUALITY, "gsd": _GSD, "load": _LOAD}
SPEED_HEADS = (
    "decoder",
    "speed-\nup",
    "95 %",
    "tok/\nfwd",
    "same",
    "length",
    "tok/s",
    "acc.\n%",
    "1st\nms",
)
GSD_HEADS = (
    "setting",
    "speed-\nup",
    "95 %",
    "length",
    "same",
    "acc.\n%",
    "drafted\na text",
    "success\n%",
)
STEP_HEADS = ("setting", "draft", "verification", "rest")
QUALITY_HEADS = (
    "benchmark",
    "model",
    "decoder",
    "metric",
    "%",
    "95 %",
    "of",
    "same",
)
ENDS_HEADS = (
    "benchmark",
    "model",
    "decoder",
    "first\nline %",
    "uncut\n%",
    "cut off at\nthe limit",
    "of",
)
LOAD_COLUMNS = {  # the head and the decimal places of each figure
    "request_throughput": ("req/s", 2),
    "output_throughput": ("tok/s", 1),
    "median_ttft_ms": ("TTFT\np50", 0),
    "p99_ttft_ms": ("TTFT\np99", 0),
    "median_tpot_ms": ("TPOT\np50", 1),
    "p99_tpot_ms": ("TPOT\np99", 1),
    "median_itl_ms": ("ITL\np50", 1),
    "p99_itl_ms": ("ITL\np99", 1),
}
_SOURCE_HEADS = ("adaptive\ntokens", "text's\nn-grams", "training\nn-grams")
SOURCE_HEADS = dict(zip(SOURCES, _SOURCE_HEADS, strict=True))


@dataclass
class Table:
    """A table of strings for the terminal and the page. Its first `names` columns are names.

    The page shows tables with `detail` beside each other below the table before them.
    """

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    names: int = 1
    detail: bool = False


def tables_of(report: Report, part: str) -> list[Table]:
    """Return the tables of a finished part, without empty tables."""
    rows = report[part]["rows"]
    if part == "quality":
        tables = [quality_table(rows), ends_table(rows), loss_table(rows)]
    elif part == "gsd":
        tables = []
        for (prompt_set, name), group in grouped(rows, "prompt_set", "part"):
            title = f"{prompt_set}: {name}"
            tables += [gsd_table(title, group), step_table(group), rank_table(group)]
    elif part == "load":
        tables = [
            load_table(f"{prompt_set}: requests at once, times in ms", group)
            for (prompt_set,), group in grouped(rows, "prompt_set")
        ]
    else:
        tables = []
        for (prompt_set, temperature), group in grouped(
            rows, "prompt_set", "temperature"
        ):
            title = ", ".join([prompt_set, sampling(temperature), *set_marks(group)])
            tables += [
                speed_table(title, group),
                position_table(group),
                source_table(group),
            ]
        tables += length_tables(rows, report[part].get("lengths") or {})
    return [each for each in tables if each.rows]


def speed_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of the decoders on one prompt set at one temperature."""
    cells = []
    for row in rows:
        rate = row["output_tokens_per_second"]
        cells.append(
            [
                row["decoder"],
                speedup(row),
                "" if row["decoder"] == PLAIN else interval(row["speedup_interval"]),
                number(row["tokens_per_forward"]),
                same(row),
                number(row["mean_acceptance_length"]),
                marked(f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", row),
                number(row["draft_acceptance_rate"], 0, 100),
                marked(f"{row['first_token_ms']:.0f}", row),
            ]
        )
    return Table(title, SPEED_HEADS, cells)


def position_table(rows: Sequence[Row]) -> Table:
    """Return the table of the share of verifications that accepted drafts up to each position."""
    drafting = [row for row in rows if row["survival"]]
    deepest = min(POSITIONS, max((len(row["survival"]) for row in drafting), default=0))
    cells = []
    for row in drafting:
        texts = [number(rate, 0, 100) for rate in row["survival"][:deepest]]
        cells.append([row["decoder"], *texts, *[""] * (deepest - len(texts))])
    heads = ["decoder", *map(str, range(1, deepest + 1))]
    return Table("acceptance rate per position (%)", heads, cells, detail=True)


def source_table(rows: Sequence[Row]) -> Table:
    """Return the table of each source's share of the accepted drafts."""
    drafting = [row for row in rows if row["sources"]]
    cells = []
    for row in drafting:
        shares = [number(row["sources"].get(name), 0, 100) for name in SOURCE_HEADS]
        length = number(row["mean_acceptance_length"])
        cells.append([row["decoder"], speedup(row), length, *shares])
    heads = ["decoder", "speed-\nup", "length", *SOURCE_HEADS.values()]
    return Table("accepted drafts by source (%)", heads, cells, detail=True)


def length_tables(
    rows: Sequence[Row], lengths: Mapping[str, tuple[str, int]]
) -> list[Table]:
    """Return tables of the mean acceptance length by prompt length, and of its change in %.

    The change is relative to the shortest prompts. `lengths` has the source and the prompt
    length of each prompt set. There is a table for each source and temperature.
    """
    order = sorted({length for _, length in lengths.values()})
    tables = []
    for (source, temperature), group in grouped(
        [{**row, "source": lengths[row["prompt_set"]][0]} for row in rows if lengths],
        "source",
        "temperature",
    ):
        cells = []
        for (decoder,), same_decoder in grouped(group, "decoder"):
            by_length = {
                lengths[row["prompt_set"]][1]: row["mean_acceptance_length"]
                for row in same_decoder
            }
            values = [by_length.get(length) for length in order]
            if not any(values):
                continue
            first = values[0]
            changes = [
                f"{100 * (value / first - 1):+.1f}" if value and first else ""
                for value in values[1:]
            ]
            cells.append([decoder, *map(number, values), *changes])
        heads = ["decoder", *(f"{length:,}" for length in order)]
        heads += [f"{length:,}\n%" for length in order[1:]]
        title = f"{source}, {sampling(temperature)}: mean acceptance length by prompt length"
        tables.append(
            Table(f"{title}, and its change from {order[0]:,} (%)", heads, cells)
        )
    return tables


def quality_table(rows: Sequence[Row]) -> Table:
    """Return the table of the scores."""
    cells = [
        [
            row["benchmark"],
            row["who"],
            row["decoder"],
            row["metric"],
            number(row["value"], 1, 100),
            interval(row["interval"], 1, 100),
            str(row["problems"]),
            same(row),
        ]
        for row in rows
        if row["metric"] != LOSS
    ]
    return Table("scores", QUALITY_HEADS, cells, names=4)


def loss_table(rows: Sequence[Row]) -> Table:
    """Return the table of the losses of held-out documents."""
    cells = [
        [
            row["who"],
            number(row["value"], 3),
            f"{row['tokens']:,}",
            str(row["problems"]),
        ]
        for row in rows
        if row["metric"] == LOSS
    ]
    heads = ["model", "nats\na token", "tokens", "documents"]
    return Table("loss of held-out documents", heads, cells)


def load_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of throughput and latencies by number of concurrent requests and decoder."""
    cells = []
    for row in rows:
        figures = [
            number(row[name], places) for name, (_, places) in LOAD_COLUMNS.items()
        ]
        key = [str(row["concurrency"]), row["decoder"], str(row["completed"])]
        cells.append([*key, *figures, same(row)])
    heads = [head for head, _ in LOAD_COLUMNS.values()]
    return Table(title, ["at\nonce", "decoder", "of", *heads, "same"], cells, names=2)


def ends_table(rows: Sequence[Row]) -> Table:
    """Return the table of exact matches of first lines and whole answers, and of answers cut off.

    Results of older versions do not have these counts and are left out.
    """
    cells = [
        [
            row["benchmark"],
            row["who"],
            row["decoder"],
            number(row["value"] if row["uncut"] is not None else None, 1, 100),
            number(row["uncut"], 1, 100),
            str(row["cut_off"]),
            str(row["problems"]),
        ]
        for row in rows
        if "cut_off" in row
    ]
    return Table("ends of the answers", ENDS_HEADS, cells, names=3)


def gsd_table(title: str, rows: Sequence[Row]) -> Table:
    """Return one of the GSD paper's tables."""
    cells = [
        [
            row["setting"],
            number(row["speedup"]),
            interval(row["speedup_interval"]),
            number(row["mean_acceptance_length"]),
            same(row),
            number(row["acceptance_rate"], 1, 100),
            number(row["drafted_tokens"], 1),
            number(row["graph_success"], 1, 100),
        ]
        for row in rows
    ]
    return Table(title, GSD_HEADS, cells)


def step_table(rows: Sequence[Row]) -> Table:
    """Return the table of the times of the parts of a step (GSD's Table 3)."""
    cells = [
        [row["setting"], *(number(row[name], 1) for name in TIMES)] for row in rows
    ]
    return Table("milliseconds of the median step", STEP_HEADS, cells, detail=True)


def rank_table(rows: Sequence[Row]) -> Table:
    """Return the table of the accepted drafts by rank among siblings."""
    cells = [
        [row["setting"], *(number(share, 0, 100) for share in row["rank_shares"])]
        for row in rows
    ]
    heads = ["setting", *map(str, range(1, 1 + RANKS))]
    title = "accepted drafts by rank among siblings (%)"
    return Table(title, heads, cells, detail=True)


def number(value: float | None, places: int = 2, scale: float = 1) -> str:
    """Format a figure; empty for None."""
    return "" if value is None else f"{scale * value:.{places}f}"


def interval(ends: Sequence[float] | None, places: int = 2, scale: float = 1) -> str:
    """Format an interval; empty for None."""
    return "–".join(number(end, places, scale) for end in ends or ())


def speedup(row: Row) -> str:
    """Format a speedup, with the mark of an impossible speedup."""
    text = marked(f"{row['speedup']:.2f}", row)
    return f"{text} {IMPOSSIBLE}" if IMPOSSIBLE in row["marks"] else text


def set_marks(rows: Sequence[Row]) -> list[str]:
    """Return the marks of the rows of a prompt set at one temperature."""
    return list(dict.fromkeys(mark for row in rows for mark in row["marks"]))


def marked(text: str, row: Row) -> str:
    """Add a question mark to a figure if its row has marks."""
    return f"{text}?" if row["marks"] else text


def same(row: Row) -> str:
    """Format the number of texts that equal plain decoding's; empty without compared texts."""
    return f"{row['same']}/{row['compared']}" if row["compared"] else ""


def sampling(temperature: float) -> str:
    """Return "greedy" or the temperature, for titles."""
    return f"temperature {temperature:g}" if temperature else "greedy"

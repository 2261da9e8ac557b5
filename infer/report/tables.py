"""The tables of a report: one model of a table, which `infer.report.terminal` prints and tables.html.j2 shows,
and which tables a report has. Pure.

Those of quality have the shape of the paper's: 1, 2 and 3 of one kind of adaptive tokens, 5 to 7 of several.

    HumanEval   MBPP        Table 1: benchmarks of one language beside each other
    C++  Java  ... average  Table 2: a benchmark of several languages
    Python  Java  JS        Table 3: the same, of exact matches
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from infer.report.rows import (
    PLACE,
    PLACES,
    SOURCES,
    Row,
    benchmark,
    differs,
    drafts,
    groups,
    label,
    language,
    number,
    percent,
    place_of,
    quantity,
    same,
    span,
    task,
)
from infer.report.summary import changes, how, sentence, sure

PARTS = {"draft": "drafting", "forward": "forward", "rest": "rest"}  # of a step's time


class BarPart(NamedTuple):
    """A part of a bar: its kind, its share of the bar (0 to 1), and its text."""

    kind: str
    share: float
    text: str


@dataclass(frozen=True)
class Line:
    """A row of a table. A cell is a text; its lines but the first are details, such as an interval."""

    name: str
    cells: Sequence[str]
    marks: Sequence[str] = ()  # "best", "peer", "differs"
    bar: Sequence[BarPart] = ()


@dataclass(frozen=True)
class Table:
    """Lines under a head, whose first name is that of the lines. Where `bar` names a column, pages draw it."""

    title: str
    head: Sequence[str]
    lines: Sequence[Line]
    bar: str = ""

    def columns(self, names: Mapping[str, str]) -> "Table":
        """Return the table with these columns alone, renamed, and without bars and details."""
        at = [list(self.head).index(name) - 1 for name in names if name in self.head]
        lines = [
            replace(line, cells=[line.cells[index].split("\n")[0] for index in at], bar=())
            for line in self.lines
        ]
        return Table(self.title, [self.head[0], *(names[self.head[index + 1]] for index in at)], lines)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts, of which the first names its row."""
    return Table(title, head, [Line(name, cells) for name, *cells in rows])


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda row: number(row["tokens_per_second"], ".0f"),
    "speedup": lambda row: number(row["speedup"]),
    "95 %": lambda row: "" if row["decoder"] == "plain" else span(row["speedup_interval"]),
    "ms by token,\nmedian": lambda row: number(row["token_ms_p50"], ".3g"),
    "99 of 100\nwithin": lambda row: number(row["token_ms_p99"], ".3g"),
    "tokens by\nforward": lambda row: number(row["tokens_per_forward"]),
    "accepted": lambda row: percent(row["acceptance_rate"]),
    "mean\nlength": lambda row: number(row["mean_acceptance_length"]),
    "identical\ntexts": same,
    # From here on a page shows them on request.
    "first token, ms": lambda row: number(row["first_ms"], ".3g" if (row["first_ms"] or 0) < 100 else ".0f"),
    "rows by forward": lambda row: number(row["rows_per_forward"], ".1f"),
    "ms by forward": lambda row: number(row["ms_per_forward"]),
    "share of the limit": lambda row: percent(row["limit_share"]),
    "measured tokens/s": lambda row: number(row["tokens_per_second_measured"], ".0f"),
    "its quartiles": lambda row: span(row["tokens_per_second_quartiles"], ".0f"),
    "speedup, quartiles": lambda row: span(row["speedup_quartiles"]),
    "speedup, first token included": lambda row: number(row["speedup_whole"]),
    "tokens": lambda row: number(row["tokens"], ",d"),
    "forwards": lambda row: number(row["forwards"] or None, ",d"),
    "drafted tokens": lambda row: number(row["drafted"], ",d"),
    "nodes of a draft model's graph": lambda row: number(row["drafted_nodes"], ",.1f"),
    "steps that used a merged node": lambda row: percent(row["graph_success"], 1),
    "accepted of drafted tokens": lambda row: percent(row["node_efficiency"]),
    "peak memory": lambda row: quantity(row["peak_memory_bytes"], "B"),
}


MAIN, MORE = ({name: name for name in part} for part in (list(COLUMNS)[:9], list(COLUMNS)[9:]))


@dataclass(frozen=True)
class SpeedTables:
    """The decoders on a prompt set in one dtype at one temperature, `first` at the lowest."""

    first: bool
    figures: Table
    sources: Table | None


@dataclass(frozen=True)
class PromptSet:
    """What was measured on a prompt set."""

    name: str
    counts: str
    sentences: Sequence[str]
    tables: Sequence[SpeedTables]
    batches: Table | None


def speed_sets(report: Mapping[str, Any]) -> list[PromptSet]:
    """Return the tables of each prompt set; those of the lowest temperature come first."""
    sets = []
    for (name,), rows in groups(report["speed"]["rows"], "prompt_set").items():
        best = [entry for entry in report["summary"]["best"] if entry["prompt_set"] == name]
        sentences = [f"{how(entry['temperature']).capitalize()}: {sentence(entry)}" for entry in best]
        if not best and any(map(drafts, rows)):
            sentences = ["The texts were too short for drafts"]
        by_heat = sorted(groups(rows, "temperature", "dtype").items(), key=lambda item: item[0][0])
        tables = [
            SpeedTables(heat == by_heat[0][0][0], _figures(f"{dtype}, {how(heat)}", mine), source_table(mine))
            for (heat, dtype), mine in by_heat
        ]
        batches = [entry for entry in report["speed"]["batches"] if entry["prompt_set"] == name]
        counts = f"{rows[0]['prompts']} prompts, {rows[0]['rounds']} rounds"
        sets.append(
            PromptSet(name.replace("_", " "), counts, sentences, tables, _batches(batches) if batches else None)
        )
    return sets


def _figures(title: str, rows: Sequence[Row]) -> Table:
    exact = [row for row in rows if drafts(row) and row["exact"] and row["speedup"]]
    best = max(exact, key=sure, default=None)
    lines = []
    for row in rows:
        marks = {"best": row is best, "peer": row["peer"], "differs": differs(row)}
        cells = [cell(row) for cell in COLUMNS.values()]
        lines.append(Line(label(row), cells, [name for name, is_so in marks.items() if is_so]))
    return Table(title, ["decoder", *COLUMNS], lines)


def _batches(rows: Sequence[Row]) -> Table:
    """Tabulate plain decoding and the default decoder on texts side by side."""
    head = ["texts", "plain,\ntokens/s", "sdsat,\ntokens/s", "speedup", "95 %", "identical\ntexts"]
    several = len({row["dtype"] for row in rows}) > 1
    body = [
        [
            f"{row['batch']}" + (f", {row['dtype']}" if several else ""),
            number(row["plain_tokens_per_second"], ".0f"),
            number(row["tokens_per_second"], ".0f"),
            number(row["speedup"]),
            span(row["speedup_interval"]),
            f"{row['identical']}/{row['compared']}",
        ]
        for row in rows
    ]
    return table(f"Texts side by side, {rows[0]['dtype']}, {how(rows[0]['temperature'])}", head, body)


def source_table(rows: Sequence[Row]) -> Table | None:
    """Tabulate accepted drafts by source and place; None without any source."""
    known = [row for row in rows if row["sources"]]
    reached = max((len(row["acceptance_where_reached"] or ()) for row in known), default=0)
    places = range(min(PLACES, reached))
    head = ["decoder", *SOURCES.values(), *(str(place + 1) for place in places)]
    title = "Accepted drafts by source, and accepted at each place that was reached, in %"
    lines = []
    for row in known:
        of = {name: row["sources"].get(name, {}) for name in SOURCES}
        bar = [
            BarPart(name, share, f"{SOURCES[name]} {percent(share)}")
            for name, each in of.items()
            if (share := each.get("share"))
        ]
        shares = [_of_source(each) for each in of.values()]
        cells = [*shares, *(_at_place(row, place) for place in places)]
        lines.append(Line(label(row), cells, bar=bar))
    return Table(title, head, lines, bar="shares") if known else None


def _hundredths(share: float | None, form: str = ".0f") -> str:
    return number(share if share is None else 100 * share, form)


def _of_source(source: Mapping[str, Any]) -> str:
    """Return a source's share of the accepted drafts, and the share of its own drafts that was accepted."""
    own = _hundredths(source.get("acceptance"))
    return "\n".join([_hundredths(source.get("share")), *([f"{own} of its own"] if own else [])])


def _at_place(row: Row, place: int) -> str:
    """Return the share accepted at a place, its interval, and how many drafts reached it."""
    shares, ends = row["acceptance_where_reached"] or (), ("low", "high")
    if place >= len(shares):
        return ""
    intervals = [row[f"acceptance_where_reached_{end}"] for end in ends]
    interval = [span([100 * end[place] for end in intervals], ".0f")] if all(intervals) else []
    return "\n".join(
        [_hundredths(shares[place]), *interval, *([f"n {row['reached'][place]:,}"] if row["reached"] else [])]
    )


def time_tables(rows: Sequence[Row]) -> list[Table]:
    """Return the parts of a step's time by prompt set, dtype and temperature; bars are of the longest step."""
    known = [row for row in rows if row["ms_forward"] is not None]
    tables = []
    for (name, dtype, heat), mine in groups(known, "prompt_set", "dtype", "temperature").items():
        longest = max(sum(row[f"ms_{kind}"] or 0 for kind in PARTS) for row in mine) or 1
        lines = []
        for row in mine:
            times = {kind: row[f"ms_{kind}"] or 0.0 for kind in PARTS}
            bar = [BarPart(kind, ms / longest, f"{PARTS[kind]} {ms:.2f} ms") for kind, ms in times.items()]
            lines.append(Line(label(row), [f"{ms:.2f}" for ms in times.values()], bar=bar))
        title = f"{name.replace('_', ' ')}, {dtype}, {how(heat)}"
        tables.append(Table(title, ["decoder", *PARTS.values()], lines, bar="parts"))
    return tables


def limit_table(speed: Mapping[str, Any]) -> Table:
    """Return the device's limits, and a forward of one row by them and as measured."""
    head = [
        "dtype",
        "weights",
        "bandwidth",
        "multiplications",
        "least time of a forward of one row",
        "measured",
    ]
    measured = {entry["dtype"]: dict(zip(entry["rows"], entry["ms"])) for entry in speed["costs"]}
    rows = [
        [
            entry["dtype"],
            quantity(entry["weights_bytes"], "B"),
            quantity(max(entry["copy_bytes_per_second"], entry["read_bytes_per_second"]), "B/s"),
            quantity(entry["flops_per_second"], "FLOP/s"),
            f"{entry['forward_ms'][0][1]:.3g} ms",
            f"{ms:.3g} ms" if (ms := measured.get(entry["dtype"], {}).get(1)) else "",
        ]
        for entry in speed["limits"]
    ]
    return table("", head, rows)


def quality_tables(part: Mapping[str, Any]) -> list[Table]:
    """Return the scores: of the base model, of the fine-tuned one by each decoder, and the difference of both
    where they are decoded plainly; then how many answers of other decoders are those of plain decoding.
    """
    gaps = {place_of(gap): gap for gap in changes(part) if gap["difference"] is not None}
    tables = [
        _scores(mine, gaps)
        for of_metric in groups(part["rows"], "metric", "temperature").values()
        for mine in _by_shape(of_metric)
    ]
    rows = [
        [
            task(row),
            row["who"],
            f"{row['decoder']} and {row['against']}",
            f"{row['identical']}/{row['compared']}",
        ]
        for row in part["same"]
    ]
    head = ["benchmark", "model", "decoders", "identical answers"]
    return [*tables, *([table("The same answers, decoded otherwise", head, rows)] if rows else [])]


def _by_shape(rows: Sequence[Row]) -> list[list[Row]]:
    """Group benchmarks of one language together, each other one by itself."""
    by_name = groups(rows, "benchmark").values()
    several = [mine for mine in by_name if len({row["language"] for row in mine}) > 1]
    single = [row for mine in by_name if mine not in several for row in mine]
    return [*([single] if single else []), *several]


def _scores(rows: Sequence[Row], gaps: Mapping[tuple[Any, ...], Row]) -> Table:
    metric, temperature = rows[0]["metric"], rows[0]["temperature"]
    places = list(groups(rows, *PLACE))
    by_language = len(places) > 1 and len({row["benchmark"] for row in rows}) == 1
    lines = [
        _line(who + (f", {decoder}" if decoder != "plain" else ""), mine, places, "value", average=by_language)
        for (who, decoder), mine in sorted(
            groups(rows, "who", "decoder").items(),
            key=lambda item: (item[0][0] != "base", item[0][1] != "plain"),
        )
    ]
    if mine := [gaps[place] for place in places if place in gaps]:
        lines.append(_line("difference", mine, places, "difference", average=by_language, sign="+"))
    counts = {place_of(row): str(row["problems"]) for row in rows}
    lines.append(Line("problems", [*(counts[place] for place in places), *([""] if by_language else [])]))
    title = f"{metric.capitalize()} in %" + (f", {benchmark(rows[0]['benchmark'])}" if by_language else "")
    heads = [_head(place, by_language) for place in places]
    return Table(f"{title}, {how(temperature)}", ["", *heads, *(["average"] if by_language else [])], lines)


def _head(place: tuple[Any, ...], by_language: bool) -> str:
    if by_language:
        return language(place[1])
    return benchmark(place[0]) + ("" if place[1] in ("", "python") else f"\n{language(place[1])}")


def _line(
    name: str,
    rows: Sequence[Row],
    places: Sequence[tuple[Any, ...]],
    field: str,
    *,
    average: bool,
    sign: str = "",
) -> Line:
    """Return a line of scores with their intervals below them; the average only where all are there."""
    known = {place_of(row): row for row in rows}
    cells = []
    for place in places:
        row = known.get(place)
        ends = [100 * end for end in row["interval"]] if row and row["interval"] else None
        interval = (
            [" ".join(format(end, "+.1f") for end in ends) if sign else span(ends, ".0f")] if ends else []
        )
        cells.append("\n".join([_hundredths(row[field], f"{sign}.1f"), *interval]) if row else "")
    if average:
        mean = sum(row[field] for row in rows) / len(places) if len(known) == len(places) else None
        cells.append(_hundredths(mean, f"{sign}.1f"))
    return Line(name, cells)

"""Tables of figures as head and rows of texts, for the page and for terminals. Pure.

Those of quality have the shape of the paper's: 1, 2 and 3 of one kind of adaptive tokens, 5 to 7 of several.

    Model                      HumanEval   MBPP        Table 1: benchmarks of one language beside each other
    Model                      C++  Java  ... Average  Table 2: a benchmark of several languages
    Model                      Python  Java  JS        Table 3: the same, of exact matches
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.report.rows import (
    PLACE,
    PLACES,
    SOURCES,
    Row,
    benchmark,
    drafts,
    groups,
    label,
    language,
    number,
    percent,
    place_of,
    points,
    quantity,
    span,
)
from infer.report.summary import changes, how, sentence, sure

PARTS = ("draft", "forward", "rest")
MORE = {
    "first token, ms": lambda row: number(row["first_ms"], ".1f"),
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
COMPACT = (1, 2, 3, 4, 6, 8, 12, 16)  # places that a terminal has room for
SOURCES_CAPTION = "accepted drafts by source, and accepted at each place that was reached, in %"
TITLES = {"pass@1": "Pass@1", "exact match": "Exact match"}


def speed_sets(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of each prompt set, by dtype and temperature."""
    sets = []
    for (name,), rows in groups(report["speed"]["rows"], "prompt_set").items():
        best = [entry for entry in report["summary"]["best"] if entry["prompt_set"] == name]
        batches = [entry for entry in report["speed"]["batches"] if entry["prompt_set"] == name]
        more = [
            [f"{label(row)}, {row['dtype']}, {how(row['temperature'])}", *(cell(row) for cell in MORE.values())]
            for row in rows
        ]
        sets.append(
            {
                "name": name.replace("_", " "),
                "counts": f"{rows[0]['prompts']} prompts, {rows[0]['rounds']} rounds",
                "sentences": [f"{how(entry['temperature']).capitalize()}: {sentence(entry)}" for entry in best],
                "groups": _speed_groups(rows),
                "batches": batch_table(batches) if batches else None,
                "more": {"head": ["decoder", *MORE], "rows": more},
            }
        )
    return sets


def batch_table(rows: Sequence[Row]) -> dict[str, Any]:
    """Tabulate plain decoding and the default decoder on texts side by side."""
    head = ["texts side by side", "plain, tokens/s", "sdsat, tokens/s", "speedup", "95 %", "identical texts"]
    several = len({row["dtype"] for row in rows}) > 1
    body = [
        [
            f"{row['batch']}" + (f", {row['dtype']}" if several else ""),
            number(row["plain_tokens_per_second"], ".0f"),
            number(row["tokens_per_second"], ".0f"),
            f"{row['speedup']:.2f}×",
            span(row["speedup_interval"]),
            f"{row['identical']}/{row['compared']}",
        ]
        for row in rows
    ]
    return {"head": head, "rows": body}


def _speed_groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Group rows by dtype and temperature; the lowest temperature comes first, and is shown at once."""
    coolest = min(row["temperature"] for row in rows)
    ordered = sorted(groups(rows, "temperature", "dtype").items(), key=lambda item: item[0][0])
    return [
        {
            "name": f"{dtype}, {how(heat)}",
            "first": heat == coolest,
            "rows": mine,
            "best": max(filter(_is_exact, mine), key=sure, default=None),
            "sources": source_table(mine),
        }
        for (heat, dtype), mine in ordered
    ]


def _is_exact(row: Row) -> bool:
    return bool(drafts(row) and row["exact"] and row["speedup"])


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the parts of a forward's time by prompt set, dtype and temperature, as shares of the longest."""
    known = [row for row in rows if row["ms_forward"] is not None]
    coolest = min((row["temperature"] for row in known), default=0)
    tables = []
    for (name, dtype, heat), mine in groups(known, "prompt_set", "dtype", "temperature").items():
        longest = max(sum(row[f"ms_{kind}"] or 0 for kind in PARTS) for row in mine)
        tables.append(
            {
                "name": f"{name.replace('_', ' ')}, {dtype}, {how(heat)}",
                "first": (dtype, heat) == (known[0]["dtype"], coolest),
                "bars": [_bar(row, longest) for row in mine],
            }
        )
    return tables


def _bar(row: Row, longest: float) -> dict[str, Any]:
    times = {kind: row[f"ms_{kind}"] or 0.0 for kind in PARTS}
    parts = [
        {"kind": kind, "ms": f"{ms:.2f}", "share": f"{100 * ms / longest if longest else 0:.2f}"}
        for kind, ms in times.items()
    ]
    return {"name": label(row), "parts": parts, "text": ", ".join(f"{p['kind']} {p['ms']} ms" for p in parts)}


def limits(speed: Mapping[str, Any]) -> dict[str, Any]:
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
    return {"head": head, "rows": rows}


def compact_sources(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of shares in percent, without the paper's rows, whose drafts have one source."""
    head = ["", *SOURCES.values(), *map(str, COMPACT)]
    return head, [_compact(row) for row in rows if row["sources"] and row["decoder"] != "sdsat"]


def _compact(row: Row) -> list[str]:
    shares = [row["sources"].get(name, {}).get("share") for name in SOURCES]
    reached = row["acceptance_where_reached"] or ()
    places = [reached[place - 1] if place <= len(reached) else None for place in COMPACT]
    return [label(row), *(number(share and 100 * share, ".0f") for share in (*shares, *places))]


def source_table(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return head and rows for the page, each with its bar of shares; None without any source."""
    known_sources = [row for row in rows if row["sources"]]
    places = min(PLACES, max((len(row["acceptance_where_reached"] or ()) for row in known_sources), default=0))
    head = [*(f"{name}: accepted" for name in SOURCES.values()), *map(str, range(1, places + 1))]
    return {"head": head, "rows": [_page_row(row, places) for row in known_sources]} if known_sources else None


def _page_row(row: Row, places: int) -> dict[str, Any]:
    known = {name: row["sources"].get(name, {}) for name in SOURCES}
    shares = {name: each["share"] for name, each in known.items() if each.get("share")}
    hovers = {name: f"{SOURCES[name]} {percent(share)}" for name, share in shares.items()}
    parts = [
        {"kind": name, "share": f"{100 * share:.2f}", "hover": hovers[name]} for name, share in shares.items()
    ]
    reached = [_place(row, at) for at in range(len((row["acceptance_where_reached"] or ())[:places]))]
    cells = [*((percent(each.get("acceptance")), "", "") for each in known.values()), *reached]
    return {
        "name": label(row),
        "parts": parts,
        "hover": ", ".join(hovers.values()),
        "cells": [*cells, *[("", "", "")] * (places - len(reached))],
    }


def _place(row: Row, at: int) -> tuple[str, str, str]:
    ends = [row[f"acceptance_where_reached_{end}"] or () for end in ("low", "high")]
    interval = span([100 * end[at] for end in ends], ".0f") if all(ends) else ""
    count = f"n {row['reached'][at]:,}" if row["reached"] else ""
    return percent(row["acceptance_where_reached"][at]), interval, count


def compared_sources(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of two reports' shares and mean acceptance lengths."""
    head = ["decoder", *(cell for name in SOURCES.values() for cell in (f"{name} A", "B")), "length A", "B"]
    sides = ("first", "second")
    rows_with_sources = [row for row in rows if any(row[f"{side}_sources"] for side in sides)]
    return head, [
        [
            label(row),
            *(
                percent((row[f"{side}_sources"] or {}).get(name, {}).get("share"))
                for name in SOURCES
                for side in sides
            ),
            *(number(row[f"{side}_mean_acceptance_length"]) for side in sides),
        ]
        for row in rows_with_sources
    ]


def quality_tables(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tabulate quality as title, head, and rows of texts: the base model, the fine-tuned one, each by each
    decoder, and the difference of both where they are decoded plainly.
    """
    gaps = {place_of(gap): gap for gap in changes(part)}
    return [
        _table(mine, gaps)
        for of_metric in groups(part["rows"], "metric", "temperature").values()
        for mine in _apart(of_metric)
    ]


def _apart(rows: Sequence[Row]) -> list[list[Row]]:
    """Group benchmarks of one language together, each other one by itself."""
    by_name = {key[0]: mine for key, mine in groups(rows, "benchmark").items()}
    several = {name for name, mine in by_name.items() if len({row["language"] for row in mine}) > 1}
    single = [row for row in rows if row["benchmark"] not in several]
    return [*([single] if single else []), *(by_name[name] for name in by_name if name in several)]


def _table(rows: Sequence[Row], gaps: Mapping[tuple[Any, ...], Row]) -> dict[str, Any]:
    metric, temperature = rows[0]["metric"], rows[0]["temperature"]
    places = list(groups(rows, *PLACE))
    by_language = len(places) > 1 and len({row["benchmark"] for row in rows}) == 1
    lines = sorted(
        groups(rows, "who", "name", "decoder").items(),
        key=lambda item: (item[0][0] != "base", item[0][2] != "plain"),
    )
    body = [_line(f"{who} ({name}), {decoder}", mine, places) for (who, name, decoder), mine in lines]
    if any(gaps[place]["difference"] is not None for place in places if place in gaps):
        body.append(["difference", *_differences([gaps.get(place) for place in places])])
    title = TITLES.get(metric, str(metric)) + (f", {benchmark(rows[0]['benchmark'])}" if by_language else "")
    heads = [language(place[1]) if by_language else benchmark(place[0]) for place in places]
    return {
        "title": title + (f", temperature {temperature:g}" if temperature else ", greedy"),
        "head": ["model", *heads, *(["Average"] if by_language else [])],
        "rows": body if by_language else [line[:-1] for line in body],
    }


def _line(name: str, rows: Sequence[Row], places: Sequence[tuple[Any, ...]]) -> list[str]:
    scores = {place_of(row): row for row in rows}
    mine = [scores.get(place) for place in places]
    return [name, *map(_cell, mine), percent(_mean([each["value"] if each else None for each in mine]), 1)]


def _cell(score: Row | None) -> str:
    if score is None:
        return ""
    interval = score["interval"]
    ends = f" ({span([100 * end for end in interval], '.0f')})" if interval else ""
    return percent(score["value"], 1) + ends


def _differences(gaps: Sequence[Row | None]) -> list[str]:
    values = [gap["difference"] if gap else None for gap in gaps]
    intervals = [gap["interval"] if gap else None for gap in gaps]
    cells = [
        points(value) + (f" ({' to '.join(map(points, interval))})" if interval else "")
        for value, interval in zip(values, intervals)
    ]
    return [*cells, points(_mean(values))]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None

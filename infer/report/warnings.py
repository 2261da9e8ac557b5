"""What a reader must know before believing a report's figures. Pure."""

from collections.abc import Mapping
from typing import Any

from infer.report.rows import Row, differs, groups, label, task


def warnings(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = [
        f"{kind} is partial: {part['units']['done']} of {part['units']['all']} units are done"
        for kind, part in parts.items()
        if part["units"]["done"] < part["units"]["all"]
    ]
    if "speed" in parts:
        found += _of_speed(parts["speed"]["rows"])
    if "quality" in parts:
        found += _of_quality(parts["quality"])
    return found


def _of_speed(rows: list[Row]) -> list[str]:
    found = []
    if not rows:
        found.append("no decoder was measured")
    wrong = [row for row in rows if differs(row)]
    ours, peers = ([row for row in wrong if bool(row["peer"]) == peer] for peer in (False, True))
    for exact, why in ((True, "in float32 they must be"), (False, "in low precision near-ties decide")):
        mine = [row for row in ours if (row["dtype"] == "float32") == exact]
        if mine:
            found.append(f"not token for token plain decoding's texts: {_named(mine)}; {why}")
    if peers:
        told = "; above temperature 0 they draw their own" if any(row["temperature"] for row in peers) else ""
        found.append(f"peers whose texts are not plain decoding's: {_named(peers)}{told}")
    for (name,), mine in groups(rows, "prompt_set").items():
        if mine[0]["rounds"] == 1:
            found.append(f"{name} was measured in one round: its spread is not known")
        if mine[0]["prompts"] == 1:
            found.append(f"{name} has a single prompt: its figures are that prompt's")
    return found


def _named(rows: list[Row]) -> str:
    """Decoders, each with its worst row."""
    told = []
    for name, mine in groups([{**row, "label": label(row)} for row in rows], "label").items():
        worst = min(mine, key=lambda row: row["identical"] / row["compared"])
        told.append(f"{name[0]} (at worst {worst['identical']} of {worst['compared']}, {worst['prompt_set']})")
    return ", ".join(told)


def _of_quality(part: Mapping[str, Any]) -> list[str]:
    found = [
        f"{task(one)}: {one['decoder']} and {one['against']} "
        f"decoding agree in {one['identical']} of {one['compared']} answers, where all must"
        for one in part["same"]
        if one["identical"] < one["compared"]
    ]
    found += [
        f"{task(row)}: {row['too_long']} of {row['problems']} prompts leave no room for an answer in the "
        f"context of {row['name']}, and count as failed"
        for row in part["rows"]
        if row.get("too_long") and row["decoder"] == "plain"
    ]
    found += [
        f"{task(row)}: {row['cut']} of {row['problems']} answers of {row['name']} were ended by "
        f"max_new_tokens={part['settings']['max_new_tokens']}"
        for row in part["rows"]
        if row.get("cut") and row["decoder"] == "plain" and not row["temperature"]
    ]
    found += part.get("contaminated", [])
    if part["rows"] and not any(row["value"] for row in part["rows"]):
        found.append("no answer passed: these scores cannot tell models apart")
    sandbox = part.get("sandbox")
    if sandbox and sandbox["level"] == "limits":
        found.append(f"generated programs ran unconfined: {sandbox['told']}")
    return found

"""The report as tables."""

from typing import Any

from rich.table import Table

from conf.console import PlainConsole


def show(report: dict[str, Any]) -> None:
    """Print parity in a line for each dtype, and a table for each shape."""
    console = PlainConsole()
    console.print(f"{report['hardware']['name']}, {report['date']}")
    for dtype in dict.fromkeys(row["dtype"] for row in report["parity"]):
        rows = [row for row in report["parity"] if row["dtype"] == dtype]
        line = f"{dtype}: {sum(row['passed'] for row in rows)} of {len(rows)} comparisons passed"
        flips = [row["flips_per_1000"] for row in rows if "flips_per_1000" in row]
        console.print(line + (f", at most {max(flips):.1f} near-ties per 1,000 tokens" if flips else ""))
        for row in rows:
            if row.get("fell_back"):
                console.print(f"{row['decoder']}: {row['fell_back']}", markup=False)
    if report["bytes_per_second"]:
        speeds = ", ".join(
            f"{name} {value / 1e9:,.0f} GB/s" for name, value in report["bytes_per_second"].items()
        )
        console.print(f"memory: {speeds}")
    for name, why in report["failed"].items():
        console.print(f"{name} failed: {why}", markup=False)
    for shape, found in report["shapes"].items():
        if "out_of_memory" in found:
            console.print(f"{shape}: {found['out_of_memory']}")
            continue
        line = f"{shape}: plain {found['plain_tokens_per_second']:.1f} tokens/s"
        if found["roofline_tokens_per_second"]:
            line += (
                f", {100 * found['plain_share_of_roofline']:.0f} % of the roofline's "
                f"{found['roofline_tokens_per_second']:.1f}"
            )
        console.print(line)
        console.print(_table("rows", found["rows_ms"], found["rows_ms"][1]["median"], "L(1)"))
        console.print(_table("loop", found["loops_ms"], found["loops_ms"]["plain"]["median"], "plain"))


def _table(name: str, rows: dict[Any, dict[str, float]], one: float, unit: str) -> Table:
    table = Table(name, "ms", "quartiles", f"/ {unit}")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, ms in rows.items():
        quartiles = f"{ms['low']:.2f}-{ms['high']:.2f}"
        table.add_row(str(key), f"{ms['median']:.2f}", quartiles, f"{ms['median'] / one:.2f}")
    return table

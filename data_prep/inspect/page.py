"""A data folder as one HTML page: what was printed, and histograms."""

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from conf.characters import label
from conf.files import write_bytes
from data_prep.encode.fim import Mode
from data_prep.shards import Shards

SEQUENCES = 20_000  # at most, in the histograms
FIGURES = "<!-- figures -->"
TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Data of adaptive-tokens</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{stylesheet}
body {{ font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
       color: #1a1a1a; background: #ffffff; }}
pre {{ font: 13px/1.35 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; }}
figure {{ margin: 1rem 0; }} figure svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>Data, as training reads it</h1>
<!-- figures -->
<pre>{code}</pre>
</body></html>
"""


def write_page(path: Path, console: Console, shards: Shards, manifest: dict[str, Any]) -> None:
    """Write what the console has recorded, with histograms of the shards above it."""
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME, code_format=TEMPLATE, clear=False)
    figures = histograms(shards, manifest)
    write_bytes(path, page.replace(FIGURES, f"<figure>{figures}</figure>", 1).encode())


def histograms(shards: Shards, manifest: dict[str, Any]) -> str:
    """SVG: lengths of documents by mode, documents per sequence, languages."""
    spans = [shards[index].spans for index in range(min(SEQUENCES, len(shards)))]
    every = np.concatenate(spans)
    lengths = every["stop"].astype(np.int64) - every["start"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40)
    by_mode = [lengths[every["mode"] == mode] for mode in Mode]
    left.hist(by_mode, bins=bins, stacked=True, label=[mode.name for mode in Mode])
    left.set(xscale="log", xlabel="tokens", ylabel="documents, or their parts", title="Lengths by mode")
    left.legend()
    counts = np.array([len(own) for own in spans])
    middle.hist(counts, bins=np.arange(0.5, counts.max() + 1.5, max(1, counts.max() // 40)))
    middle.set(xlabel="documents", ylabel="sequences", title="Documents per sequence")
    sizes = {name: sums["tokens"] for name, sums in manifest["train"]["languages"].items()}
    largest = sorted(sizes.items(), key=lambda item: item[1])[-25:]
    right.barh(range(len(largest)), [size / sum(sizes.values()) for _, size in largest])
    right.set_yticks(range(len(largest)), [label(name) for name, _ in largest])
    right.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    right.xaxis.set_major_formatter("{x:.0%}")
    right.set(xlabel="share of training tokens", title="Languages")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plt.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]  # less the XML declaration

"""Decode a text, choose one of its drafts, and show its graph as a picture and on a terminal.

The picture has a column for each depth, the likeliest on top. Solid lines lead to children, dashed ones from a
merged node to the one that it goes on behind, and thick ones along the accepted path, which may cross from a
merged node to the other's children: from there on it is blue, as in the paper's Figure 6 (GSD).

The terminal has a tree, whose merged nodes name the node that they go on behind.

✓ 0 'def'
├── ✓ 1 ' f' 0.61
│   ├── ✗ 3 '(' 0.80
│   └── · 4 ':' 0.02
└── ✗ 2 ' g' 0.22 → 1            what follows 1 follows 2
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from textwrap import wrap

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from rich.console import Console
from rich.style import Style
from rich.text import Text as Line
from rich.tree import Tree

from conf import UserError
from conf.console import print_line
from conf.files import file_to_write, write_bytes
from conf.html import LIGHT, plot_style, svg_file
from infer.api import Model, generate, load
from infer.config import BY_DRAFT_MODEL, DecodeConfig, GraphConfig
from infer.methods import NODES
from infer.models import parallel
from infer.text import Text
from infer.trees.token_graph import Fate, Outcome, TokenGraph

COLOURS = {  # of nodes and edges, in light and dark
    "accepted": ("#cdeed3", "#1b4a2b"),
    "shared": ("#cfe3fb", "#163f6b"),
    "rejected": ("#fbdcd8", "#5a2420"),
    "drafted": ("#f0f2f4", "#21262d"),
    "line": ("#8c959f", "#8d96a0"),
}
FILLS = {fate: COLOURS[fate.name.lower()][0] for fate in Fate}
EDGE, MERGE = COLOURS["line"][0], LIGHT["accent"]
EDGES = {Fate.ACCEPTED: LIGHT["good"], Fate.SHARED: MERGE}
COLUMN, ROW = 1.5, 0.5  # inches
WIDE, HIGH = 0.76, 0.72  # of a column and a row, taken by a node
LONGEST = 14  # characters of a token that fit


def place_nodes(graph: TokenGraph) -> list[tuple[int, int]]:
    """Return column and row of each node: rows in the order of the nodes, and none above its parent's, so that
    a likeliest child stands beside its parent wherever there is room.
    """
    places, free = [(0, 0)], list[int]()
    for parent in graph.parents[1:]:
        depth, row = places[parent]
        if depth == len(free):
            free.append(0)
        row = max(row, free[depth])
        free[depth] = row + 1
        places.append((depth + 1, row))
    return places


def write_picture(path: Path, outcome: Outcome, text: Text, *, caption: str) -> None:
    """Write SVG or PNG, by the name's ending, under a title: `caption` is "DRAFT: DETAILS"."""
    name, _, details = caption.partition(": ")
    with plot_style():
        figure = _draw(outcome, text, f"{name[:1].upper()}{name[1:]}", details)
        if path.suffix == ".svg":
            write_bytes(path, svg_file(figure, caption, COLOURS).encode("utf-8", "replace"))
        else:
            picture = BytesIO()
            figure.savefig(picture, format="png", dpi=150)
            write_bytes(path, picture.getvalue())


def _draw(outcome: Outcome, text: Text, title: str, details: str) -> Figure:
    graph, places = outcome.graph, place_nodes(outcome.graph)
    columns, rows = (1 + max(place[axis] for place in places) for axis in (0, 1))
    figure = Figure(figsize=(max(COLUMN * columns, 8.0), ROW * rows + 1.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(-0.5, columns - 0.3), ylim=(rows - 0.4, -0.6))
    wide = int(12 * max(COLUMN * columns, 8.0))  # characters of a line
    figure.suptitle(title, x=0.01, ha="left", weight="bold", parse_math=False)
    axes.set_title("\n".join(wrap(details, wide)), fontsize=9, weight="normal", parse_math=False)
    _draw_edges(axes, outcome, places)
    for node, (place, fate) in enumerate(zip(places, outcome.fates)):
        chance = f"{graph.chances[node]:.2f}" if node else ""
        _draw_node(axes, place, fate, spelled(text, graph.tokens[node]), f"{node}   {chance}".rstrip())
    patches = [Patch(facecolor=FILLS[fate], edgecolor=EDGE, label=fate.value) for fate in Fate]
    merged = Line2D([], [], color=MERGE, linestyle="--", label="goes on behind")
    figure.legend(handles=[*patches, merged], loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    return figure


def _draw_edges(axes: Axes, outcome: Outcome, places: list[tuple[int, int]]) -> None:
    graph, path, fates = outcome.graph, outcome.accepted, outcome.fates
    accepted = list(zip(path, path[1:]))
    for node, parent in list(enumerate(graph.parents))[1:]:
        if (parent, node) not in accepted:
            _join(axes, places[parent], places[node], color=EDGE, linewidth=0.8)
    for node, into in graph.merged.items():
        start, end = _ends(places[node], places[into])
        beside = places[node][0] == places[into][0]
        shift = WIDE / 2 if beside else 0.0  # within a column around the nodes between the two
        arrow = FancyArrowPatch(
            (start + shift, places[node][1]),
            (end + shift, places[into][1]),
            arrowstyle="-|>",
            mutation_scale=9,
            connectionstyle=f"arc3,rad={0.3 if beside else 0.1}",
            color=MERGE,
            linestyle="--",
            linewidth=0.9,
        )
        axes.add_patch(arrow)
    for before, node in accepted:
        _join(axes, places[before], places[node], color=EDGES[fates[node]], linewidth=2.4)


def _join(axes: Axes, start: tuple[int, int], end: tuple[int, int], *, color: str, linewidth: float) -> None:
    axes.plot(_ends(start, end), (start[1], end[1]), color=color, linewidth=linewidth, zorder=0)


def _ends(start: tuple[int, int], end: tuple[int, int]) -> tuple[float, float]:
    """Return where a line begins and ends across: at the sides that face each other."""
    side = WIDE / 2 * ((end[0] > start[0]) - (end[0] < start[0]))
    return start[0] + side, end[0] - side


def _draw_node(axes: Axes, place: tuple[int, int], fate: Fate, token: str, below: str) -> None:
    x, y = place
    box = FancyBboxPatch(
        (x - WIDE / 2, y - HIGH / 2),
        WIDE,
        HIGH,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=FILLS[fate],
        edgecolor=EDGES.get(fate, EDGE),
        linewidth=0.8,
    )
    axes.add_patch(box)
    label_text = token if len(token) <= LONGEST else f"{token[: LONGEST - 1]}…"
    token_, below_ = (
        axes.text(x, y - 0.14, label_text, fontsize=8, family="monospace"),
        axes.text(x, y + 0.2, below),
    )
    below_.set(fontsize=6.5)
    for label in (token_, below_):
        label.set(ha="center", va="center", parse_math=False)


MARKS = {Fate.ACCEPTED: "✓", Fate.SHARED: "✓", Fate.REJECTED: "✗", Fate.DRAFTED: "·"}
STYLES = {
    Fate.ACCEPTED: Style.parse("bold green"),
    Fate.SHARED: Style.parse("bold blue"),
    Fate.REJECTED: Style.parse("red"),
    Fate.DRAFTED: Style.parse("bright_black"),
}
MERGED, GIVEN = Style.parse("blue"), Style.parse("bright_black")
BEFORE = 60  # characters of the text before the draft that are shown


def spelled(text: Text, id: int) -> str:
    """Return a token as the source of a string, safe to print."""
    return repr(text.stream(opens=False)(id) or text.pieces.get(id, f"<{id}>"))


def title(outcome: Outcome, text: Text) -> str:
    """Return a line on the draft and its verification."""
    graph, drafts = outcome.graph, outcome.drafts
    return (
        f"{len(graph.tokens) - 1} nodes drafted, {len(graph.merged)} merged; a tree of "
        f"{len(drafts.tokens) - 1} verified, {len(outcome.path) - 1} accepted, then "
        f"{spelled(text, outcome.tokens[-1])}"
    )


def print_graph(console: Console, outcome: Outcome, text: Text, *, before: str, caption: str) -> None:
    """Print the caption, the end of the text before the draft, the graph and a legend."""
    end = repr(before[-BEFORE:])
    console.print(Line(caption), Line(f"behind {end}\n", GIVEN), sep="\n", soft_wrap=True)
    console.print(tree_of(outcome, text), soft_wrap=True)
    legend = [Line(f"{MARKS[fate]} {fate.value}", STYLES[fate]) for fate in Fate]
    console.print(Line("\n") + Line("  ").join([*legend, Line("→ goes on behind", MERGED)]), soft_wrap=True)


def tree_of(outcome: Outcome, text: Text) -> Tree:
    """Return the graph with every node under its parent."""
    graph, fates = outcome.graph, outcome.fates
    branches = list[Tree]()
    for node, token in enumerate(graph.tokens):
        line = Line.assemble((f"{MARKS[fates[node]]} {node} {spelled(text, token)}", STYLES[fates[node]]))
        if node:
            line.append(f" {graph.chances[node]:.2f}", GIVEN)
        if node in graph.merged:
            line.append(f" → {graph.merged[node]}", MERGED)
        branches.append(branches[graph.parents[node]].add(line) if node else Tree(line, guide_style=GIVEN))
    return branches[0]


@dataclass(frozen=True)
class Seen:
    """A draft, and the text that had been written when it was made."""

    outcome: Outcome
    before: str


def draw_draft(config: GraphConfig) -> None:
    """Decode, choose a draft, and show it."""
    out = file_to_write("out", config.out)
    if config.threads:
        torch.set_num_threads(config.threads)
    model = load(config.model, config.dtype, config.device, draft=config.draft)
    if model.adaptive is None and model.draft is None:
        raise UserError(
            "decode.method needs a draft model (draft=DIR or draft=self:N) or a model with adaptive tokens, "
            "got neither, and drafts that are no graphs"
        )
    seen = drafts_of(model, config.prompt, config.decode)
    chosen = choose([draft.outcome for draft in seen], config.step)
    outcome, before = seen[chosen].outcome, config.prompt + seen[chosen].before
    caption = f"draft {chosen + 1} of {len(seen)}: {title(outcome, model.text)}"
    if parallel.is_first():
        print_graph(Console(), outcome, model.text, before=before, caption=caption)
        if out:
            write_picture(out, outcome, model.text, caption=caption)
            print_line(f"wrote {out}", error=True)


def drafts_of(model: Model, prompt: str, decode: DecodeConfig) -> list[Seen]:
    """Return every draft of the text but the last step's. A draft model's graph is drawn to its end, and is the
    same on every machine; the part that pays would differ from machine to machine.
    """
    decode = model.methods.settled(decode)
    if decode.method in BY_DRAFT_MODEL and decode.nodes is None:
        decode = replace(decode, nodes=NODES)
    seen, texts = list[Seen](), list[str]()
    for step in generate(
        model, prompt, decode, watch=lambda outcome: seen.append(Seen(outcome, "".join(texts)))
    ):
        texts.append(step.text)
    return seen


def choose(drafts: Sequence[Outcome], step: int | None) -> int:
    """Return the index of the draft to show: of the first with merges, else of the one of most nodes.

    Raises UserError for a step beyond the drafts, and where there are none.
    """
    if not drafts:
        raise UserError("decode.max_new_tokens must give a text long enough for drafts, got none in it")
    if step is not None:
        if step > len(drafts):
            raise UserError(f"step must be one of the text's {len(drafts)} drafts, got {step}")
        return step - 1
    merged = [index for index, outcome in enumerate(drafts) if outcome.graph.merged]
    return merged[0] if merged else max(range(len(drafts)), key=lambda index: len(drafts[index].graph.tokens))

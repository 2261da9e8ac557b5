"""Draw the pictures of the documentation from a model and the report on its speed.

    python -m docs.pictures MODEL_DIR REPORT_DIR
    python -m docs.pictures MODEL_DIR               # without the plots of a report

PNG pictures have at most 64 colours, so that their files stay small.
(Run it as a module: as a file, it would import this folder's conf.py, which is Sphinx's, as `conf`.)
"""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from xml.sax.saxutils import escape

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

from conf.console import label
from conf.pages import WIDTH, Draw
from infer import DecodeConfig, Model, generate, load
from infer.bench.plots import (
    bars_height,
    draw_roofline,
    speed_panels,
    speedup_draws,
    survival_draws,
)
from infer.bench.report import read_parts
from infer.drafters.candidates import CandidateSource, Places
from infer.drafters.drafting import SourceDrafters
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Candidates, Request
from infer.engine.sampling import Sampling
from infer.loop import Limits, Verified, decode
from infer.models.checkpoint import ModelDirectory
from infer.ngrams import Ngrams, TextNgrams
from infer.text import Text
from infer.trees.token_graph import Drafts, Outcome, unroll
from infer.trees.tree import Tree, flatten, mask
from infer.view import SOURCE_STYLES

IMAGES = Path(__file__).parent / "images"
COLOURS = 64  # per picture
PROMPT = "class LlamaAttention(nn.Module):\n    def __init__(self, config"
SVG_CELL = (8.4, 18)  # width and height of a character in a coloured text
SVG_EDGE = 12  # margin of its panel
#: The panel of a coloured text: width, height, margin, boxes, words.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" width="{0:g}" height="{1:g}">
<style>
.panel {{ fill: #ffffff; stroke: #d0d7de }} .own {{ fill: #1f2328 }} .given {{ fill: #656d76 }}
.source {{ fill: #000000 }}
@media (prefers-color-scheme: dark) {{
.panel {{ fill: #0d1117; stroke: #30363d }} .own {{ fill: #e6edf3 }} .given {{ fill: #8d96a0 }}
}}
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre }}
</style>
<rect class="panel" x="0.5" y="0.5" width="99.9%" height="99.7%" rx="6"/>
<g transform="translate({2} {2})" shape-rendering="crispEdges">
{3}
{4}
</g>
</svg>
"""
EDGE, PROBE_EDGE = "#b3bac2", "#0969da"
ACCEPTED, REJECTED, PROBE = "#cdeed3", "#fbdcd8", "#cfe3fb"
REST = "#b3bac2"  # bars of the combined candidates


def main(folder: Path, report: Path | None = None) -> None:
    """Draw the pictures of a report, if it is given, and of a model."""
    IMAGES.mkdir(exist_ok=True)
    if report:
        speed = read_parts(report)["speed"]
        rows = speed["rows"]
        tallest = max(bars_height(group) for group in speed_panels(rows).values())
        panels(speedup_draws(rows), IMAGES / "speedup.png", height=tallest)
        panels(survival_draws(rows), IMAGES / "acceptance.png")
        cost = {"": partial(draw_roofline, speed["roofline"])}
        panels(cost, IMAGES / "rows.png")
    model = load(folder, "float32")
    one_forward(model, IMAGES / "one_forward.png")
    combination(model, folder, IMAGES / "combination.png")
    coloured_text(model, IMAGES / "text.svg")


def panels(draws: Mapping[str, Draw], picture: Path, *, height: float = 3.0) -> None:
    """Draw a report's plots in one picture, two per row."""
    columns = min(2, len(draws))
    lines = -(-len(draws) // columns)
    size = (WIDTH * columns, height * lines)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (title, draw) in zip(grid, draws.items()):
        draw(axes)
        axes.set_title(label(title.partition(": ")[2]), fontsize=9)
        axes.tick_params(labelsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_size(8)
    for axes in grid[len(draws) :]:
        axes.set_visible(False)
    file = BytesIO()
    figure.savefig(file, format="png")
    shrink(Image.open(file), picture, width=1200)


def spelled(text: Text, id: int) -> str:
    """Return a token as a Python string literal, safe to print."""
    return repr(text.stream(opens=False)(id) or text.pieces.get(id, f"<{id}>"))


def shrink(image: Image.Image, picture: Path, *, width: int) -> None:
    """Save an image at most `width` pixels wide, with COLOURS colours."""
    if image.width > width:
        image = image.convert("RGB").resize(
            (width, round(image.height * width / image.width)), Image.Resampling.LANCZOS
        )
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        picture, optimize=True
    )


def coloured_text(model: Model, picture: Path, *, columns: int = 64) -> None:
    """Draw a decoded text as in a terminal: the background colour shows a token's source."""
    # With fixed drafts: measured costs would change the picture with the machine's load.
    steps = generate(model, PROMPT, DecodeConfig(probes="all", max_new_tokens=150))
    pieces = [(PROMPT, "given")]
    for step in steps:
        pieces += zip(step.texts, step.kinds, strict=True)
    picture.write_text(text_svg(pieces, columns), encoding="utf-8")


def text_svg(pieces: Sequence[tuple[str, str]], columns: int) -> str:
    """Return pieces of text with their kinds as an SVG image with a legend.

    The image has its own panel, light or dark as the reader prefers, because pages show it on both.
    Text on a source's colour is black in both.
    """
    kinds = {kind for _, kind in pieces}
    legend = [("given", "given"), ("the model's own", "")]
    legend += [(SOURCE_STYLES[k].meaning, k) for k in SOURCE_STYLES if k in kinds]
    shown = [*pieces, ("\n\n", "")]
    for name, kind in legend:
        shown += [(name, kind), ("  ", "")]
    width, height = SVG_CELL
    boxes, words = list[str](), list[str]()
    column = row = 0
    for text, kind in shown:
        for line in re.split("(\n)", text):
            if line == "\n" or column + len(line) > columns:
                column, row = 0, row + 1
            if not line or line == "\n":
                continue
            x, y, long = column * width, row * height, round(len(line) * width, 1)
            style = SOURCE_STYLES.get(kind)
            if style:
                box = f'<rect x="{x:g}" y="{y}" width="{long:g}" height="{height}" fill="{style.strong}"/>'
                boxes.append(box)
            if line.strip():
                role = "source" if style else kind or "own"
                words.append(
                    f'<text class="{role}" x="{x:g}" y="{y + 13}" textLength="{long:g}">{escape(line)}</text>'
                )
            column += len(line)
    size = (columns * width + 2 * SVG_EDGE, (row + 1) * height + 2 * SVG_EDGE)
    return SVG.format(*size, SVG_EDGE, "\n".join(boxes), "\n".join(words))


def one_forward(model: Model, picture: Path, *, k: int = 3) -> None:
    """Draw a step that verifies k drafts and drafts again: its tree and its attention mask."""
    assert model.adaptive is not None
    seen = list[Outcome]()
    decode = DecodeConfig(method="sdsat", k=k, probes="all", max_new_tokens=128)
    for _ in generate(model, PROMPT, decode, watch=seen.append):
        pass
    # All but the last draft were accepted.
    steps = (item for item in seen if len(item.path) == k)
    drawn = next(
        item
        for item in steps
        if max(len(spelled(model.text, token)) for token in item.drafts.tokens) < 10
    )
    tree = Tree.chain(drawn.drafts.tokens[0], drawn.drafts.tokens[1:])
    tree = tree.probe(range(1 + k), model.adaptive.ids[:1] * k)
    names = [spelled(model.text, token) for token in drawn.drafts.tokens]
    figure = Figure(figsize=(10.0, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_tree(
        left,
        tree,
        names,
        accepted=drawn.path,
        own=spelled(model.text, drawn.tokens[-1]),
    )
    _draw_mask(right, tree, names)
    figure.savefig(picture, dpi=120, bbox_inches="tight", pad_inches=0.2)
    shrink(Image.open(picture), picture, width=1200)


def _draw_tree(
    axes: Axes, tree: Tree, names: list[str], *, accepted: list[int], own: str
) -> None:
    """Draw the drafts from top to bottom, with each draft's probes to its right."""
    for node in range(len(tree.tokens)):
        column, row = _place(tree, node)
        colour = (
            PROBE
            if node >= tree.probes_from
            else ACCEPTED
            if node in accepted
            else REJECTED
        )
        box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": EDGE}
        name = names[node] if node < tree.probes_from else "A"
        axes.text(
            column,
            -row,
            name,
            ha="center",
            va="center",
            fontsize=9,
            family="monospace",
            bbox=box,
        )
        if node:
            x, y = _place(tree, tree.parents[node])
            axes.plot([x, column], [-y, -row], color=EDGE, linewidth=1, zorder=0)
    axes.set(xlim=(-0.7, 3.6), ylim=(-tree.probes_from + 0.3, 0.5))
    axes.set_axis_off()
    axes.set_title(
        f"verified: {len(accepted) - 1} of {tree.drafted} drafts accepted, then {own}",
        fontsize=10,
    )


def _place(tree: Tree, node: int) -> tuple[float, int]:
    """Return a node's column and row: a draft is below its parent, a probe to the right."""
    if node < tree.probes_from:
        return 0.0, node
    column, row = _place(tree, tree.parents[node])
    return column + 0.9, row


def _draw_mask(axes: Axes, tree: Tree, names: list[str]) -> None:
    """Draw the attention mask of the forward's rows over the last cache columns and the rows."""
    cache = 3
    attends = mask(flatten([tree], [cache]), [cache], cache + len(tree.tokens))[0, 0]
    axes.imshow(attends, cmap=ListedColormap(["#f6f8fa", "#57606a"]), aspect="equal")
    rows = [*names, *["A"] * (len(tree.tokens) - tree.probes_from)]
    axes.set_yticks(range(len(rows)), rows, fontsize=8, family="monospace")
    columns = ["cache", "", "", *rows]
    axes.set_xticks(
        range(len(columns)), columns, rotation=90, fontsize=8, family="monospace"
    )
    for place in (cache, cache + tree.probes_from):
        axes.axvline(place - 0.5, color=PROBE_EDGE, linewidth=1)
    axes.axhline(tree.probes_from - 0.5, color=PROBE_EDGE, linewidth=1)
    axes.tick_params(length=0)
    axes.set_title("one forward: a dark cell is attended", fontsize=10)


class Recorder(CandidateSource):
    """A source that records the text and the adaptive tokens' answers before each draft."""

    steps: list[tuple[list[int], Candidates]]

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See Source."""
        super().start(requests, sampling)
        self.steps = []

    def begin(
        self, contexts: Sequence[Sequence[int]], depths: Sequence[int]
    ) -> list[Places | None]:
        """See Source."""
        self._text = list(contexts[0])
        return super().begin(contexts, depths)

    def keep(self, b: int, drafts: Drafts | None, result: Verified) -> None:
        """See Source."""
        super().keep(b, drafts, result)
        if result.answers:
            self.steps.append(([*self._text, *result.tokens], result.answers))


def combination(model: Model, folder: Path, picture: Path, *, k: int = 5) -> None:
    """Draw the step with the largest gain from combining adaptive tokens and n-grams.

    In it all k drafts of the combination are right, and fewer of either source alone.
    """
    assert model.adaptive is not None
    ngrams = Ngrams(
        ModelDirectory(folder).ngrams,
        model.lm.config.vocab_size,
        weights=model.adaptive.ngrams,
    )
    mask_tokens = model.adaptive.mask(model.lm.config.vocab_size)
    recorder = Recorder(mask_tokens, k, ngrams=ngrams)
    drafters = SourceDrafters(recorder, FixedPlanner(k, "all"))
    prompt = model.text.encode(PROMPT)
    runner = model.runners.take(
        batch=1, capacity=len(prompt) + 256, max_rows=drafters.max_rows
    )
    steps = decode(runner, [Request(prompt, 0)], drafters, Limits(256))
    text = [*prompt, *(token for (step,) in steps for token in step.tokens)]
    best = 0
    for context, answers in recorder.steps:
        right = text[len(context) : len(context) + k]
        known = TextNgrams(ngrams)
        known.extend(context)
        drafts = [
            _chain(Places(context, given, sources, 1), k)
            for given, sources in ((answers, None), (None, known), (answers, known))
        ]
        *alone, together = (_matched(chain, right) for chain in drafts)
        if len(answers.ids) == together == k and k - max(alone) > best:
            best = k - max(alone)
            _draw_places(model, context, answers, known, right, picture)
    if not best:
        sys.exit(
            "error: in no step of this text do the combined sources beat each source alone with "
            f"{k} right drafts. Choose another prompt."
        )


def _chain(places: Places, k: int) -> list[int]:
    """Return the likeliest chain of k tokens."""
    drafts = unroll(places.graph, [0.0] * k, depth=k, expand=places.expand)
    return drafts.tokens[1:]


def _matched(drafts: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of right drafts before the first wrong one."""
    return next(
        (at for at, pair in enumerate(zip(drafts, right)) if pair[0] != pair[1]),
        len(drafts),
    )


def _draw_places(
    model: Model,
    context: list[int],
    answers: Candidates,
    ngrams: TextNgrams,
    right: list[int],
    picture: Path,
    *,
    width: int = 3,
) -> None:
    """Draw the likeliest candidates by source and place, after right drafts before them."""
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    axes = figure.subplots(3, len(right), sharex=True)
    both, node = Places(context, answers, ngrams, 16), 0
    for place, token in enumerate(right):
        both.expand(node)
        alone = Places([*context, *right[:place]], None, ngrams, width)
        alone.expand(0)
        rows = [
            list(zip(answers.ids[place], answers.weights[place])),
            [
                (alone.graph.tokens[child], alone.graph.chances[child])
                for child in alone.graph.children[0]
            ],
            [
                (both.graph.tokens[child], both.graph.chances[child])
                for child in both.graph.children[node]
            ],
        ]
        for axis, candidates, colour in zip(
            axes[:, place],
            rows,
            (SOURCE_STYLES["adaptive"], SOURCE_STYLES["ngrams"], None),
        ):
            _draw_candidates(
                axis,
                model,
                candidates[:width],
                token,
                colour.strong if colour else REST,
                width,
            )
        axes[0, place].set_title(f"place {place + 1}", fontsize=10)
        node = next(
            child
            for child in both.graph.children[node]
            if both.graph.tokens[child] == token
        )
    for axis, name in zip(axes[:, 0], ("adaptive\ntokens", "n-grams", "together")):
        axis.set_ylabel(name, fontsize=10)
    figure.savefig(picture, dpi=120)
    shrink(Image.open(picture), picture, width=1200)


def _draw_candidates(
    axis: Axes,
    model: Model,
    candidates: Sequence[tuple[int, float]],
    right: int,
    colour: str,
    width: int,
) -> None:
    """Draw candidates as bars, the likeliest on top, with the text's actual token in bold."""
    axis.barh(
        range(len(candidates)),
        [share for _, share in candidates],
        color=colour,
        height=0.8,
    )
    for row, (token, share) in enumerate(candidates):
        weight = "bold" if token == right else "normal"
        piece = re.sub(" {9,}", " … ", spelled(model.text, token))
        label = f"{piece}  {share:.2f}"
        axis.text(
            0.03, row, label, va="center", fontsize=9, family="monospace", weight=weight
        )
    axis.set(xlim=(0, 1), ylim=(width - 0.5, -0.5), xticks=[], yticks=[])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""A draft's graph on a terminal: a tree, whose merged nodes name the node that they go on behind.

Blue, after the paper's Figure 6 (GSD), is what was accepted behind a merged node.

✓ 0 'def'
├── ✓ 1 ' f' 0.61
│   ├── ✗ 3 '(' 0.80
│   └── · 4 ':' 0.02
└── ✗ 2 ' g' 0.22 → 1            what follows 1 follows 2
"""

from rich.console import Console
from rich.style import Style
from rich.text import Text as Line
from rich.tree import Tree

from infer.drafters.outcome import Fate, Outcome
from infer.text import Text

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

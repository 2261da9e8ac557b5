"""One draft as a graph: what is shown of it, where, and for whom there is none."""

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conf import UserError, run
from infer import Model, generate, load
from infer.config import DecodeConfig, GraphConfig
from infer.graph.__main__ import main
from infer.graph.picture import choose, place_nodes, print_graph, write_picture
from infer.trees.token_graph import Fate, Outcome, TokenGraph, unroll
from tests.full_disk import largest_file
from tests.messages import error


def figure_2() -> TokenGraph:
    """GSD's Figure 2, as token_graph.py draws it: "a red" and "one red", the second merged into the first."""
    graph = TokenGraph([20])
    for parent, token, chance in ((0, 21, 0.6), (0, 22, 0.3), (1, 23, 0.7), (2, 23, 0.5), (3, 24, 0.4)):
        graph.add(parent, token, chance)
    graph.merge(4, 3)
    return graph


def outcome_of(path: list[int], nodes: int = 9) -> Outcome:
    """Figure 2 with so many nodes verified, and this path of the tree accepted."""
    graph = figure_2()
    drafts = unroll(graph, [0.0] * nodes, depth=9)
    return Outcome(graph, drafts, path, [drafts.tokens[node] for node in path[1:]] + [25])


def test_a_node_fares_as_the_best_of_its_copies() -> None:
    """The tree's nodes 0 to 6 are 0 1 3 2 5 4 5 of the graph."""
    outcome = outcome_of([0, 3, 5, 6])
    assert outcome.drafts.nodes == [0, 1, 3, 2, 5, 4, 5] and outcome.accepted == [0, 2, 4, 5]
    yes, shared, no, never = Fate
    assert outcome.fates == [yes, no, yes, no, yes, shared]
    assert outcome_of([0, 1], nodes=3).fates == [yes, yes, no, no, never, never]


def test_on_a_terminal_a_merged_node_names_the_one_it_goes_on_behind(model: Model) -> None:
    file = io.StringIO()
    outcome = outcome_of([0, 3], nodes=4)
    print_graph(Console(file=file, width=30), outcome, model.text, before="x\x1b[2J\n", caption="told")
    a, item, red, car = (repr(model.text.stream(opens=False)(id)) for id in range(21, 25))
    assert file.getvalue().splitlines() == [
        "told",
        r"behind 'x\x1b[2J\n'",
        "",
        f"✓ 0 {model.text.stream(opens=False)(20)!r}",
        f"├── ✗ 1 {a} 0.60",
        f"│   └── ✗ 3 {red} 0.70",
        f"│       └── ✗ 5 {car} 0.40",
        f"└── ✓ 2 {item} 0.30",
        f"    └── · 4 {red} 0.50 → 3",
        "",
        "✓ accepted  ✓ accepted behind a merged node  ✗ verified, rejected  · not verified  → goes on behind",
    ]


@given(st.lists(st.integers(0, 10**6), max_size=40))
def test_no_two_nodes_of_a_picture_overlap_and_none_is_above_its_parent(choices: list[int]) -> None:
    graph = TokenGraph([0])
    for choice in choices:
        graph.add(choice % len(graph.tokens), 1, 0.5)
    places = place_nodes(graph)
    assert len(set(places)) == len(places) and places[0] == (0, 0)
    for node, parent in list(enumerate(graph.parents))[1:]:
        assert places[node][0] == places[parent][0] + 1 and places[node][1] >= places[parent][1]


def test_the_first_draft_with_merges_is_shown_else_the_one_of_most_nodes() -> None:
    merged, small, large = outcome_of([0]), outcome_of([0]), outcome_of([0])
    for item in (small, large):
        item.graph.merged.clear()
    large.graph.add(5, 26, 0.1)
    assert choose([small, merged, large], None) == 1 and choose([small, large, small], None) == 1
    assert choose([small, merged, large], 3) == 2
    with pytest.raises(UserError, match="step must be one of the text's 2 drafts, got 3"):
        choose([small, large], 3)


@pytest.fixture(scope="module")
def drafting(model_dir: Path) -> Model:
    """The model, and its first layer to draft for it."""
    return load(model_dir, "float32", draft="self:1")


@pytest.mark.parametrize(
    "decode",
    [
        DecodeConfig(method="gsd", nodes=16, tau=1, theta_prob=0.01, max_new_tokens=40),
        DecodeConfig(method="ssd", nodes=4, max_new_tokens=40),
        DecodeConfig(method="sdsat", probes="all", width=4, nodes=8, max_new_tokens=40),
        DecodeConfig(method="sdsat", probes="root", width=4, tree="paper", max_new_tokens=40),
        DecodeConfig(method="sdsat", max_new_tokens=40),
    ],
    ids=lambda decode: f"{decode.method} {decode.probes} {decode.tree}",
)
def test_who_looks_on_is_reported_what_was_drafted_and_what_came_of_it(
    drafting: Model, decode: DecodeConfig
) -> None:
    """Told before the step comes, in the text's order; the tree's every edge is one of the graph."""
    seen, message = list[Outcome](), list[int]()
    for step in generate(drafting, "def f(x):", decode, watch=seen.append):
        if len(seen) > len(message):
            message.append(step.drafted)
            assert seen[-1].tokens == step.tokens and len(seen[-1].path) - 1 == step.accepted
            assert len(seen[-1].drafts.tokens) - 1 == step.drafted and not step.finished
    assert len(seen) == len(message) and sum(message)
    for outcome in seen:
        graph, drafts = outcome.graph, outcome.drafts
        assert [graph.tokens[node] for node in drafts.nodes] == drafts.tokens
        edges = zip(drafts.parents[1:], drafts.nodes[1:])
        assert all(node in graph.children[drafts.nodes[parent]] for parent, node in edges)
        assert outcome.rows > 0 if decode.method in ("gsd", "ssd") else outcome.rows == 0


def show(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """As `python -m infer.graph` with these arguments."""
    monkeypatch.setattr("sys.argv", ["graph", *map(str, arguments)])
    run("graph", GraphConfig, main)


@pytest.mark.parametrize(
    "arguments",
    [
        ["draft=self:1", "decode=gsd", "decode.tau=1", "step=2"],
        ["decode=nucleus", "decode.k=3"],
        ["draft=self:1"],
        [],
    ],
    ids=["gsd", "nucleus", "draft", "auto"],
)
def test_it_is_printed_and_drawn(
    model_dir: Path, tmp_path: Path, arguments: list[str], monkeypatch, capsys
) -> None:
    first = [f"model={model_dir}", "prompt=def $f$(x):", "decode.max_new_tokens=24", *arguments]
    for name, begins in (("graph.svg", b"<?xml"), ("graph.png", b"\x89PNG")):
        show(monkeypatch, *first, f"out={tmp_path / name}")
        message = capsys.readouterr()
        assert (tmp_path / name).read_bytes().startswith(begins) and f"wrote {tmp_path / name}" in message.err
    assert message.out.startswith("draft ") and "\n✓ 0 " in message.out and "✓ accepted" in message.out
    picture = ElementTree.parse(tmp_path / "graph.svg").getroot()
    assert picture.tag.endswith("svg") and "viewBox" in picture.attrib
    assert not {"width", "height"} & picture.attrib.keys()  # it was wider than a phone
    (title,) = picture.findall("{http://www.w3.org/2000/svg}title")
    assert (title.text or "").startswith("draft ")
    if "step=2" in arguments:
        assert message.out.startswith("draft 2 of ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["decode=plain"],
            "decode.method must be sdsat, ssd, tsd or gsd, whose drafts are graphs, got plain",
        ),
        (["decode=prompt_lookup"], "got prompt_lookup"),
        (["step=0"], "step must be the number of a draft, from 1 on, got 0"),
        (["step=900"], "step must be one of the text's "),
        (["decode.max_new_tokens=1"], "decode.max_new_tokens must give a text long enough for drafts"),
        (["out=graph.pdf"], "out must be a file that ends in .svg or .png, got graph.pdf"),
        (["out=/nowhere/at/all.svg"], "out=/nowhere/at/all.svg must be a file in a folder that exists"),
        (["decode=gsd"], "decode.method=gsd needs a draft model, got none"),
        (["draft=self:1", "decode=sdsat"], "draft=self:1 needs decode=ssd|tsd|gsd, got sdsat"),
        (["decode.tau=3"], "decode.tau needs decode.method=ssd|tsd|gsd, got sdsat"),
        (["dtype=int8"], "dtype must be one of float32, bfloat16, float16, got int8"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_a_mistake_is_one_line_and_code_2(
    model_dir: Path, arguments: list[str], sentence: str, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        show(monkeypatch, f"model={model_dir}", "prompt=def f(x):", *arguments)
    message = capsys.readouterr()
    assert ended.value.code == 2 and sentence in error(message.err) and not message.out


def test_a_model_without_adaptive_tokens_has_no_graph_of_its_own(base_dir: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        show(monkeypatch, f"model={base_dir}", "prompt=def f(x):")
    assert "needs a draft model (draft=DIR or draft=self:N) or a model with adaptive" in capsys.readouterr().err


def test_a_picture_is_there_whole_or_not_at_all(tmp_path: Path, model: Model) -> None:
    """On a full disk half a picture took the place of the last one."""
    path = tmp_path / "graph.svg"
    path.write_text("the last one")
    with largest_file(2000), pytest.raises(OSError, match="File too large"):
        write_picture(path, outcome_of([0, 1, 3]), model.text, caption="")
    assert [item.name for item in tmp_path.iterdir()] == ["graph.svg"] and path.read_text() == "the last one"

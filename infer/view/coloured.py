"""Colours of a text by the source of each token, for pages and terminals: style rules, spans, legend.

The hues are Okabe and Ito's, which the colour-blind tell apart. Backgrounds show white space that was drafted;
underlines tell the sources apart where colours do not.

A decoded text as one HTML page, coloured by the source of each token.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from conf.characters import pictures
from conf.files import write_bytes
from infer.api import TextStep
from infer.text import in_pieces


@dataclass(frozen=True)
class Kind:
    """How accepted drafts of one source look: backgrounds of a page in light and dark, and of a terminal."""

    name: str
    meaning: str
    light: str
    dark: str
    strong: str  # behind black text, also in plots
    line: str = "none"  # the underline of a page, as CSS spells it


KINDS = {  # of accepted drafts, as in Step.kinds
    "adaptive": Kind("adaptive", "adaptive tokens", "#a8d4f5", "#0b4f7d", "#56b4e9"),
    "text": Kind("text", "n-grams of this text", "#ffcf70", "#7a4a00", "#e69f00", "dotted"),
    "ngrams": Kind("n-grams", "n-grams of the training data", "#8fd3b6", "#14603f", "#009e73", "solid"),
    "drafted": Kind("drafted", "drafted and accepted", "#f3eda0", "#5c5600", "#f0e442"),
    "shared": Kind("shared", "behind a merged node", "#dbb4d2", "#6b2f63", "#cc79a7", "solid"),
}
OWN = "the model's own"
INKS = {
    "light": ("#1f2328", "#ffffff", "#656d76", "#d1d9e0"),
    "dark": ("#e6edf3", "#0d1117", "#8d96a0", "#30363d"),
}


def _variables(scheme: str) -> str:
    """Return the colours of a scheme, "light" or "dark", as variables of CSS."""
    names = dict(zip(("ink", "paper", "faint", "edge"), INKS[scheme]))
    names |= {name: getattr(kind, scheme) for name, kind in KINDS.items()}
    return " ".join(f"--{name}: {colour};" for name, colour in names.items())


STYLE = "\n".join(
    [
        f":root {{ {_variables('light')} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables('dark')} }} }}",
        "pre { font: 13px/1.6 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;",
        "      overflow-wrap: anywhere; border: 1px solid var(--edge); border-radius: 6px; padding: 1rem; }",
        ".given { color: var(--faint); }",
        *(
            f":is(pre, .legend, .parts) .{name} "
            f"{{ background: var(--{name}); border-bottom: 1px {kind.line} currentColor; }}"
            for name, kind in KINDS.items()
        ),
        ".legend span { display: inline-block; margin-right: 1rem; padding: 0 0.25rem; }",
    ]
)


def span(kind: str, text: str, *, title: str = "") -> str:
    """Return text of a kind as HTML, without a colour where the kind has none; nothing for no text."""
    hover = f' title="{escape(title)}"' if title else ""
    return f'<span class="{escape(kind)}"{hover}>{safe(text)}</span>' if text else ""


def meaning(kind: str) -> str:
    """Return what a kind of `Step.kinds` means."""
    return KINDS[kind].meaning if kind in KINDS else OWN if kind == "own" else kind


def safe(text: str) -> str:
    """Return text that no page takes for markup, its control characters shown as their pictures."""
    return escape(pictures(text))


def legend(kinds: Collection[str]) -> str:
    """Return what the colours of these kinds mean, as HTML."""
    parts = [span(name, kind.meaning) for name, kind in KINDS.items() if name in kinds]
    return f'<p class="legend">{"".join([span("given", "given"), span("own", OWN), *parts])}</p>'


TEMPLATE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Decoded text</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
$style
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.25rem; }
</style></head><body>
<h1>$title</h1>
$legend
<pre>$text</pre>
<p>$summary</p>
</body></html>
""")


def write_page(
    path: Path, *, title: str, before: str, after: str, steps: Sequence[TextStep], summary: object
) -> None:
    """Write the page; a reader sees the whole of it or none."""
    body = "".join([span("given", before), *map(marked, steps), span("given", after)])
    page = TEMPLATE.substitute(
        style=STYLE,
        title=escape(title),
        legend=legend({kind for step in steps for kind in step.kinds}),
        text=body,
        summary=escape(str(summary)),
    )
    write_bytes(path, page.encode("utf-8", "replace"))


def marked(step: TextStep) -> str:
    """Return one forward's text, which says on hovering what it came to."""
    hover = f"{step.accepted} of {step.drafted} drafts accepted" if step.drafted else "nothing drafted"
    pieces = in_pieces(zip(step.kinds, step.texts, strict=True))
    body = "".join(safe(text) if kind == "own" else span(kind, text) for kind, text in pieces)
    return f'<span title="{hover}">{body}</span>'

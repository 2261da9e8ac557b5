"""A decoded text as one HTML page, coloured by the source of each token."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from conf.files import write_bytes
from infer.api import TextStep
from infer.output import in_pieces
from infer.view.coloured import STYLE, legend, safe, span
from infer.view.summary import Summary

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
    path: Path, *, title: str, before: str, after: str, steps: Sequence[TextStep], summary: Summary
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

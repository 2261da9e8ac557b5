"""A decoded text as one HTML page: what was drafted in another colour than the model's own."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from conf.files import write_bytes
from infer.api import TextStep
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
    body = "".join([span("given", before), *map(_marked, steps), span("given", after)])
    page = TEMPLATE.substitute(
        style=STYLE,
        title=escape(title),
        legend=legend(shared=any(step.shared for step in steps)),
        text=body,
        summary=escape(str(summary)),
    )
    write_bytes(path, page.encode("utf-8", "replace"))


def _marked(step: TextStep) -> str:
    """One forward's text, which says on hovering what it came to."""
    told = f"{step.accepted} of {step.drafted} drafts accepted" if step.drafted else "nothing drafted"
    first = step.accepted - step.shared
    drafted, shared = "".join(step.texts[:first]), "".join(step.texts[first : step.accepted])
    own = safe("".join(step.texts[step.accepted :]))
    return f'<span title="{told}">{span("drafted", drafted)}{span("shared", shared)}{own}</span>'

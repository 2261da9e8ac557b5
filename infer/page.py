"""A decoded text as one HTML page: what was drafted in another colour than the model's own."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from infer.api import TextStep
from infer.summary import Summary
from infer.view import PICTURES

TEMPLATE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Decoded text</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
:root { --ink: #1f2328; --paper: #ffffff; --faint: #656d76; --edge: #d1d9e0; --drafted: #cdeed3;
        --shared: #cfe3fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #8d96a0; --edge: #30363d; --drafted: #1b4d2c;
          --shared: #17406d; }
}
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.25rem; }
pre { font: 13px/1.6 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; border: 1px solid var(--edge); border-radius: 6px; padding: 1rem; }
.given { color: var(--faint); }
.drafted { background: var(--drafted); border-radius: 2px; }
.shared { background: var(--shared); border-radius: 2px; }
.legend span { display: inline-block; margin-right: 1.5rem; padding: 0 0.25rem; }
</style></head><body>
<h1>$title</h1>
<p class="legend"><span class="given">given</span><span>the model\'s own</span>
<span class="drafted">drafted and accepted</span>$shared</p>
<pre>$text</pre>
<p>$summary</p>
</body></html>
""")


def write_page(
    path: Path, *, title: str, before: str, after: str, steps: Sequence[TextStep], summary: Summary
) -> None:
    """Write the page; a reader sees the whole of it or none."""
    body = "".join([_span("given", before), *map(_marked, steps), _span("given", after)])
    shared = _span("shared", "behind a merged node") if any(step.shared for step in steps) else ""
    page = TEMPLATE.substitute(title=escape(title), text=body, shared=shared, summary=escape(str(summary)))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)


def _marked(step: TextStep) -> str:
    """One forward's text, which says on hovering what it came to."""
    told = f"{step.accepted} of {step.drafted} drafts accepted" if step.drafted else "nothing drafted"
    first = step.accepted - step.shared
    drafted, shared = "".join(step.texts[:first]), "".join(step.texts[first : step.accepted])
    own = _safe("".join(step.texts[step.accepted :]))
    return f'<span title="{told}">{_span("drafted", drafted)}{_span("shared", shared)}{own}</span>'


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{_safe(text)}</span>' if text else ""


def _safe(text: str) -> str:
    return escape(text.translate(PICTURES))

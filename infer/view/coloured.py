"""Text as HTML, coloured by who produced it: its rules of style, its spans, and its legend."""

from html import escape

from conf.characters import pictures

STYLE = """\
:root { --ink: #1f2328; --paper: #ffffff; --faint: #656d76; --edge: #d1d9e0; --drafted: #cdeed3;
        --shared: #cfe3fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #8d96a0; --edge: #30363d; --drafted: #1b4d2c;
          --shared: #17406d; }
}
pre { font: 13px/1.6 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; border: 1px solid var(--edge); border-radius: 6px; padding: 1rem; }
.given { color: var(--faint); }
.drafted { background: var(--drafted); border-radius: 2px; }
.shared { background: var(--shared); border-radius: 2px; }
.legend span { display: inline-block; margin-right: 1.5rem; padding: 0 0.25rem; }"""
GIVEN = '<span class="given">given</span>'
OWN = "<span>the model's own</span>"
DRAFTED = '<span class="drafted">drafted and accepted</span>'
SHARED = '<span class="shared">behind a merged node</span>'


def span(kind: str, text: str, *, title: str = "") -> str:
    """Text of a kind: given, drafted, shared, or another that has no colour; nothing for no text."""
    hover = f' title="{escape(title)}"' if title else ""
    return f'<span class="{escape(kind)}"{hover}>{safe(text)}</span>' if text else ""


def safe(text: str) -> str:
    """Text that no page takes for markup, its control characters shown as their pictures."""
    return escape(pictures(text))


def legend(*, shared: bool) -> str:
    """What the colours say; `shared` where some text was accepted behind a merged node."""
    return f'<p class="legend">{GIVEN}{OWN}{DRAFTED}{SHARED if shared else ""}</p>'

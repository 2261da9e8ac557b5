"""Sphinx's settings: the Markdown of this folder, which also reads on GitHub, as a site."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "adaptive-tokens"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
nitpicky = True
highlight_language = "text"

# settings.md: the fields of the dataclasses of settings, with the comments above them.
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
add_module_names = False

# Anchors as GitHub makes them: a link to a heading works in both places, and is checked here.
myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def no_signature(app: Any, kind: str, *_: Any) -> tuple[str, None] | None:
    """Leave out the arguments of a dataclass: its fields have them."""
    return ("", None) if kind == "class" else None


def is_no_field(app: Any, kind: str, name: str, value: Any, *_: Any) -> bool | None:
    """Leave out methods and properties."""
    return True if callable(value) or isinstance(value, property) else None


def setup(app: Any) -> None:
    """Register what settings.md leaves out."""
    app.connect("autodoc-process-signature", no_signature)
    app.connect("autodoc-skip-member", is_no_field)

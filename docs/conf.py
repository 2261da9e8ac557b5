"""Sphinx's settings: the Markdown of this folder, which also reads on GitHub, as a site."""

project = "adaptive-tokens"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True
highlight_language = "text"

# Anchors as GitHub makes them: a link to a heading works in both places, and is checked here.
myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

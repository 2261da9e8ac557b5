"""Places in docs/ that explain an error which is about more than a setting: what UserError takes as `page`."""

DOCS = "docs"  # in the project's root
UNFINISHED = "troubleshooting.md#unfinished-folder"
ANOTHER = "troubleshooting.md#another-configuration"
MEMORY = "troubleshooting.md#out-of-memory"
DIVERGED = "troubleshooting.md#diverged"
QUALITY = "troubleshooting.md#loss-of-quality"
NOT_IDENTICAL = "troubleshooting.md#not-identical"
HUB = "troubleshooting.md#hub-and-offline"

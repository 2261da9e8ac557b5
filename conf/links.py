"""The page of the documentation that explains an error, as a path from the project's root. Pure."""

import re

from conf.pages import DOCS
from conf.schema import place

NAMED = re.compile(r"(?:unknown )?setting '(?P<quoted>[\w.]+)'|(?P<name>[A-Za-z_][\w.]*)(?=[=:,\[]| must )")
MEANT = re.compile(r"did you mean '(?P<meant>[\w.]+)'\?$")


def settings_page(entry: str) -> str:
    """Return the reference of a stage's settings."""
    return f"{DOCS}/settings/{entry}.md"


def named(sentence: str, schema: type, groups: tuple[str, ...]) -> str | None:
    """Return the setting or group that a sentence begins with, or asks about at its end; None for neither."""
    if meant := MEANT.search(sentence):
        name = meant["meant"]
    elif begins := NAMED.match(sentence):
        name = begins["quoted"] or begins["name"]
    else:
        return None
    return name if name in groups else place(schema, name)


def link(sentence: str, page: str | None, entry: str, schema: type, groups: tuple[str, ...]) -> str | None:
    """Where `sentence` is explained: at `page` of docs/, else at the setting that it names."""
    if page:
        return f"{DOCS}/{page}"
    if setting := named(sentence, schema, groups):
        return f"{settings_page(entry)}#{setting}"
    return settings_page(entry) if "--help" in sentence else None

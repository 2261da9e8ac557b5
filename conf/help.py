"""--help: what a stage does, how it is called, its groups and its settings, at the terminal's width."""

import re
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from conf.describe import Entry, Section, Setting
from conf.links import settings_page

INDENT = 2  # characters before a name
WIDEST = 40  # at most before what is said of it: two fifths of a line
GROUPS = "files of settings, chosen by name; a setting on the command line goes over theirs"


def print_help(entry: Entry, console: Console) -> None:
    """Print all of it; without colours where there is no terminal."""
    for line in lines(entry, console.width):
        console.print(line, soft_wrap=True)


def lines(entry: Entry, width: int) -> Iterator[Text]:
    """All of it, in lines of at most `width` characters where its words allow that."""
    yield from _wrapped(entry.title[:1].upper() + entry.title[1:], width)
    yield Text()
    yield Text.assemble(("Usage: ", "bold"), f"{entry.command.words} NAME=VALUE ...")
    for example in entry.command.examples:
        yield from _command(example, width)
    yield Text()
    if entry.groups:
        yield from _groups(entry, width)
    for section in entry.sections:
        if section.settings:
            yield from _section(section, width)
    page = settings_page(entry.name)
    yield from _wrapped(
        "--cfg prints the settings as they would be, and stops. -m runs every combination of values with "
        f"commas, one after the other. More is in {page}.",
        width,
    )


def _groups(entry: Entry, width: int) -> Iterator[Text]:
    yield from _heading("Groups", GROUPS, width)
    for group in entry.groups:
        if group.several:
            yield from _row(f"{group.name}=", "A,B,...", "one or several of these:", width)
        for choice in group.choices:
            mark = "(default) " if choice.name in group.default else ""
            yield from _row(f"{group.name}=", choice.name, mark + " ".join(choice.lines[:1]), width)
        if group.otherwise:
            yield from _row(f"{group.name}=", "null", f"(default) {group.otherwise}", width)
    yield Text()


def _section(section: Section, width: int) -> Iterator[Text]:
    yield from _heading(section.name or "Settings", section.text, width)
    for setting in section.settings:
        yield from _row(f"{setting.name}=", setting.default or "", _said(setting), width)
    yield Text()


def _said(setting: Setting) -> str:
    if setting.default is None:
        return f"(required) {setting.description}"
    # The default of others shows what they are.
    return f"{setting.description} ({setting.kind})" if setting.default == "null" else setting.description


def _heading(name: str, text: str, width: int) -> Iterator[Text]:
    for number, line in enumerate(_wrapped(f"{name}: {text}" if text else name, width)):
        line.stylize("bold", 0, 0 if number else len(name))
        yield line


def _row(name: str, value: str, said: str, width: int) -> Iterator[Text]:
    """Yield the lines of a setting: its name and value, with its text beside or below them."""
    margin = " " * min(WIDEST, 2 * width // 5)
    text = list(_wrapped(said, width - len(margin), margin=margin))
    left = list(_wrapped(name + value, width - INDENT, margin=" " * INDENT, then=" " * INDENT))
    for line in left:
        line.stylize("green")
    left[0].stylize("cyan", INDENT, INDENT + len(name))
    if len(left) == 1 and len(left[0]) < len(margin) and text:
        left[0].append(margin[len(left[0]) :]).append_text(text.pop(0)[len(margin) :])
    yield from left
    yield from text


def _command(example: str, width: int) -> Iterator[Text]:
    """Return a command, on several lines as a shell takes it: a text in quotes stays on one."""
    whole = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace(" ", "\xa0"), example)
    *first, last = _wrapped(whole, width - INDENT - len(" \\"), margin=" " * INDENT, then=" " * INDENT)
    for line in first:
        yield Text(line.plain.replace("\xa0", " ") + " \\")
    yield Text(last.plain.replace("\xa0", " "))


def _wrapped(text: str, width: int, *, margin: str = "", then: str = "") -> Iterator[Text]:
    """Lines of at most `width` characters and a margin; those after the first begin with `then`."""
    words = {"break_long_words": False, "break_on_hyphens": False}
    for line in textwrap.wrap(text, width, subsequent_indent=then, **words):  # type: ignore[arg-type]
        yield Text(margin + line)

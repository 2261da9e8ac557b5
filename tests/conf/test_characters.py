"""PlainConsole prints untrusted names and texts literally."""

import io

from rich.table import Table

from conf.console import PlainConsole, pictures

NAMES = ["$\\frac$", "[/b]x", "[bold]x[/bold]", ":bug:", "\x1b]0;title\x07"]
NAMES += ["half \ud800", "a\nb"]
ESCAPE = "\x1b"


def printed(*objects: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=200).print(*objects)
    return file.getvalue()


def test_a_console_prints_names_literally() -> None:
    """A language called "[/b]x" ended an evaluation in rich's MarkupError."""
    for name in NAMES:
        table = Table(name, title=name)
        table.add_row(name)
        out = printed(name) + printed(table)
        assert out.count(pictures(name).split("\n")[0]) >= 3
        assert ESCAPE not in out and out.encode()


def test_a_table_wider_than_the_terminal_keeps_its_figures() -> None:
    """Bug: in a pipe or a log, which have 80 columns, a comparison of four models had "1.…" for 1.23."""
    file = io.StringIO()
    heads, row = ["a long name"] * 9, [f"{at}.2345678" for at in range(9)]
    PlainConsole(file=file, width=40).table("title", heads, [row])
    assert file.getvalue().splitlines()[-2].split() == row

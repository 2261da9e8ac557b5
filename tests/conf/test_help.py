import io
import shlex
import sys
from typing import Any

import pytest
from rich.console import Console

from conf import run
from conf.describe import Entry, describe
from conf.help import lines, print_help
from docs.reference import ENTRIES


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def entry(request: Any) -> Entry:
    return describe(request.param, ENTRIES[request.param])


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal_and_has_every_setting(entry: Entry, width: int) -> None:
    told = [line.plain for line in lines(entry, width)]
    assert max(map(len, told)) <= width
    for setting in (setting for section in entry.sections for setting in section.settings):
        assert any(line.startswith(f"  {setting.name}=") for line in told), setting
    for group in entry.groups:
        for choice in group.choices:
            assert any(line.split()[:1] == [f"{group.name}={choice.name}"] for line in told), choice


def test_what_is_said_stands_in_one_column(entry: Entry) -> None:
    told = [line.plain for line in lines(entry, 80)]
    below = [line for line in told if line.startswith(" " * 5)]
    assert below and {len(line) - len(line.lstrip()) for line in below} == {32}


@pytest.mark.parametrize("width", [40, 80, 120])
def test_an_example_on_several_lines_is_the_same_to_a_shell(entry: Entry, width: int) -> None:
    told = "\n".join(line.plain for line in lines(entry, width)).partition("\n\n")[2].partition("\n\n")[0]
    commands = told.replace("\\\n", " ").splitlines()[1:]
    assert list(map(shlex.split, commands)) == list(map(shlex.split, entry.command.examples))


def test_off_a_terminal_help_is_plain_text(entry: Entry) -> None:
    printed = io.StringIO()
    print_help(entry, Console(file=printed, width=80))
    assert printed.getvalue().splitlines() == [line.plain for line in lines(entry, 80)]


@pytest.mark.parametrize("flag", [["--cfg"], ["-c", "job"], ["--cfg", "job"]])
def test_cfg_prints_the_settings_and_does_nothing(flag: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["infer", "prompt=a: [b]", *flag, "decode=plain"])
    run("infer", ENTRIES["infer"], lambda config: pytest.fail("it ran"))
    printed = capsys.readouterr().out
    assert printed.startswith("model: ???\nprompt: 'a: [b]'\n") and "\n  method: plain\n" in printed


@pytest.mark.parametrize("argument", ["--local_rank=0", "prompt", "-v"])
def test_what_is_no_setting_is_told_in_one_sentence(argument: str, capsys: Any, monkeypatch: Any) -> None:
    """Hydra's: "LexerNoViableAltException: --local_rank=0" and "missing EQUAL at '<EOF>'"."""
    monkeypatch.setattr(sys, "argv", ["infer", "model=m", argument])
    with pytest.raises(SystemExit, match="^2$"):
        run("infer", ENTRIES["infer"], lambda config: None)
    assert capsys.readouterr().err == (
        f"error: settings must be given as name=value, got '{argument}'. --help lists the settings\n"
        "  see docs/settings/infer.md\n"
    )


@pytest.mark.parametrize("given", [["--model", "X"], ["--model=X"]])
def test_a_setting_with_hyphens_is_told_how_it_is_written(
    given: list[str], capsys: Any, monkeypatch: Any
) -> None:
    """`--model X` was told that settings are name=value, not that this one is model=X."""
    monkeypatch.setattr(sys, "argv", ["infer", *given, "prompt=x"])
    with pytest.raises(SystemExit, match="^2$"):
        run("infer", ENTRIES["infer"], lambda config: None)
    sentence = f"error: settings must be given as name=value, got '{given[0]}'. Write model=X\n"
    assert capsys.readouterr().err == sentence

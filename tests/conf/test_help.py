import io
import sys
from typing import Any

import pytest
from rich.console import Console

from conf import run
from conf.help import Entry, describe, print_help
from docs.reference import ENTRIES


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def entry(request: Any) -> Entry:
    return describe(request.param, ENTRIES[request.param])


@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_the_terminal_and_has_every_setting(entry: Entry, width: int) -> None:
    """Off a terminal it is plain text."""
    printed = io.StringIO()
    print_help(entry, Console(file=printed, width=width))
    lines = printed.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines if line.strip() not in entry.examples) <= width
    assert {f"  {example}" for example in entry.examples} <= set(lines), "whole, to be copied"
    for setting in (setting for section in entry.sections for setting in section.settings):
        assert any(line.startswith(f"  {setting.name}=") for line in lines), setting
    for group in entry.groups:
        for choice in group.choices:
            assert any(line.split()[:1] == [f"{group.name}={choice.name}"] for line in lines), choice


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

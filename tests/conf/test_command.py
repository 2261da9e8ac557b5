"""The console script runs what `python -m` runs."""

import sys

import pytest

from conf.command import COMMANDS, main


def test_every_command_is_a_module_with_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generate", "report"):
        monkeypatch.setattr(sys, "argv", ["adaptive-tokens", name, "--help"])
        main()
        assert f"python -m {COMMANDS[name]}" in capsys.readouterr().out


def test_another_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptive-tokens", "sped"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: the command must be one of data, train" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["adaptive-tokens"])
    main()
    assert "python -m infer.speed" in capsys.readouterr().out

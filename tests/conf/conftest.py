"""What a wrong command line says, and what a stage that ends with an error says."""

import sys
from collections.abc import Callable

import pytest

from conf import UserError, run, settings
from docs.reference import ENTRIES


def refusal(entry: str, *overrides: str) -> str:
    """Return the one sentence by which these settings are refused."""
    with pytest.raises(UserError) as error:
        settings(entry, ENTRIES[entry], overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs an entry with arguments and a main; it returns the exit code and stderr."""

    def call(
        entry: str, *arguments: str, main: Callable = lambda config: None
    ) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [entry, *arguments])
        with pytest.raises(SystemExit) as end:
            run(entry, ENTRIES[entry], main)
        return end.value.code, capsys.readouterr().err

    return call

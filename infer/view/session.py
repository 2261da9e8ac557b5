"""Prompts typed one after the other, on a model that is loaded once: python -m infer without a prompt."""

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console

from conf import UserError
from infer.api import Model, generate
from infer.config import DecodeConfig
from infer.view.live import complete

with suppress(ImportError):  # where Python has it, input() edits lines and takes a pasted text whole
    import readline  # noqa: F401

PASTED = 0.05  # seconds in which further lines belong to the same paste
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {  # command: setting of decode, its type
    "/k": ("k", int),
    "/temperature": ("temperature", float),
    "/top_p": ("top_p", float),
    "/seed": ("seed", int),
    "/method": ("method", str),
    "/new": ("max_new_tokens", int),
}
COMMANDS = (*SETTINGS, "/settings", "/help", "/quit")
HELP = """Type or paste a prompt: it is continued. Ctrl-C ends a text, Ctrl-D the session.
  /k N  /temperature T  /top_p P  /seed N  /new N (tokens)  /method sdsat|ngrams|plain|...
  /settings  /help  /quit"""


class Session:
    """A loop of prompts and commands."""

    def __init__(self, model: Model, decode: DecodeConfig, console: Console) -> None:
        self._model, self._decode, self._console = model, decode, console

    def run(self) -> None:
        """Until the end of the input or /quit."""
        self._say(HELP)
        while True:
            try:
                line = read_prompt()
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                self._say("\nCtrl-D or /quit ends the session.")
                continue
            if line.strip() == "/quit":
                return
            try:
                self._answer(line)
            except (UserError, ValueError) as error:
                self._say(f"error: {error}")

    def _answer(self, line: str) -> None:
        command, _, value = line.strip().partition(" ")
        if not command:
            return
        if command == "/help":
            self._say(HELP)
        elif command == "/settings":
            values = [f"{name} {getattr(self._decode, field)}" for name, (field, _) in SETTINGS.items()]
            self._say(", ".join(values))
        elif command in SETTINGS:
            self._set(command, value.strip())
        elif command.startswith("/") and "\n" not in line:
            raise UserError(f"a command must be one of {', '.join(COMMANDS)}, got {command}. Try /help.")

        else:
            self._complete(line)

    def _set(self, command: str, value: str) -> None:
        field, parse = SETTINGS[command]
        try:
            parsed = parse(value)
        except ValueError as error:
            raise UserError(
                f"{command} must be a number, got {value or 'nothing'}. Try {command} 1."
            ) from error
        decode = replace(self._decode, **{field: parsed})
        self._model.methods.settled(decode)
        self._decode = decode

    def _complete(self, prompt: str) -> None:
        try:
            complete(generate(self._model, prompt, self._decode), self._console, prompt)
        except KeyboardInterrupt:
            self._say("\n(ended)")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def read_prompt() -> str:
    """Return a line, or all lines that were pasted at once. Raises EOFError at the input's end."""
    lines = [input("> ")]
    while select.select([sys.stdin], [], [], PASTED)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)

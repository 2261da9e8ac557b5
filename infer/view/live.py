"""Decoded text on a terminal, as it comes, coloured by the source of each token.

After Figure 6 of GSD. Where the output is no terminal it is the new text alone and a line's end, without
colours; the line of figures goes to standard error.

What a decoding came to: counts and times, and one line of them.

Prompts typed one after the other, on a model that is loaded once: python -m infer without a prompt.
"""

import re
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from conf import UserError
from conf.clock import duration
from conf.console import pictures
from infer.api import Model, TextStep, generate
from infer.config import DecodeConfig
from infer.loop import Step
from infer.view.coloured import KINDS, OWN


@dataclass
class Summary:
    """Counts and times of one decoding, in steps and seconds."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when the first step was there
    last: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)  # accepted drafts by source

    def add(self, step: Step) -> None:
        """Add one more step, now."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first, self.first_tokens = self.last, len(step.tokens)
        self.tokens += len(step.tokens)
        self.forwards += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.sources.update(step.sources)

    def __str__(self) -> str:
        """Format one line. The rate counts what came after the first step, whose time is the prompt's too."""
        assert self.first is not None
        later = self.tokens - self.first_tokens
        parts = [f"{self.tokens} token{'s' * (self.tokens > 1)}"]
        if later:
            parts.append(f"{later / duration(self.first, self.last):.0f} tokens/s")
        parts.append(f"{self.tokens / self.forwards:.2f} tokens per forward")
        if self.drafted:
            parts.append(f"{100 * self.accepted / self.drafted:.0f} % of {self.drafted} drafts accepted")
        if len(self.sources) > 1:
            shares = (
                f"{kind.name} {100 * self.sources[source] / self.accepted:.0f} %"
                for source, kind in KINDS.items()
                if source in self.sources
            )
            parts[-1] += f" ({', '.join(shares)})"
        return f"{', '.join(parts)}; first token after {self.first - self.began:.2f} s"


GIVEN = Style.parse("bright_black")
# Black on a colour of its own: as readable on a dark terminal as on a light one.
STYLES = {
    name: Style(color="#000000", bgcolor=kind.strong, underline=kind.line == "solid" or None)
    for name, kind in KINDS.items()
}


def complete(
    steps: Iterable[TextStep], console: Console, before: str, after: str = ""
) -> tuple[list[TextStep], Summary]:
    """Show a text as its steps come, and return what was shown, with its figures."""
    summary, steps_taken, view = Summary(), list[TextStep](), View(console, before, after)
    for step in steps:
        summary.add(step)
        steps_taken.append(step)
        view.step(step)
    view.close(summary)
    return steps_taken, summary


class View:
    """One text, between what was given before it and after it."""

    def __init__(self, console: Console, before: str, after: str = "") -> None:
        self._console, self._after = console, after
        self._kinds = set[str]()
        self._figures = console if console.is_terminal else Console(stderr=True, quiet=console.quiet)
        if console.is_terminal:
            self._write(pictures(before), GIVEN)

    def step(self, step: TextStep) -> None:
        """Show one more step."""
        if not self._console.is_terminal:
            self._write(step.text)
            return
        self._kinds.update(step.kinds)
        for text, kind in zip(step.texts, step.kinds, strict=True):
            self._write(pictures(text), STYLES.get(kind))

    def close(self, summary: Summary) -> None:
        """Show what follows the text, and a line of figures."""
        if self._console.is_terminal:
            self._write(pictures(self._after), GIVEN)
            self._console.print("\n\n", self._legend(), sep="")
        else:
            self._write("\n")
        self._figures.print(str(summary), highlight=False, markup=False, soft_wrap=True)

    def _legend(self) -> Text:
        """Return what the colours of the text mean."""
        parts = [(KINDS[kind].meaning, style) for kind, style in STYLES.items() if kind in self._kinds]
        return Text("  ").join([Text("given", GIVEN), Text(OWN), *(Text(*part) for part in parts)])

    def _write(self, text: str, style: Style | None = None) -> None:
        # As segments, since tabs of anything else become spaces; a coloured line's end paints the next line.
        parts = [Segment(part, None if part == "\n" else style) for part in re.split("(\n)", text) if part]
        self._console.print(Segments(parts), end="", soft_wrap=True)


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
        """Run until the end of the input or /quit."""
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

"""Errors for users: one sentence, and the page that says more."""

import errno
from contextlib import ContextDecorator

# Places in docs/ that explain an error which is about more than a setting: what UserError takes as `page`.
DOCS = "docs"  # in the project's root
UNFINISHED = "troubleshooting.md#unfinished-folder"
ANOTHER = "troubleshooting.md#another-configuration"
MEMORY = "troubleshooting.md#out-of-memory"
DIVERGED = "troubleshooting.md#diverged"
QUALITY = "troubleshooting.md#loss-of-quality"
NOT_IDENTICAL = "troubleshooting.md#not-identical"
HUB = "troubleshooting.md#hub-and-offline"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room for more of a file


def visible(text: str) -> str:
    """Return the text on one line, whatever it quotes.

    What has no picture (line ends, a terminal's commands, halves of surrogate pairs) is as Python spells it.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class UserError(Exception):
    """One sentence for the user: the setting or file, what it must be, what was given, what to do.

    `page` is the place in docs/ that explains it, as "troubleshooting.md#slow". A sentence that begins with the
    name of a setting needs none: it leads to that setting's place in docs/settings.
    """

    def __init__(self, sentence: str, *, page: str | None = None) -> None:
        super().__init__(visible(sentence))
        self.page = page


class RankLocalError(UserError):
    """An error that one rank of many meets: that rank reports it, whichever it is."""


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return what a library's error says, for the end of a sentence; where it says nothing, its kind."""
    message = " ".join(str(error).split())
    if "trust_remote_code" in message:  # Transformers advises to let that code run
        return "Python code of its own (auto_map), which never runs here"
    return (
        f"{message[:most]} ..."
        if len(message) > most
        else message or type(error).__name__
    )


def describe_error(error: Exception) -> str:
    """Return what an error says, for the end of a sentence; a disk or quota without room is "disk full"."""
    reason = (error.strerror if isinstance(error, OSError) else None) or in_one_line(
        error
    )
    full = isinstance(error, OSError) and error.errno in FULL
    return f"disk full ({reason})" if full else reason


class Refusing(ContextDecorator):
    """Around a library's code: raise UserError for all that it raises, `problem`, what it says, `cure`.

    A panic of Rust code is no Exception: PyO3 raises it as a BaseException whose class cannot be imported.
    """

    def __init__(self, problem: str, cure: str = "") -> None:
        self._problem = problem
        self._cure = cure

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if error is None or isinstance(error, UserError):
            return
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(
                f"{self._problem} {in_one_line(error)}{self._cure}"
            ) from error


TOKENIZING = Refusing(
    "tokenizer must encode and decode every text, got",
    ". Use the tokenizer.json that belongs to the model",
)

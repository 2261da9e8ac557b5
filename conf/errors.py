"""Error messages for users, with a link to the documentation."""

import errno
import re
from contextlib import ContextDecorator

# Sections of docs/ that explain an error, for `page` of UserError.
DOCS = "docs"  # folder in the project's root
UNFINISHED = "troubleshooting.md#unfinished-folder"
ANOTHER = "troubleshooting.md#another-configuration"
MEMORY = "troubleshooting.md#out-of-memory"
DIVERGED = "troubleshooting.md#diverged"
QUALITY = "troubleshooting.md#loss-of-quality"
NOT_IDENTICAL = "troubleshooting.md#not-identical"
HUB = "troubleshooting.md#hub-and-offline"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota, file size limit


def visible(text: str) -> str:
    """Return the text on one line, with unprintable characters escaped as in Python.

    Escaped are line ends, control characters of a terminal, and lone surrogates.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 2 ranks, 1,024 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class UserError(Exception):
    """A mistake that the user can correct. The message names the setting or file, the value, and the cure.

    `page` is a section of docs/ that explains the error, for example "troubleshooting.md#slow". Messages about
    one setting need no page, since docs/settings.md describes the setting.
    """

    def __init__(self, sentence: str, *, page: str | None = None) -> None:
        super().__init__(visible(sentence))
        self.page = page


class RankLocalError(UserError):
    """An error that may occur on a single rank, so every rank that raises it prints it."""


class AllRanksError(UserError):
    """An error that every rank raises, also in a block that expects an error of one rank."""


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of a library's error on one line, cut at `most` characters.

    If the message is empty, return the name of the exception's class.
    """
    message = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split()))
    if "trust_remote_code" in message:  # Transformers would suggest to allow that code
        return "custom Python code (auto_map), which is never run"
    return (
        f"{message[:most]} ..."
        if len(message) > most
        else message or type(error).__name__
    )


def describe_error(error: Exception) -> str:
    """Return an error's message for the end of a sentence; "disk full (...)" for a full disk or quota."""
    reason = (error.strerror if isinstance(error, OSError) else None) or in_one_line(
        error
    )
    full = isinstance(error, OSError) and error.errno in FULL
    return f"disk full ({reason})" if full else reason


class as_user_error(ContextDecorator):
    """Raise errors of a library as UserError, with the message `problem` + error + `cure`.

    Use it as a context manager or a decorator. It also handles panics of Rust code, which PyO3 raises as a
    BaseException of a class that cannot be imported.
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


TOKENIZER_ERRORS = as_user_error(
    "tokenizer must encode and decode every text, got",
    ". Use the tokenizer.json that belongs to the model",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # On a CPU PyTorch raises a plain RuntimeError.
    words = "can't allocate memory", "Storage size calculation overflowed"
    return any(each in str(error) for each in words)

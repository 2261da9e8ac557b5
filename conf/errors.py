"""What a user is told: one sentence, and where more stands."""

from contextlib import ContextDecorator


def visible(text: str) -> str:
    """On one line, whatever it quotes: what has no picture (line ends, a terminal's commands, halves of
    surrogate pairs) as Python spells it.
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


class UserError(Exception):
    """One sentence for the user: the setting or file, what it must be, what it is, and the cure.

    `page` is the place in docs/ that explains it, as "troubleshooting.md#slow". A sentence that begins with the
    name of a setting needs none: it leads to that setting's place in docs/settings.
    """

    def __init__(self, sentence: str, *, page: str | None = None) -> None:
        super().__init__(visible(sentence))
        self.page = page


class RankLocalError(UserError):
    """The same, met by one rank of many: it is told by that rank, whichever it is."""


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of a library's error on one line, or its class where it has none."""
    message = " ".join(str(error).split())
    return f"{message[:most]} ..." if len(message) > most else message or type(error).__name__


class Refusing(ContextDecorator):
    """Around a library's code: raises UserError for all that it raises, `problem`, what it says, `cure`.

    A panic of Rust code is no Exception: PyO3 raises it as a BaseException whose class cannot be imported.
    """

    def __init__(self, problem: str, cure: str = "") -> None:
        self._problem, self._cure = problem, cure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, UserError):
            return
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{self._problem} {in_one_line(error)}{self._cure}") from error


TOKENIZING = Refusing(
    "tokenizer must encode and decode every text, got", ". Use the tokenizer.json that belongs to the model"
)

"""What becomes of one sequence's tokens: text, piece by piece, and the end where a stop string says so."""

from collections.abc import Collection, Iterable, Sequence

from infer.text import TextStream


class Output:
    """Told every token in turn; says whether the text ends with it.

    It ends with the token that completes a string of `stop`, as with Transformers' `stop_strings`,
    or with an id of `ends`. Only new text counts: a stop string of the prompt ends nothing.
    """

    def __init__(self, stream: TextStream, *, stop: Sequence[str] = (), ends: Collection[int] = ()) -> None:
        self._stream, self._stop, self._ends = stream, stop, ends
        self._reach = max(map(len, stop), default=1) - 1  # characters in which a stop string may have begun
        self._tail = ""
        self._pieces: list[str] = []

    def __call__(self, token: int) -> bool:
        """Whether the text ends with this token."""
        piece = self._stream(token)
        self._pieces.append(piece)
        seen = self._tail + piece
        self._tail = seen[max(0, len(seen) - self._reach) :]
        return token in self._ends or any(text in seen for text in self._stop)

    def take(self, *, finished: bool) -> list[str]:
        """The text of every token since the last call, "" for one that completes no character; what is
        left of a broken one goes to the last token of all.
        """
        pieces, self._pieces = self._pieces, []
        if finished:
            pieces[-1] += self._stream.rest()
        return pieces


def in_pieces(told: Iterable[tuple[str, str]]) -> list[list[str]]:
    """[kind, text] in turn, of each token's kind (`Step.kinds`) and text: neighbours of a kind become one."""
    found = list[list[str]]()
    for kind, text in told:
        if found and found[-1][0] == kind:
            found[-1][1] += text
        elif text:
            found.append([kind, text])
    return found

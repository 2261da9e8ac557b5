"""Who runs beside whom. Pure.

    turn 0    A plain B    C plain D    E plain
    turn 1    B plain A    D plain C    plain E
    turn 2    B plain C    D plain E    A plain
    turn 3    C plain B    E plain D    plain A

Every run stands next to one of plain decoding, its pair: what slows the machine for seconds slows both. One
run of plain decoding serves the two beside it. Of two turns a decoder stands once before plain decoding and
once behind it, and from turn to turn beside others: neither place nor neighbour is any one's own.
"""

from collections.abc import Sequence
from typing import TypeVar

K = TypeVar("K")


def blocks(names: Sequence[K], plain: K, turn: int) -> list[list[K]]:
    """The order of a turn: the pair of a name is the `plain` of its block. Without names, `plain` alone."""
    if not names:
        return [[plain]]
    shift = turn // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    found = [[rotated[at], plain, *rotated[at + 1 : at + 2]] for at in range(0, len(names), 2)]
    return [block[::-1] for block in found] if turn % 2 else found

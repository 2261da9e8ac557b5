"""What a command printed of a user's mistake."""

import re


def error(printed: str) -> str:
    """The one sentence; with it there may be the page of the documentation, and nothing else."""
    result = re.fullmatch(r"error: ([^\n]+)\n(  see docs/\S+\n)?", printed)
    assert result, printed
    return result[1]

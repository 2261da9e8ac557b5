"""Read the error message that a command printed for a user."""

import re


def error(printed: str) -> str:
    """Return the message; assert that nothing else was printed except a link to the documentation."""
    result = re.fullmatch(r"error: ([^\n]+)\n(  see docs/\S+\n)?", printed)
    assert result, printed
    return result[1]

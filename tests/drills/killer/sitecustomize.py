"""kill -9 at a chosen write: Python imports this at its start wherever this folder is on PYTHONPATH.

    KILL_BELOW   the folder whose writes count: files opened for writing, folders made, removals, renames
    KILL_COUNT   a file that grows by a byte with each write of any process
    KILL_AT      the write right before which its process dies; 0: none
    KILL_DELAY   seconds to die later than that, in the midst of the writing

The project runs as it is: an audit hook sees its writes.
"""

import os
import signal
import sys
import threading
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch(below: str, count: str, at: int, delay: float) -> None:
    """Count this process's writes from now on, and die at one of them."""

    def strike() -> None:
        os.close(os.open(f"{count}.struck", os.O_WRONLY | os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or (event == "open" and not arguments[2] & WRITING):
            return
        paths = [os.fsdecode(item) for item in arguments[:2] if isinstance(item, str | bytes | os.PathLike)]
        if not any(os.path.abspath(path).startswith(below) for path in paths):
            return
        file = os.open(count, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b".")
        writes = os.fstat(file).st_size
        os.close(file)
        if writes == at and delay:
            threading.Timer(delay, strike).start()
        elif writes == at:
            strike()

    sys.addaudithook(hook)


if "KILL_BELOW" in os.environ:
    settings = [os.environ[f"KILL_{name}"] for name in ("BELOW", "COUNT", "AT", "DELAY")]
    watch(settings[0], settings[1], int(settings[2]), float(settings[3]))

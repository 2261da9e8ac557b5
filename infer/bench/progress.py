"""Show the progress of long measurements: a bar on a terminal, regular lines in a log file."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

from conf.console import PlainConsole, format_duration

LINE_SECONDS = 30.0  # time between two lines of a log file


@contextmanager
def progress(
    title: str, total: int, *, silent: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` steps.

    A log file gets a line at the beginning, at the end and every LINE_SECONDS, even during a
    longer step.
    """
    console = PlainConsole(quiet=silent)
    if console.is_terminal:
        with Progress(console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0
    began = time.monotonic()

    def advance() -> None:
        nonlocal done
        done += 1

    def print_progress() -> None:
        line = describe(title, done, total, time.monotonic() - began)
        console.print(line, soft_wrap=True)

    ended = threading.Event()

    def report() -> None:
        while not ended.wait(LINE_SECONDS):
            print_progress()

    if total:
        print_progress()
    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()
    if total:
        print_progress()


def describe(title: str, done: int, total: int, seconds: float) -> str:
    """Return a line: "speed: 12 of 40 in 3 min, about 7 min left"."""
    line = f"{title}: {done} of {total}"
    if seconds >= 1:
        line += f" in {format_duration(seconds)}"
    if 0 < done < total:
        line += f", about {format_duration(seconds / done * (total - done))} left"
    return line

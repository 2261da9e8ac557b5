"""Which files lie below a folder: linked folders are followed, once each. Knows no format of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch, fnmatchcase
from logging import getLogger
from pathlib import Path

from conf import UserError
from conf.errors import visible

STORE = ".git"  # of a checkout, which is no source


def list_files(root: Path, include: Sequence[str], exclude: Sequence[str]) -> list[tuple[str, int]]:
    """Return (path below root, bytes) of the files that match `include` and not `exclude`, both globs, sorted.

    Warns, with a count, of links that lead nowhere and of folders that cannot be listed. Raises UserError for
    what is no glob below `root`.
    """
    patterns = [_parts(pattern, include) for pattern in include]
    files, dead, closed = [], list[str](), list[str]()

    def takes(name: str) -> bool:
        parts = name.split("/")
        return any(_matches(parts, pattern) for pattern in patterns) and not is_excluded(name, exclude)

    for name in _walk(root, takes, closed):
        path = root / name
        try:
            size = path.stat().st_size
        except OSError:  # a link to nothing or to itself, or a file that was removed since
            dead.append(name)
            continue
        if path.is_file():
            files.append((name, size))
    closed = [name for name in closed if not is_excluded(f"{name}/", exclude)]
    for names, what in ((dead, "links lead to no file"), (closed, "folders cannot be listed")):
        if names:
            first = visible(f"{root / names[0]}")
            getLogger(__name__).warning("data.path: %d %s and are left out, first %s", len(names), what, first)
    return sorted(files, key=lambda file: Path(file[0]))


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether a glob of data.exclude, of which * matches / too, matches this path."""
    return any(fnmatch(name, pattern) for pattern in exclude)


def _walk(root: Path, takes: Callable[[str], bool], closed: list[str]) -> Iterator[str]:
    """The paths, below `root`, of what is no folder and `takes` accepts. Folders that cannot be listed are
    added to `closed`.

    First what lies in `root` itself, then what lies in linked folders. A folder that gave a path is not entered
    again, so that a text that two links lead to is read once; one that gave none may be wanted by a link's
    name. Each link is followed once, so that a link back ends.
    """

    def below(path: str) -> str:
        return os.path.relpath(path, root)

    def note(error: OSError) -> None:
        closed.append(below(error.filename))

    met, read, links = set[tuple[int, int]](), set[tuple[int, int]](), [os.fspath(root)]
    while links:
        for folder, names, files in os.walk(links.pop(0), onerror=note):
            facts = os.stat(folder)
            place = facts.st_dev, facts.st_ino
            if place in read:
                names.clear()
                continue
            names[:] = sorted(name for name in names if name != STORE)
            if place not in met:
                met.add(place)
                links += [path for name in names if os.path.islink(path := os.path.join(folder, name))]
            paths = [below(os.path.join(folder, name)) for name in sorted(files) if name != STORE]
            accepted = [path for path in paths if takes(path)]
            if accepted:
                read.add(place)
            yield from accepted


def _parts(pattern: str, include: Sequence[str]) -> list[str]:
    """The parts of a glob, as pathlib takes them."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    stars = [part for part in parts if "**" in part]
    if not parts or pattern.startswith("/") or ".." in parts or any(part != "**" for part in stars):
        raise UserError(
            f"data.include={list(include)}: wanted globs below data.path, such as **/*.py, found '{pattern}'"
        )
    return parts


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a glob part by part; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        anything = pattern[1:] or ["*"]
        return any(_matches(parts[at:], anything) for at in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])

"""Folders of source files with any names and bytes, links and pipes: every file is a document or a drop."""

import os
import random
from pathlib import Path

from tests.drills.fuzz import mutate, tools
from tests.drills.fuzz.rows import check, options

COUNT = 700


def run(rng: random.Random, folder: Path) -> str:
    """One folder through data_prep."""
    root = folder.resolve() / "in"
    root.mkdir()
    expected: dict[str, tuple[str | None, str]] = {}
    for _ in range(rng.choice((0, 1, 5, 20))):
        place = root / "/".join(name(rng) for _ in range(rng.choice((1, 1, 2))))
        text, data = content(rng)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place = place.parent.resolve() / place.name  # links to folders are not followed
            if place.exists() or place.is_symlink():
                continue
            kind = rng.random()
            if kind < 0.9:
                place.write_bytes(data)
            elif kind < 0.95:  # to itself, to nothing, or to a file that is there
                target = rng.choice((place.name, "nothing", *os.listdir(place.parent)))
                os.symlink(target, place)
                if not place.is_file():
                    continue
                text = readable(place.read_bytes())
            else:
                os.mkfifo(place)
                continue
        except OSError:  # the file system has no such name
            continue
        id = place.relative_to(root).as_posix()
        legible = id.isprintable() or not any("\ud800" <= one <= "\udfff" for one in id)
        expected[id] = (text if legible else None, place.suffix.lstrip(".") or "none")
    wanted = [*options(rng), f"data.path={root}", f"out={folder / 'out'}"]
    ended = tools.prepared(("data=source", *tools.tokenizer(rng)), wanted, rng)
    if ended.told:
        assert not (folder / "out").exists(), "a refused folder is visible"
        assert not any(text and text.strip() and "\0" not in text for text, _ in expected.values()), ended.told
        return "refused"
    check(folder / "out", expected, split="data.split_chars=null" not in wanted, rows=False)
    return "fine"


def name(rng: random.Random) -> str:
    """A file's or a folder's, as the system gives it: what is no UTF-8 as surrogates."""
    if rng.random() < 0.5:
        return rng.choice(("a", "b", "c")) + rng.choice((".py", ".py", ".c", "", ".tar.gz", ".PY", "."))
    raw = mutate.text(rng).encode("utf-8", "ignore") + rng.choice((b"", b"", b"", b"\xff"))
    made = os.fsdecode(raw.replace(b"/", b"").replace(b"\0", b"")[:200])
    return made if made not in ("", ".", "..", ".git") else "x"


def content(rng: random.Random) -> tuple[str | None, bytes]:
    """A file's text, None where it is none, and its bytes."""
    data = tools.document(rng).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        data = mutate.damaged(data, rng)
    return readable(data), data


def readable(data: bytes) -> str | None:
    """The text of a file that is UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None

"""Whether a folder can be a model directory. Knows no PyTorch: a mistaken path is told before its import."""

from pathlib import Path

from conf import UserError


def check_directory(folder: str | Path) -> Path:
    """The directory, if it can be a model. Raises UserError at once: the hub is never asked."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        found = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(f"model={folder}: wanted a Transformers model directory, found {found}")
    return path

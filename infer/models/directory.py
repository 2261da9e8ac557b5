"""Whether a folder can be a model directory. Knows no PyTorch: a mistaken path is told before its import."""

from pathlib import Path

from conf import UserError
from conf.files import read_json
from conf.stage import MANIFEST


def check_directory(folder: str | Path) -> Path:
    """The directory, if it can be a model. Raises UserError at once: the hub is never asked."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        reason = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(f"model={folder}: wanted a Transformers model directory, found {reason}")
    return path


def decontaminated(folder: str | Path) -> list[str] | None:
    """The benchmarks that the training data were decontaminated against; [] where its manifest lists none.

    None for a directory that no export of this project wrote. Raises UserError for a manifest that is no JSON.
    """
    path = Path(folder) / MANIFEST
    manifest = read_json(path, "a manifest") if path.is_file() else {}
    return manifest.get("decontaminated") or [] if manifest.get("kind") == "model" else None

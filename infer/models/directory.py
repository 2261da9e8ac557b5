"""Whether a folder can be a model directory. Knows no PyTorch: a wrong path is reported before its import."""

from pathlib import Path

from conf import UserError
from conf.files import read_json
from conf.stage import MANIFEST


def check_directory(folder: str | Path) -> Path:
    """Return the path. Raises UserError for a folder that cannot be a model, without asking the hub."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        reason = "no config.json in it" if path.is_dir() else "no such directory"
        raise UserError(f"model={folder} must be a Transformers model directory, got {reason}")
    return path


def decontaminated(folder: str | Path) -> list[str] | None:
    """Return the benchmarks that the training data were decontaminated against.

    None for a directory that this project did not export. Raises UserError for a manifest that is no JSON.
    """
    path = Path(folder) / MANIFEST
    manifest = read_json(path, "a manifest") if path.is_file() else {}
    return manifest.get("decontaminated") or [] if manifest.get("kind") == "model" else None

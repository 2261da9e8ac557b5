"""Where documents come from: folders of source files, or StarCoder-style parquet.

Knows file formats; decides nothing about content beyond what cannot be read. Every file
that is passed over is counted with its reason.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conf import UserError
from data_prep.config import DataConfig
from data_prep.document import Document

METADATA = re.compile(r"\A<(?:reponame|filename|gh_stars)>[^\n]*\n")


def documents(data: DataConfig, drops: Counter[str]) -> Iterator[Document]:
    """All readable documents, in a fixed order; `drops` counts the others by reason.

    Raises UserError when there is no input at all.
    """
    found = False
    source = _folder(Path(data.path), data, drops) if data.kind == "folder" else _starcoder(data.path, drops)
    for document in source:
        found = True
        yield document
    if not found:
        raise UserError(
            f"data.path={data.path}: wanted source documents ({', '.join(data.include)}), found none"
        )


def _folder(root: Path, data: DataConfig, drops: Counter[str]) -> Iterator[Document]:
    if not root.is_dir():
        raise UserError(f"data.path={root}: wanted a folder of source files, found no such folder")
    paths = sorted({path for pattern in data.include for path in root.glob(pattern) if path.is_file()})
    for path in paths:
        if path.stat().st_size > data.max_bytes:
            drops["too large"] += 1
            continue
        try:
            # Bytes, not read_text: universal newlines would change the document.
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            drops["undecodable"] += 1
            continue
        if not text.strip():
            drops["empty"] += 1
            continue
        yield Document(path.relative_to(root).as_posix(), text, path.suffix.lstrip(".") or "none")


def _starcoder(root: str, drops: Counter[str]) -> Iterator[Document]:
    """A local folder per language of parquet files, or the hub's bigcode/starcoderdata, streamed."""
    from datasets import load_dataset

    if Path(root).is_dir():
        languages = {
            folder.name: sorted(map(str, folder.glob("*.parquet"))) for folder in sorted(Path(root).iterdir())
        }
        parts = [
            (name, load_dataset("parquet", data_files=files, split="train", streaming=True))
            for name, files in languages.items()
            if files
        ]
    else:
        parts = [("all", load_dataset(root, split="train", streaming=True))]
    for language, rows in parts:
        for row in rows:
            text = METADATA.sub("", row["content"], count=1)
            if not text.strip():
                drops["empty"] += 1
                continue
            name = f"{row['max_stars_repo_name']}/{row['max_stars_repo_path']}"
            yield Document(f"{language}/{name}/{row['id']}", text, language)

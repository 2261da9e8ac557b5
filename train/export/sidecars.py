"""The files beside the weights of a model directory.

config.json, generation_config.json   as training left them, also under the names that other readers look for
tokenizer.json and its companions     control ids marked special; no id is added or changed
chat_template.jinja                   the one given, the tokenizer's own, or one that completes text
adaptive.json                         what a decoder must know; absent without adaptive tokens
custom_generate/                      the project's own decoder, for use with Transformers alone

Transformers copies the last one's Python files into a package of its cache and finds them by their
relative imports. So the decoder's entry and every module that it imports are written side by side, unchanged
but for the imports among them. They are read as text at every export; train does not import infer.

    infer/loop.py         from infer.trees.tree import Tree     loop.py          from .trees_tree import Tree
    infer/trees/tree.py                                         trees_tree.py
    conf/errors.py                                              conf_errors.py
                                                                generate.py      adaptive ids, n-grams' weights
"""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.errors import TOKENIZING, UserError, in_one_line
from conf.files import read_json, write_bytes, write_json
from conf.fingerprint import fingerprint
from conf.stage import ROOT, commit
from data_prep.vocab import FILES, INFILLING, Vocab, load_tokenizer
from train.config import DESCRIBED
from train.export import trained_lora

ADAPTIVE = "adaptive.json"
MASK_KEYS = (
    "pard_token",
    "ptd_token_id",
)  # of parallel drafting: TensorRT-LLM's and vLLM's
# Prompts of infilling: SDSAT §3.1; Code Llama §2.3. In SPM, prefix and middle are encoded as one.
ORDERS = {
    "psm": ["bos", "pre", "PREFIX", "suf", "SUFFIX", "mid"],
    "spm": ["bos", "pre", "suf", "SUFFIX", "mid", "PREFIX"],
}
CHAT = "chat_template.jinja"  # as Transformers names it
COMPLETION = Path(__file__).with_name(
    "chat_template.j2"
)  # for a model that completes text
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def write_sidecars(
    checkpoint: Path,
    out: Path,
    manifest: dict[str, Any],
    *,
    step: int,
    dtype: torch.dtype,
    chat_template: str | None = None,
) -> None:
    """Write everything but the weights, which are those of `step`; `chat_template` is a file.

    Raise UserError for a file that training did not write.
    """
    described = checkpoint / DESCRIBED
    vocab = Vocab.from_json(manifest["vocab"])
    for (
        name
    ) in FILES:  # nothing else: a published directory holds only what an export wrote
        if (described / name).is_file():
            shutil.copyfile(described / name, out / name)
    adaptive = adaptive_json(checkpoint, manifest, step=step)
    # Servers know a single mask token for all places, and no adapter that acts on it alone.
    served = adaptive and adaptive["identical"] and not adaptive["gated"]
    architecture = AutoConfig.from_pretrained(
        described, local_files_only=True, trust_remote_code=False
    )
    config = served_config(
        read_json(described / "config.json"),
        architecture=MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)].__name__,  # type: ignore[attr-defined]
        dtype=str(dtype).removeprefix("torch."),
        mask_id=manifest["adaptive"][0] if served else None,
    )
    write_json(out / "config.json", config)
    file = described / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    write_json(
        out / file.name, served_generation(generation, bos=vocab.bos, eos=vocab.eos)
    )
    write_tokenizer(out, vocab, manifest["adaptive"])
    write_chat_template(out, chat_template)
    if adaptive:
        write_json(out / ADAPTIVE, adaptive)


def adaptive_json(
    checkpoint: Path, manifest: dict[str, Any], *, step: int
) -> dict[str, Any] | None:
    """Return the content of adaptive.json; None for a model without adaptive tokens."""
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
            "recipe": _recipe(manifest),
            "commit": manifest["commit"],
        },
    }


def infilling_orders(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """Return the infilling prompts that the model was trained on; names in capitals stand for texts.

    An earlier version's manifest does not say which: then all of them.
    """
    if not Vocab.from_json(manifest["vocab"]).infilling:
        return {}
    modes = manifest["data"]["modes"] if "data" in manifest else {"PSM": 1, "SPM": 1}
    return {name: order for name, order in ORDERS.items() if modes.get(name.upper())}


def _recipe(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of training without the model's path, which is of one machine."""
    model = {
        name: value
        for name, value in manifest["settings"]["model"].items()
        if name != "path"
    }
    return {**manifest["settings"], "model": model}


def served_config(
    described: Mapping[str, Any], *, architecture: str, dtype: str, mask_id: int | None
) -> dict[str, Any]:
    """Return config.json with every reader's name for its values; `mask_id` is the only adaptive id.

    Without `auto_map`: the weights are of Transformers' own class.
    """
    config = {
        name: value
        for name, value in described.items()
        if name not in ("auto_map", *MASK_KEYS)
    }
    config |= {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    config |= _rope_of_transformers_4(described.get("rope_parameters") or {})
    return (
        config if mask_id is None else {**config, **dict.fromkeys(MASK_KEYS, mask_id)}
    )


def _rope_of_transformers_4(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` in the keys of Transformers 4; nothing for parameters by layer type.

    Without them Transformers 4, and servers built on it, use rope_theta=10,000 and no draft is accepted.
    """
    if not parameters or any(
        isinstance(value, Mapping) for value in parameters.values()
    ):
        return {}
    lifted = {
        name: parameters[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in parameters
    }
    scaling = {name: value for name, value in parameters.items() if name not in lifted}
    return {
        **lifted,
        "rope_scaling": None
        if scaling.get("rope_type", "default") == "default"
        else scaling,
    }


def served_generation(
    described: Mapping[str, Any], *, bos: int, eos: int
) -> dict[str, Any]:
    """Return generation_config.json, with the BOS and EOS of training where the base model sets none."""
    own = {name: value for name, value in described.items() if value is not None}
    return {**described, "bos_token_id": bos, "eos_token_id": eos, **own}


def write_tokenizer(folder: Path, vocab: Vocab, adaptive: Collection[int]) -> None:
    """Rewrite tokenizer.json and tokenizer_config.json in place, for a model with these adaptive ids.

    Adaptive ids of the vocabulary that this model does not use stay text.
    """
    tokenizer = load_tokenizer(folder)
    file = folder / "tokenizer.json"
    config_file = folder / "tokenizer_config.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    config = (
        json.loads(config_file.read_text(encoding="utf-8"))
        if config_file.is_file()
        else {}
    )
    ids = vocab.control - (set(vocab.adaptive) - set(adaptive))
    pieces = {
        id: piece
        for id in sorted(ids)
        if (piece := tokenizer.id_to_token(id)) is not None
    }
    write_json(config_file, _tokenizer_config(config, vocab, pieces))
    value["added_tokens"] = mark_special(value["added_tokens"], pieces)
    with TOKENIZING:
        opening = tokenizer.encode("").ids
    if opening != [vocab.bos]:
        bos = pieces[vocab.bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, vocab.bos)],
        )
        value["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    write_bytes(
        file, json.dumps(value, ensure_ascii=False).encode()
    )  # one line: merges are many


def mark_special(
    added: Collection[dict[str, Any]], pieces: dict[int, str]
) -> list[dict[str, Any]]:
    """Return `added_tokens` of a tokenizer.json with these ids as special ones, which decoders skip."""
    tokens = {token["id"]: token for token in added}
    for id, piece in pieces.items():
        tokens[id] = {
            "id": id,
            "content": piece,
            **PLAIN,
            **tokens.get(id, {}),
            "special": True,
        }
    return [tokens[id] for id in sorted(tokens)]


def _tokenizer_config(
    described: dict[str, Any], vocab: Vocab, pieces: dict[int, str]
) -> dict[str, Any]:
    """Return a tokenizer_config.json by which Transformers encodes as training did.

    PreTrainedTokenizerFast reads tokenizer.json literally. Classes of architectures build their own tokenizer
    from its pieces: Transformers 5's for CodeLlama drops one of the spaces that begin a text.
    """
    config = {name: value for name, value in described.items() if name != "auto_map"}
    special = [pieces[id] for id in pieces if id not in (vocab.bos, vocab.eos)]
    listed = [
        token if isinstance(token, str) else token["content"]
        for token in config.get("additional_special_tokens") or []
    ]
    return {
        "eos_token": pieces[vocab.eos],
        **config,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pieces[vocab.bos],
        "add_bos_token": True,
        "add_eos_token": False,
        "additional_special_tokens": list(dict.fromkeys([*listed, *special])),
        "clean_up_tokenization_spaces": False,
    }


def write_chat_template(folder: Path, path: str | None) -> None:
    """Write the chat template of a file; without one keep the tokenizer's own, else write COMPLETION.

    Raise UserError for a file that is no template of messages.
    """
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if path is None and ((folder / CHAT).is_file() or "chat_template" in config):
        return
    write_json(
        config_file,
        {name: value for name, value in config.items() if name != "chat_template"},
    )
    try:
        write_bytes(
            folder / CHAT, Path(path or COMPLETION).read_text(encoding="utf-8").encode()
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True
        )
        message = {"role": "user", "content": "x"}
        text = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        if "x" not in text:
            raise ValueError(f"{text!r} for the message 'x'")
    except Exception as error:  # of the file system, Jinja or the template itself
        raise UserError(
            f"chat_template={path} must be a Jinja template of messages, got {in_one_line(error)}. "
            "Use a file like Transformers' chat_template.jinja, or omit it."
        ) from error


ENTRY = "infer.portable.custom_generate"
# The only form of import that is rewritten.
OURS = re.compile(r"^( *)from ((?:infer|conf)\.[\w.]+) import\b", re.MULTILINE)
REQUIREMENTS = (
    "torch>=2.13,<3",
    "transformers>=5.23,<6",
)  # which need NumPy and safetensors

MADE_FROM = """\
# Made from {path} of adaptive-tokens by python -m train.export, commit {commit}.
# SPDX-License-Identifier: Apache-2.0
"""
GENERATE = '''\
"""Decode with this model's adaptive tokens: faster, and token for token the same.

    model.generate(**inputs, max_new_tokens=256, custom_generate=DIR, trust_remote_code=True)

DIR is the model's directory or its name on the hub. Arguments and limits: `generate` in {entry}.py.
"""

from functools import partial

from .{entry} import generate as generate_with

generate = partial(generate_with, adaptive_ids={ids}, L={L}, ngrams={ngrams}, gated={gated})
'''


def write_custom_generate(out: Path) -> None:
    """Write custom_generate/ into a model directory.

    Not for a model without adaptive tokens (no adaptive.json), nor for one with an adapter that acts on every
    token, which Transformers would not load.
    """
    if not (out / "adaptive.json").is_file():
        return
    adaptive = read_json(out / "adaptive.json")
    gated = adaptive.get("gated", False)
    if (out / "adapter").is_dir() and not gated:
        return
    own_commit = commit()
    files = bundle(ENTRY, commit=own_commit)
    head = MADE_FROM.format(path="train/export/sidecars.py", commit=own_commit)
    files["generate.py"] = head + GENERATE.format(
        entry=flat(ENTRY),
        ids=tuple(adaptive["adaptive_ids"]),
        L=adaptive["L"],
        ngrams=adaptive.get("ngrams"),
        gated=gated,
    )
    files["requirements.txt"] = "".join(f"{line}\n" for line in REQUIREMENTS)
    for name, text in files.items():
        write_bytes(out / "custom_generate" / name, text.encode())


def bundle(entry: str, *, commit: str, root: Path = ROOT) -> dict[str, str]:
    """Return file names and texts of a module and all of our modules that it imports, in one folder."""
    files: dict[str, str] = {}
    modules = [entry]
    for module in modules:  # grows
        name = f"{flat(module)}.py"
        path = f"{module.replace('.', '/')}.py"
        if name not in files:
            text = (root / path).read_text(encoding="utf-8")
            modules += [match[2] for match in OURS.finditer(text)]
            relative = OURS.sub(
                lambda match: f"{match[1]}from .{flat(match[2])} import", text
            )
            files[name] = MADE_FROM.format(path=path, commit=commit) + relative
    return files


def flat(module: str) -> str:
    """Return a module's name in the folder."""
    return module.removeprefix("infer.").replace(".", "_")

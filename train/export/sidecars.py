"""Write the files of a model directory other than the weights.

config.json, generation_config.json   the training's, with additional keys for other servers
tokenizer.json and related files      control ids marked special; no id is added or changed
chat_template.jinja                   the tokenizer's own, or one that completes text
adaptive.json                         ids, L, provenance; absent without adaptive tokens
custom_generate/                      the decoder, for use with Transformers alone

Transformers copies the Python files of custom_generate/ into a package in its cache and
follows their relative imports. So the decoder's entry module and every module that it imports
are written into one flat folder; only the imports among them are rewritten. Each export reads
the modules as text; train does not import infer.

    infer/loop.py         from infer.trees.tree import Tree
    infer/trees/tree.py
    conf/errors.py
->
    loop.py               from .trees_tree import Tree
    trees_tree.py
    conf_errors.py
    generate.py           adaptive ids, weights of n-grams
"""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.adapter import ADAPTIVE_FILE
from conf.console import print_line
from conf.errors import TOKENIZER_ERRORS, in_one_line
from conf.runs.files import read_json, write_bytes, write_json
from conf.runs.fingerprint import fingerprint
from conf.runs.stage import ROOT, commit
from conf.text.infilling import ORDERS
from data_prep.ngrams import STRENGTH, TABLE
from data_prep.vocab import INFILLING, Vocab, copy_tokenizer, load_tokenizer
from train.config import ADAPTIVE, DESCRIBED, NOISE
from train.export import trained_lora, trained_mask

CONFIG = "config.json"
GENERATION = "generation_config.json"
CHAT = "chat_template.jinja"  # Transformers' file name
COMPLETION = Path(__file__).with_name("chat_template.j2")
# Keys in config.json for the mask token of parallel drafting: TensorRT-LLM's, vLLM's.
MASK_KEYS = ("pard_token", "ptd_token_id")
# The text of the comparison of tokenizers.
SAMPLE = "def f(x):\n    return  x + 12  # é漢 'll\n\n\tA.b_c"
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def write_sidecars(
    checkpoint: Path,
    out: Path,
    manifest: dict[str, Any],
    *,
    step: int,
    dtype: torch.dtype,
    keep_adapter: bool = False,
) -> None:
    """Write all files of an export except the weights: configuration, tokenizer, adaptive.json, code.

    `step` and `dtype` describe the exported weights; with `keep_adapter` an adapter stays beside them.
    """
    described = checkpoint / DESCRIBED
    copy_tokenizer(described, out)
    for name in (CONFIG, GENERATION):
        if (described / name).is_file():
            shutil.copyfile(described / name, out / name)
    adaptive = adaptive_json(checkpoint, manifest, step=step)
    if adaptive:
        write_json(out / ADAPTIVE_FILE, adaptive)
    vocab = Vocab.from_json(manifest["vocab"])
    serve(out, vocab, adaptive, dtype=dtype, keep_adapter=keep_adapter)


def serve(
    out: Path,
    vocab: Vocab,
    adaptive: Mapping[str, Any] | None,
    *,
    dtype: torch.dtype,
    keep_adapter: bool,
) -> None:
    """Rewrite the Transformers configuration and tokenizer in place for servers.

    `adaptive` is the content of adaptive.json; None for a model without adaptive tokens.
    """
    architecture = AutoConfig.from_pretrained(
        out, local_files_only=True, trust_remote_code=False
    )
    lm_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)]
    ids = adaptive["adaptive_ids"] if adaptive else []
    mask_id = None
    # vLLM's parallel drafting supports only one mask token for all positions, and its trained
    # embedding must be in the weights, not in an adapter.
    kept = adaptive and (adaptive["gated"] or keep_adapter)
    if adaptive and adaptive["identical"] and not kept:
        mask_id = ids[0]
    config = served_config(
        read_json(out / CONFIG),
        architecture=lm_class.__name__,
        dtype=str(dtype).removeprefix("torch."),
        mask_id=mask_id,
    )
    write_json(out / CONFIG, config)
    file = out / GENERATION
    generation = read_json(file) if file.is_file() else {}
    write_json(file, served_generation(generation, bos=vocab.bos, eos=vocab.eos))
    trained = not adaptive or adaptive.get("mask", ADAPTIVE) == ADAPTIVE
    write_tokenizer(out, vocab, ids if trained else ())
    warn_of_tokenizer(out, rows=config.get("vocab_size", vocab.size))


def warn_of_tokenizer(folder: Path, *, rows: int) -> None:
    """Print a warning if Transformers' tokenizer of a model with `rows` rows differs from tokenizer.json.

    Transformers forces Qwen2Tokenizer on Qwen's architectures. This class splits texts by its own rules and,
    if the vocabulary lacks its pieces, adds ids beyond the rows.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any tokenizer class
        print_line(
            f"warning: Transformers cannot read the tokenizer of this export: {in_one_line(error)}",
            error=True,
        )
        return
    problems = []
    if tokenizer(SAMPLE).input_ids != load_tokenizer(folder).encode(SAMPLE).ids:
        problems.append("encodes texts otherwise than training did")
    if len(tokenizer) > rows:
        problems.append(f"has {len(tokenizer)} ids for {rows} rows of the embedding")
    if problems:
        print_line(
            f"warning: the class {type(tokenizer).__name__}, which Transformers chooses for the "
            f"tokenizer of this architecture, {' and '.join(problems)}: a server may give other "
            "texts than python -m infer",
            error=True,
        )


def adaptive_json(
    checkpoint: Path, manifest: dict[str, Any], *, step: int
) -> dict[str, Any] | None:
    """Return the content of adaptive.json; None for a model without adaptive tokens."""
    mask = trained_mask(manifest)
    if mask is None:
        return None
    vocab = manifest["vocab"]
    known = Vocab.from_json(vocab)
    control = known.control
    ids = manifest["adaptive"]
    if (
        mask != ADAPTIVE
    ):  # the model has no embedding rows for the vocabulary's adaptive ids
        control -= set(known.adaptive)
        ids = [mask] if isinstance(mask, int) else []
    settings = manifest["settings"]
    model = {name: value for name, value in settings["model"].items() if name != "path"}
    return {
        "schema": 1,
        "mask": mask,
        "adaptive_ids": ids,
        "identical": len(ids) == 1,
        "L": manifest["L"],
        "gated": trained_lora(manifest).gated,
        "head": bool(settings["objective"].get("previous_token")),
        "bos": vocab["bos"],
        "eos": vocab["eos"],
        "ends": list(vocab.get("ends", ())),
        "infilling": {
            **{name: vocab[name] for name in INFILLING},
            "orders": list(vocab.get("orders", ORDERS)),
        },
        "ngrams": {
            "table": STRENGTH if (checkpoint / TABLE).is_file() else None,
            "text": 1.0,
            "places": [0.4, 0.5],
        },
        "control": sorted(control),
        "provenance": {
            "checkpoint": fingerprint(checkpoint),
            "data": manifest["inputs"]["data.path"],
            "step": step,
            "recipe": {**settings, "model": model},
            "commit": manifest["commit"],
        },
    }


def served_config(
    described: Mapping[str, Any], *, architecture: str, dtype: str, mask_id: int | None
) -> dict[str, Any]:
    """Return config.json with the keys that different versions and servers read.

    `mask_id` is the adaptive id if there is exactly one. `auto_map` is removed: the weights
    belong to Transformers' own class. Transformers 4, and servers built on it, do not read
    `rope_parameters` and would use rope_theta=10,000; then no draft is accepted.
    """
    config = dict(described)
    for name in ("auto_map", *MASK_KEYS):
        config.pop(name, None)
    config |= {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    rope = dict(described.get("rope_parameters") or {})
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                config[name] = rope.pop(name)
        scaled = rope.get("rope_type", "default") != "default"
        config["rope_scaling"] = rope if scaled else None
    if mask_id is not None:
        config |= dict.fromkeys(MASK_KEYS, mask_id)
    return config


def served_generation(
    described: Mapping[str, Any], *, bos: int | None, eos: int
) -> dict[str, Any]:
    """Return generation_config.json with training's BOS, unless it has one, and EOS.

    EOS is added to the existing eos_token_id: documents may end with another token than
    the turns of a chat.
    """
    config = dict(described)
    if config.get("bos_token_id") is None and bos is not None:
        config["bos_token_id"] = bos
    ends = config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if eos not in ids:
        config["eos_token_id"] = [*ids, eos] if ids else eos
    return config


def write_tokenizer(folder: Path, vocab: Vocab, adaptive: Collection[int]) -> None:
    """Rewrite the tokenizer's files in place for a model with the ids `adaptive`.

    Adaptive ids of the vocabulary that this model does not use remain ordinary tokens. A
    tokenizer without a chat template gets one that joins the messages into a text to
    complete, and a response template.
    """
    tokenizer = load_tokenizer(folder)
    file = folder / "tokenizer.json"
    config_file = folder / "tokenizer_config.json"
    content = json.loads(file.read_bytes())
    config = read_json(config_file) if config_file.is_file() else {}
    ids = vocab.control - (set(vocab.adaptive) - set(adaptive))
    pieces = {id: piece for id in sorted(ids) if (piece := tokenizer.id_to_token(id))}
    content["added_tokens"] = mark_special(content["added_tokens"], pieces)
    with TOKENIZER_ERRORS:
        opening = tokenizer.encode("").ids
    if opening != ([] if vocab.bos is None else [vocab.bos]):
        special = [] if vocab.bos is None else [(pieces[vocab.bos], vocab.bos)]
        bos = [piece for piece, _ in special]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A"],
            pair=[*bos, "$A", *bos, "$B"],
            special_tokens=special,
        )
        content["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    # Without indentation: there are many merges.
    write_bytes(file, json.dumps(content, ensure_ascii=False).encode())
    config = _tokenizer_config(config, vocab, pieces)
    if not ((folder / CHAT).is_file() or "chat_template" in config):
        shutil.copyfile(COMPLETION, folder / CHAT)
        config.setdefault("response_template", completion_answer(content))
    write_json(config_file, config)


def completion_answer(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response template that belongs to `COMPLETION`: an answer is the generated text.

    `tokenizer` is the content of tokenizer.json; its special pieces are left out of answers. Without a
    template `transformers serve` parses answers by the architecture: Qwen's answer would begin after
    "<|im_start|>assistant", which this prompt lacks, so that the answer would repeat the prompt.
    """
    special = [
        token["content"] for token in tokenizer["added_tokens"] if token["special"]
    ]
    content = {
        "close": special,
        "repeats": True,  # join the parts between special pieces
        "join": "",
        "content": "text",
        "content_args": {"strip": False},
    }
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\Z",
        "fields": {"content": content},
    }


def mark_special(
    added: Collection[dict[str, Any]], pieces: dict[int, str]
) -> list[dict[str, Any]]:
    """Return `added_tokens` with the ids of `pieces` marked special, so decoding skips them."""
    tokens = {token["id"]: token for token in added}
    for id, piece in pieces.items():
        token = tokens.get(id, {"id": id, "content": piece, **PLAIN})
        tokens[id] = {**token, "special": True}
    return [tokens[id] for id in sorted(tokens)]


def _tokenizer_config(
    described: dict[str, Any], vocab: Vocab, pieces: dict[int, str]
) -> dict[str, Any]:
    """Return a tokenizer_config.json that makes Transformers encode as training did.

    It sets PreTrainedTokenizerFast, which uses tokenizer.json unchanged. Tokenizer classes
    of architectures rebuild the tokenizer: CodeLlama's in Transformers 5 drops one of a
    text's leading spaces. For Qwen's architectures Transformers ignores the setting
    (`warn_of_tokenizer`).
    """
    config = dict(described)
    config.pop("auto_map", None)
    # Transformers 5 saves `extra_special_tokens`, and then ignores the older name.
    extra = config.get("extra_special_tokens")
    listed = extra if isinstance(extra, list) else []
    special = [
        token if isinstance(token, str) else token["content"]
        for token in [*(config.get("additional_special_tokens") or []), *listed]
    ]
    special += [pieces[id] for id in pieces if id not in (vocab.bos, vocab.eos)]
    special = list(dict.fromkeys(special))
    if listed:
        config["extra_special_tokens"] = special
    config.setdefault("eos_token", pieces[vocab.eos])
    if vocab.bos is not None:
        config["bos_token"] = pieces[vocab.bos]
    return {
        **config,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocab.bos is not None,
        "add_eos_token": False,
        "additional_special_tokens": special,
        "clean_up_tokenization_spaces": False,
    }


ENTRY = "infer.portable.custom_generate"
# Matches the only form of import that is rewritten.
OURS = re.compile(r"^( *)from ((?:infer|conf)\.[\w.]+) import\b", re.MULTILINE)
REQUIREMENTS = ("torch>=2.13,<3", "transformers>=5.23,<6")

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

generate = partial(generate_with, {mask}, L={L}, ngrams={ngrams}, gated={gated}, head={head})
'''


def write_custom_generate(out: Path) -> None:
    """Write custom_generate/ into a model directory with adaptive tokens.

    Do nothing if the directory keeps an ungated adapter: Transformers would not load it.
    """
    if not (out / ADAPTIVE_FILE).is_file():
        return
    adaptive = read_json(out / ADAPTIVE_FILE)
    gated = adaptive.get("gated", False)
    if (out / "adapter").is_dir() and not gated:
        return
    own_commit = commit()
    files = bundle(ENTRY, commit=own_commit)
    head = MADE_FROM.format(path="train/export/sidecars.py", commit=own_commit)
    files["generate.py"] = head + GENERATE.format(
        entry=flat(ENTRY),
        mask="noise=True"
        if adaptive.get("mask") == NOISE
        else f"adaptive_ids={tuple(adaptive['adaptive_ids'])}",
        L=adaptive["L"],
        ngrams=adaptive.get("ngrams"),
        gated=gated,
        head=adaptive.get("head", False),
    )
    files["requirements.txt"] = "".join(f"{line}\n" for line in REQUIREMENTS)
    for name, text in files.items():
        write_bytes(out / "custom_generate" / name, text.encode())


def bundle(entry: str, *, commit: str, root: Path = ROOT) -> dict[str, str]:
    """Return file names and texts of a module and the project's modules that it imports."""
    files: dict[str, str] = {}
    modules = [entry]
    for module in modules:  # the loop appends to it
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
    """Return a module's name in the flat folder."""
    return module.removeprefix("infer.").replace(".", "_")

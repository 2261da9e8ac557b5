"""Write a finished training folder without weights, to test all other files of an export."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from conf.runs.files import write_json
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import read_manifest
from data_prep.config import VocabConfig
from data_prep.vocab import find_vocab
from tests.bpe import save, train_bpe

CONFIG = VocabConfig(adaptive=["<adaptive_1>", "<adaptive_2>"])
OBJECTIVE = {"name": "branch", "L": 2, "start_rate": 0.1, "w": 2.0}
BEFORE = {"step": 0, "sequences": 4, "standard_loss": 1.5, "accepted": 0.1}
AFTER = {"step": 9, "sequences": 4, "standard_loss": 1.4, "accepted": 0.9}
BASE = {
    "name": "CodeLlama-7b-hf",
    "hub": "codellama/CodeLlama-7b-hf",
    "commit": "0" * 40,
    "license": "llama2",
}
VERIFIED = {
    "weights": 21,
    "logit_difference": 0.0,
    "sequences": 64,
    "validation": AFTER,
    "measured": AFTER,
    "drafts": {"adaptive": 0.8, "ngrams": 1.2, "all": 1.6},
}


def training(
    folder: Path, *, adaptive: int = 1, **facts: Any
) -> tuple[Path, dict[str, Any]]:
    """Write a training folder with `adaptive` adaptive ids; return it and its manifest."""
    tokenizer = train_bpe()
    vocab = find_vocab(tokenizer, CONFIG)
    model = folder / "model"
    save(tokenizer, model)
    shape = {
        "vocab_size": vocab.size,
        "bos_token_id": vocab.bos,
        "eos_token_id": vocab.eos,
    }
    shape |= {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
    }
    config = AutoConfig.for_model(
        "llama", **shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    config.save_pretrained(model)
    GenerationConfig.from_model_config(config).save_pretrained(model)
    settings = {
        "model": {"path": "/home/someone/models/7b", "random_init": False},
        "objective": OBJECTIVE,
        "optimizer": {"lr": 1e-4},
        "lora": {"rank": 0},
        "steps": 9,
        "global_batch": 4,
        "seed": 0,
    }
    manifest = {
        "schema": 1,
        "kind": "checkpoint",
        "settings": settings,
        "inputs": {"data.path": "d" * 64},
        "step": 9,
        "ranks": 1,
        "parameters": 2_670_000,
        "vocab": vocab.to_json(),
        "adaptive": list(vocab.adaptive[:adaptive]),
        "L": 2,
        "validation": [BEFORE, AFTER],
        "base": BASE,
        "data": {
            "documents": 12,
            "tokens": 3456,
            "modes": {"PLAIN": 6, "PSM": 6},
            "languages": ["py", "go"],
        },
        "tokenizer": fingerprint_file(model / "tokenizer.json"),
        "architecture": fingerprint_file(model / "config.json"),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "c" * 40,
        "created": "2026-11-21T15:27:15+00:00",
        **facts,
    }
    write_json(folder / "manifest.json", manifest)
    return folder, read_manifest(folder, "checkpoint", "checkpoint")

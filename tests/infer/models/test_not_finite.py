"""Test NaN and infinity in adapters, heads and draft models: refused, or without effect on texts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from conf.runs.files import read_json, write_json
from infer import DecodeConfig, load
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.loop import Drafters
from infer.models.checkpoint import ModelDirectory
from infer.models.gated import gate_model
from tests.infer.engine.test_families import tiny
from tests.infer.gated import adapted_copy, write_adapter
from tests.infer.library import by_tokens, collect, steps_of, tokens_of

NAN, INF = float("nan"), float("inf")
WEIGHTS = "adapter/adapter_model.safetensors"
HEAD = "adapter/head.safetensors"
PROMPTS = [[20, 30, 40, 51], [61, 62]]


def scaled(file: str, part: str, factor: float) -> Callable[[Path], None]:
    """Return a function that multiplies the weights with `part` in their names."""

    def change(folder: Path) -> None:
        weights = load_file(folder / file)
        assert any(part in name for name in weights)
        changed = {n: w * factor if part in n else w for n, w in weights.items()}
        save_file(changed, folder / file, metadata={"format": "pt"})

    return change


def configured(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes adapter_config.json."""

    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        write_json(path, read_json(path) | values)

    return change


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "lora_alpha 1e308": (configured(lora_alpha=1e308), "lora_B.*lora_alpha=1e.308"),
    "lora_alpha NaN": (configured(lora_alpha=NAN), "lora_alpha=nan"),
    "row -1": (configured(trainable_token_indices=[-1]), "token_indices=.-1."),
    "A": (scaled(WEIGHTS, "lora_A", NAN), "lora_A"),
    "B": (scaled(WEIGHTS, "lora_B", INF), "lora_B"),
    "rows": (scaled(WEIGHTS, "token_adapter", NAN), "trainable_tokens_delta"),
    "w1": (scaled(HEAD, "w1", NAN), "must be a head .*w1.weight that are not finite"),
    "w2": (scaled(HEAD, "w2", INF), "must be a head .*w2.weight that are not finite"),
}


def gated_copy(model_dir: Path, folder: Path) -> Path:
    """A copy with a gated adapter, a trained row and a head."""
    settings = {"target_modules": ["q_proj", "v_proj"]}
    adapted_copy(model_dir, folder, **settings, trainable_token_indices=[6])
    torch.manual_seed(0)
    d = read_json(folder / "config.json")["hidden_size"]
    head = {"w1.weight": torch.randn(d, 2 * d), "w2.weight": torch.randn(d, d)}
    save_file(head, folder / HEAD)
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_an_adapter_or_head_that_is_not_finite_is_refused(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    """Regression: they loaded, and the text differed from plain decoding's or ended in a traceback."""
    folder = gated_copy(model_dir, tmp_path / "model")
    change, sentence = CHANGES[name]
    change(folder)
    with pytest.raises(UserError, match=f"adapter.*{sentence}"):
        ModelDirectory(folder).load(dtype="float32")


def test_a_merged_adapter_that_is_not_finite_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    settings = {"gated": False, "target_modules": ["q_proj"]}
    folder = adapted_copy(model_dir, tmp_path / "model", **settings)
    scaled(WEIGHTS, "lora_B", NAN)(folder)
    with pytest.raises(
        UserError, match="must be a LoRA adapter of this model, got NaN"
    ):
        ModelDirectory(folder).load(dtype="float32")


@pytest.mark.parametrize("static", [False, True])
def test_an_adapter_that_overflows_changes_no_text(
    tmp_path: Path, static: bool
) -> None:
    """Regression: no draft attends to a probe, but 0 times NaN is NaN: all later tokens were 0."""
    adapter = write_adapter(tiny("llama"), tmp_path, trainable_token_indices=[90])
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({n: w * 1e25 for n, w in weights.items()}, adapter / Path(WEIGHTS).name)
    requests = [Request(prompt) for prompt in PROMPTS]
    new = partial(by_tokens, [90], FixedPlanner(3, "all", 6, 2))
    plain = steps_of(tiny("llama"), Drafters, requests, tokens=12)
    gated = gate_model(tiny("llama"), adapter)
    steps = steps_of(gated, new, requests, tokens=12, static=static)
    assert collect(steps, 2)[0] == collect(plain, 2)[0]


@pytest.mark.parametrize("static", [False, True])
def test_a_plain_model_with_probes_that_overflow_changes_no_text(static: bool) -> None:
    """Bug: only an adapter's overflow was seen. In float16 a trained row may overflow too."""
    requests = [Request(prompt) for prompt in PROMPTS]
    new = partial(by_tokens, [90], FixedPlanner(3, "all", 6, 2))
    lm = tiny("llama").half()
    plain = steps_of(lm, Drafters, requests, tokens=12)
    lm.get_input_embeddings().weight.data[90] = INF
    steps = steps_of(lm, new, requests, tokens=12, static=static)
    assert collect(steps, 2)[0] == collect(plain, 2)[0]


def test_a_head_that_overflows_changes_no_text(model_dir: Path, tmp_path: Path) -> None:
    """Regression: its NaN logits ended a text: "cannot convert float NaN to integer"."""
    folder = gated_copy(model_dir, tmp_path / "model")
    scaled(HEAD, "w", 1e25)(folder)
    model = load(folder, "float32")
    for temperature in (0.0, 0.8):
        plain, drafted = (
            tokens_of(model, PROMPTS, DecodeConfig(method, temperature=temperature))
            for method in ("plain", "hybrid")
        )
        assert drafted == plain


@pytest.mark.parametrize("method", ["ssd", "gsd"])
def test_a_draft_model_that_overflows_changes_no_text(
    model_dir: Path, base_dir: Path, method: str
) -> None:
    """Regression: a greedy text ended, and by ratio NaN reached the target's distribution."""
    model = load(model_dir, "float32", draft=str(base_dir))
    assert model.draft
    plain = tokens_of(model, PROMPTS, DecodeConfig("plain", max_new_tokens=12))
    embedding: Any = model.draft.lm.get_input_embeddings()
    embedding.weight.data[[text[0] for text in plain]] = NAN
    decode = DecodeConfig(method, max_new_tokens=12)
    assert tokens_of(model, PROMPTS, decode) == plain
    # By ratio, where top_k=1 leaves the target no choice, the text is the greedy one too.
    ratio = {"verify": "ratio", "temperature": 0.8, "top_k": 1}
    decode = DecodeConfig(method, max_new_tokens=12, **ratio)
    assert tokens_of(model, PROMPTS, decode) == plain

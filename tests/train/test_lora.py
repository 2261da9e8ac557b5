"""LoRA: what is trained, what stays the base model's, and what an export makes of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.train.test_attention import L, a_layout, model
from train.config import LoraSettings, OptimizerConfig
from train.data import to_tensors
from train.engine import parameter_groups
from train.lora import Gate, PlainWeights, adapt
from train.model import AdaptiveLM
from train.objective import IGNORE, Layout, causal, dual

ADAPTIVE = (45, 46, 47)
CPU = torch.device("cpu")


def a_dual_layout(*, seed: int = 0) -> Layout:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 40, size=(2, 40))
    offsets = np.tile([0, 0, 0, 0, 1, 2, 3, 0], (2, 5))
    return dual(tokens, np.zeros_like(tokens), offsets, ADAPTIVE)


def a_branch_layout(*, seed: int = 0) -> Layout:
    return a_layout(adaptive=ADAPTIVE, seed=seed)


def adapted(
    config: LoraSettings, *, dtype: torch.dtype = torch.float32, tied: bool = False
) -> AdaptiveLM:
    lm = model("sdpa").lm.to(dtype)
    if tied:
        lm.config.tie_word_embeddings = True
        lm.lm_head.weight = lm.model.embed_tokens.weight
    adapt(lm, config, adaptive=ADAPTIVE)
    return AdaptiveLM(lm, chunk=7, L=L, gate=Gate(lm) if config.gated else None)


def train(module: AdaptiveLM, lay_out=a_branch_layout, steps: int = 3) -> list[float]:
    """Losses of a few large steps, each on its own layout."""
    optimizer = torch.optim.AdamW(parameter_groups(module, OptimizerConfig()), lr=0.02)
    losses = []
    for step in range(steps):
        loss, *_ = module(**to_tensors(lay_out(seed=step % 2), CPU))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def hidden_and_tally(module: AdaptiveLM, layout: Layout) -> tuple[Tensor, Tensor]:
    """(r, c, d) last hidden states, and the tally of a forward."""
    batch = to_tensors(layout, CPU)
    with torch.no_grad():
        hidden = module.encode(
            batch["ids"], batch["offsets"], batch["positions"], batch["trunk"]
        )
        return hidden, module(**batch)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_the_clean_rows_are_the_base_models_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    layout = a_branch_layout(seed=5)
    standard = causal(
        layout.ids[:, : layout.trunk],
        np.zeros((len(layout.ids), layout.trunk), dtype=int),
    )
    base = AdaptiveLM(model("sdpa").lm.to(dtype), chunk=7, L=L)
    module = adapted(LoraSettings(rank=4, gated=True), dtype=dtype)
    hidden, _ = hidden_and_tally(base, standard)
    untrained, _ = hidden_and_tally(module, layout)
    train(module)
    trained, tally = hidden_and_tally(module, layout)
    assert torch.equal(untrained[:, : layout.trunk], hidden)
    assert torch.equal(trained[:, : layout.trunk], hidden)
    assert torch.equal(
        tally[0], hidden_and_tally(base, layout)[1][0]
    )  # the standard tokens' loss and accuracy
    adaptive = torch.from_numpy(layout.offsets > 0)
    assert not torch.isclose(trained[adaptive], untrained[adaptive]).any(dim=-1).all()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_only_the_adapter_learns(gated: bool) -> None:
    module = adapted(LoraSettings(rank=4, gated=gated))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    losses = train(module, steps=9)
    assert losses[-1] < losses[0]
    for name, parameter in module.named_parameters():
        learns = "lora_" in name or "trainable_tokens_delta" in name
        assert learns == parameter.requires_grad == (parameter.grad is not None), name
        assert torch.equal(parameter, before[name]) != learns, name


def test_a_gated_gradient_is_that_of_a_mask_on_the_input() -> None:
    """The slow, obvious gate: every row goes through A and B, those of standard tokens
    as zeros.
    """
    layout = a_branch_layout()
    fast, slow = (
        adapted(LoraSettings(rank=4, gated=True)),
        adapted(LoraSettings(rank=4)),
    )
    mask = torch.from_numpy(layout.offsets > 0)[..., None]
    for name, module in slow.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda module, args: (args[0] * mask,))
    layout.labels[layout.offsets == 0] = (
        IGNORE  # what frozen weights predict teaches nothing
    )
    for module in (fast, slow):
        generator = torch.Generator().manual_seed(1)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(generator=generator)
        module(**to_tensors(layout, CPU))[0].backward()
    for (name, a), b in zip(fast.named_parameters(), slow.parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(
                a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_compiled_layer_is_compiled_once_for_every_number_of_adaptive_rows() -> None:
    """A graph for every number of adaptive rows met the limit of graphs, and nothing
    was compiled.
    """
    module = adapted(LoraSettings(rank=4, gated=True))
    layouts = {
        a_branch_layout(seed=seed).ids.shape[1]: a_branch_layout(seed=seed)
        for seed in range(12)
    }
    assert len(layouts) > 1
    graphs, counts = CompileCounter(), []
    expected = [module(**to_tensors(layout, CPU))[0] for layout in layouts.values()]
    module.lm.model.layers[0].compile(dynamic=True, backend=graphs)
    for _ in range(2):
        for layout, loss in zip(layouts.values(), expected, strict=True):
            torch.testing.assert_close(module(**to_tensors(layout, CPU))[0], loss)
        counts.append(graphs.frame_count)
    assert 0 < counts[0] == counts[1]


def plain(
    module: AdaptiveLM, config: LoraSettings, keep: Path | None
) -> LlamaForCausalLM:
    """The model that an export writes."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(module.lm.config)
    trained, merged = module.lm.state_dict(), keep is None
    weights = PlainWeights(
        lm, config, trained, adaptive=ADAPTIVE, merged=merged, dtype=torch.float32
    )
    if keep is not None:
        weights.save_adapter(keep)
    exported = LlamaForCausalLM(module.lm.config)
    exported.load_state_dict(dict(weights))
    return exported.eval()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("keeping", [False, True], ids=["merged", "kept"])
def test_an_export_has_the_logits_of_what_was_trained(
    tmp_path: Path, tied: bool, keeping: bool
) -> None:
    config = LoraSettings(rank=4)
    module = adapted(config, tied=tied)
    train(module)
    ids = torch.from_numpy(a_dual_layout().ids)
    trained = module.lm.eval()(ids).logits
    exported = plain(module, config, tmp_path / "adapter" if keeping else None)
    if keeping:
        base = model("sdpa").lm
        if tied:
            base.lm_head.weight = base.model.embed_tokens.weight
        torch.testing.assert_close(exported(ids).logits, base(ids).logits)
        exported = PeftModel.from_pretrained(exported, str(tmp_path / "adapter"))
    difference = (exported(ids).logits - trained).abs().max()
    assert (
        difference < 1e-5 * trained.abs().max()
    )  # W + BA rounds once where Wx + BAx rounds per row


def test_a_head_that_was_tied_keeps_the_base_models_rows() -> None:
    """peft ties the head to trained rows: its row of an adaptive id would move every
    standard token's loss.
    """
    base = model("sdpa")
    base.lm.lm_head.weight = base.lm.model.embed_tokens.weight
    module = adapted(LoraSettings(rank=4, gated=True), tied=True)
    train(module)
    _, tally = hidden_and_tally(base, a_branch_layout())
    assert torch.equal(hidden_and_tally(module, a_branch_layout())[1][0], tally[0])

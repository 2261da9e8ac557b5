"""Write a gated adapter in the format of SGLang and vLLM ("Uno", arXiv 2609.04010).

adapter_config.json         rank, alpha, short target_modules, the base model's name
adapter_model.safetensors   pairs of lora_A and lora_B only
README.md                   commands, limits, and the tokens per cycle that a server must reach

A server drafts as `decode=sdsat` does. Row 0 of a drafting forward is the last token,
computed by the base model's weights; L mask tokens follow, computed with the adapter. The next
forward verifies with the base model's weights. SGLang reads every *.safetensors file of the
folder, so it must not contain the head and the n-grams, which servers cannot use.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor

from conf.errors import UserError, counted
from conf.runs.files import read_json, write_bytes, write_json
from train.config import NOISE
from train.export import trained_mask
from train.export.card import CARD, card_metadata, validation_at
from train.export.trained import Trained
from train.lora import PlainWeights

TEMPLATE = Path(__file__).with_name("uno.md.j2")
TAGS = ["speculative-decoding", "uno", "lora"]
#: Ranks that vLLM's --max-lora-rank accepts.
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: SGLang's trees: candidates per position, nodes of a typical tree, maximum of nodes.
CANDIDATES = 4
NODES = 16
MOST_NODES = 128


def write_uno(
    trained: Trained, weights: PlainWeights, folder: Path, *, verify: bool
) -> int | None:
    """Write the adapter and its card into `folder`, which may exist.

    Return the number of tensors that were read back and equal the training's; None
    without `verify`. Raise UserError if short names of the adapted layers also match layers
    without an adapter.
    """
    targets = weights.short_targets()
    if targets is None:
        raise UserError(
            f"lora=uno needs an adapter of all layers of a name, got {trained.folder}, "
            "which leaves some out. Omit lora=."
        )
    folder.mkdir(exist_ok=True)
    base = trained.manifest["base"] or {}
    weights.save_adapter(
        folder, targets=targets, base=base.get("hub", base.get("name"))
    )
    # Omit empty settings: servers take an unknown setting for a feature that they lack.
    config = read_json(folder / CONFIG_NAME)
    write_json(
        folder / CONFIG_NAME,
        {name: value for name, value in config.items() if value not in (None, {}, [])},
    )
    _write_card(trained, folder)
    return _verify(folder, weights.adapter()) if verify else None


def _verify(folder: Path, expected: Mapping[str, Tensor]) -> int:
    """Return the number of tensors. Raise UserError if they differ from `expected`."""
    written = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    for name in sorted(written.keys() | expected.keys()):
        ours, theirs = written.get(name), expected.get(name)
        pair = ".lora_A." in name or ".lora_B." in name
        if ours is None or theirs is None or not pair or not torch.equal(ours, theirs):
            raise UserError(
                f"verify: {name} must be a weight of LoRA and equal the training's, got "
                "another one when read back. Nothing was written."
            )
    return len(written)


def _write_card(trained: Trained, folder: Path) -> None:
    manifest = trained.manifest
    base = manifest["base"] or {}
    step = trained.checkpoint.step
    after = validation_at(manifest, step)
    mask = trained_mask(manifest)
    metadata = card_metadata(base, library="peft", tags=TAGS)
    vocabulary: int = trained.config.get_text_config().vocab_size
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        base=base,
        L=manifest["L"],
        noise=mask == NOISE,
        mask=mask,
        vocabulary=vocabulary,
        rank=trained.lora.rank,
        tree=tree_flags(manifest["L"]),
        speculative=vllm_config(mask, L=manifest["L"], vocabulary=vocabulary),
        max_rank=next((r for r in VLLM_RANKS if r >= trained.lora.rank), None),
        head=bool(manifest["settings"]["objective"].get("previous_token")),
        # Servers count the token of row 0 in addition to the verified tokens.
        reach=after["tau_real"] + 1 if "tau_real" in after else None,
        sequences=counted(after.get("sequences", 0), "sequence"),
        step=step,
        manifest=manifest,
    )
    write_bytes(folder / CARD, str(card).encode())


def tree_flags(L: int) -> str | None:
    """Return SGLang's flags for a tree of depth L; None if L is too large for SGLang.

    With F = L + 1 rows in a draft, K candidates and Q nodes, SGLang requires F <= Q <= 128
    and Q <= K (F - 2) + 2.
    """
    if L + 1 > MOST_NODES:
        return None
    nodes = max(L + 1, min(NODES, CANDIDATES * (L - 1) + 2))
    return (
        f"--speculative-num-steps {L} --speculative-eagle-topk {CANDIDATES} "
        f"--speculative-num-draft-tokens {nodes}"
    )


def vllm_config(
    mask: str | int | None, *, L: int, vocabulary: int
) -> dict[str, str | int]:
    """Return the value of vLLM's --speculative-config.

    vLLM draws noise from [1, uno_mask_token_id) and counts the token of row 0 as a draft.
    A single id other than 1 needs the lower bound `uno_noise_low`, which only vllm-uno has.
    """
    config: dict[str, str | int] = {"method": "uno", "uno_lora_path": "DIR"}
    if isinstance(mask, int):
        config |= {"uno_mask_token_id": mask + 1}
        config |= {"uno_noise_low": mask} if mask != 1 else {}
    else:
        config |= {"uno_mask_token_id": vocabulary}
    return config | {"num_speculative_tokens": L + 1}

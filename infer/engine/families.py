"""Which models decode with trees here; others are refused by name.

What a configuration gives away is decided from it, before any weight is read. The rest is tried: a
tree of four nodes against the library's own forward.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conf.errors import UserError
from infer.engine.attention import is_alibi
from infer.engine.forward import DynamicForward, Target
from infer.engine.memory import is_out_of_memory
from infer.engine.output import Request
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

KINDS = {"full_attention", "sliding_attention"}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
CHANGING = {
    "dynamic",
    "longrope",
}  # rotary frequencies that depend on the longest position of a forward
TOLERANCE = {2: 0.05, 4: 1e-3, 8: 1e-6}  # of the logits' range, by bytes of the dtype


def check_family(config: PretrainedConfig, name: str | None = None) -> None:
    """Raise UserError, naming the model, for an architecture whose configuration rules trees out."""
    reason = _reason(config)
    if reason:
        raise _refused(config, reason, name)


def _reason(config: PretrainedConfig) -> str:
    """Return why trees are ruled out, as the end of a sentence; empty where they are not."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ", which is no decoder-only language model"
    if config.get_text_config() is not config:
        return ", which takes more than text"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds = set(getattr(config, "layer_types", None) or ()) - KINDS
    if kinds or model._is_stateful:
        return f", which has layers other than attention{': ' + ', '.join(sorted(kinds)) if kinds else ''}"
    capped = [name for name in CAPS if getattr(config, name, None) is not None]
    if capped:
        return f", whose logits are capped ({capped[0]}={getattr(config, capped[0])})"
    if not (
        model._supports_attention_backend and model._supports_sdpa or is_alibi(config)
    ):
        return ", whose attention takes no mask of ours"
    rope = getattr(config, "rope_parameters", None) or {}
    types = {
        str(value.get("rope_type"))
        for value in (rope, *rope.values())
        if isinstance(value, dict)
    }
    if types & CHANGING:
        return f", whose rotary positions change with the text's length ({', '.join(types & CHANGING)})"
    return ""


@torch.inference_mode()
def check_tree(lm: PreTrainedModel, name: str | None = None) -> None:
    """Raise UserError unless a tree's logits are those of its paths in the library's forward.

    Catches masks that are not followed, positions that are counted otherwise, and logits that are more
    than the head applied to the decoder's output.
    """
    n = 5
    V = lm.config.vocab_size
    *prompt, a, b, c, d = ((13 + 7919 * index) % V for index in range(n + 4))
    paths = torch.tensor([[*prompt, a, b, d], [*prompt, a, c, d]], device=lm.device)
    try:
        # The rival c stands between b and its child d.
        ours = _tree_logits(lm, prompt, Tree((a, b, c, d), (-1, 0, 0, 1), 4))
        first, second = lm(paths).logits[:, n:]
        theirs = torch.stack([first[0], first[1], second[1], first[2]])
    except Exception as error:  # whatever an architecture's own code raises
        if is_out_of_memory(error):
            raise
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise _refused(
            lm.config, f", which could not be tried with a tree ({message})", name
        ) from error
    apart = float((ours.double() - theirs.double()).abs().max())
    limit = TOLERANCE[lm.dtype.itemsize] * float(theirs.max() - theirs.min())
    if not apart <= limit:
        differ = f"(by {apart:.2g}; {limit:.2g} allowed)"
        raise _refused(
            lm.config,
            f", whose logits of a tree are not those of its paths {differ}",
            name,
        )


def _tree_logits(lm: PreTrainedModel, prompt: list[int], tree: Tree) -> Tensor:
    target = Target(lm, batch=1, capacity=16)
    target.cache.clear(1)
    forward = DynamicForward(target)
    requests = [Request(prompt)]
    forward([Tree.chain(prompt[0], prompt[1:])], requests, GREEDY)
    target.cache.commit([range(len(prompt))])
    return forward([tree], requests, GREEDY).logits[: len(tree.tokens)].whole()


def _refused(config: PretrainedConfig, reason: str, name: str | None) -> UserError:
    suited = "a causal model whose attention follows a tree"
    return UserError(
        f"{name or f'model={config.name_or_path}'} must be {suited}, got {config.model_type}{reason}"
    )

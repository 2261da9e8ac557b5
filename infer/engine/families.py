"""Check that a model supports trees of drafts.

An unsupported architecture is refused before any weight is read, by the check that
training and export also use (conf/architecture.py). A loaded model is tested: the logits of
a tree of four nodes must equal the logits of the library's own forward.
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from conf.architecture import why_unsupported
from conf.errors import UserError, in_one_line, is_out_of_memory
from infer.engine.forward import DynamicForward, Target
from infer.engine.output import Request
from infer.engine.packed import dtype_of
from infer.engine.sampling import GREEDY
from infer.trees.tree import Tree

#: The allowed difference as a share of the logits' range, by bytes of the dtype.
TOLERANCE = {2: 0.05, 4: 1e-3, 8: 1e-6}


def check_family(config: PretrainedConfig, name: str | None = None) -> None:
    """Raise UserError if the architecture cannot verify trees of drafts, whatever its weights."""
    if reason := why_unsupported(config):
        raise _refused(config, reason, name)


@torch.inference_mode()
def check_tree(lm: PreTrainedModel, name: str | None = None) -> None:
    """Raise UserError unless a tree's logits equal the logits of its paths.

    The check detects a model that ignores the mask or computes positions in another way.
    """
    n = 5
    V = lm.config.vocab_size
    *prompt, a, b, c, d = ((13 + 7919 * index) % V for index in range(n + 4))
    paths = torch.tensor([[*prompt, a, b, d], [*prompt, a, c, d]], device=lm.device)
    try:
        # The rival c is between b and its child d.
        of_tree = _tree_logits(lm, prompt, Tree((a, b, c, d), (-1, 0, 0, 1), 4))
        first, second = lm(paths).logits[:, n:]
        of_paths = torch.stack([first[0], first[1], second[1], first[2]])
    except Exception as error:  # an architecture's code may raise any exception
        if is_out_of_memory(error):
            raise
        reason = f"which fails on a tree ({type(error).__name__}: {in_one_line(error)})"
        raise _refused(lm.config, reason, name) from error
    if not of_paths.isfinite().all():
        raise UserError(
            f"{name or _name_of(lm.config)} must have finite logits, got NaN or infinite ones in "
            f"{dtype_of(lm)}. Use dtype=float32 if that is a narrower "
            "type; otherwise the weights are damaged or their training diverged."
        )
    difference = float((of_tree.double() - of_paths.double()).abs().max())
    size = getattr(torch, dtype_of(lm)).itemsize
    limit = TOLERANCE[size] * float(of_paths.max() - of_paths.min())
    if not difference <= limit:
        reason = (
            f"which computes other logits for a tree than for its paths (difference "
            f"{difference:.2g}, allowed {limit:.2g})"
        )
        raise _refused(lm.config, reason, name)


def _tree_logits(lm: PreTrainedModel, prompt: list[int], tree: Tree) -> Tensor:
    target = Target(lm, batch=1, capacity=16)
    target.cache.clear(1)
    target.read([prompt])
    target.cache.commit([range(len(prompt))])
    output = DynamicForward(target)([tree], [Request(prompt)], GREEDY)
    return output.logits[: len(tree.tokens)].whole()


def _name_of(config: PretrainedConfig) -> str:
    return f"model={config.name_or_path}"


def _refused(config: PretrainedConfig, reason: str, name: str | None) -> UserError:
    return UserError(
        f"{name or _name_of(config)} must be a causal model with attention that can follow a tree, "
        f"got {config.model_type}, {reason}. Use another model."
    )

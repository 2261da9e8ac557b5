"""A causal language model that returns a layout's loss instead of logits.

Knows the library's model and the rows of a layout; knows no engine, no data and no objective.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.model.lora import Gate
from train.monitor.metrics import tally
from train.objective.attention import Mask, branch_kernel, branch_mask
from train.objective.loss import weighted_cross_entropy


class AdaptiveLM(nn.Module):
    """The library's model, `lm`, under the loss. `chunk` positions have logits at once; a `gate` of
    the model's adapter is opened for the adaptive rows. `attention` is objective.attention.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        chunk: int,
        L: int,
        soft: float = 0.0,
        gate: Gate | None = None,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self.lm = lm
        self._chunk, self._L, self._soft, self._gate, self._attention = chunk, L, soft, gate, attention

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        offsets: Tensor,
        weights: Tensor,
        positions: Tensor,
        teachers: Tensor,
        trunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A Layout's (r, c) tensors in; the loss, its tally (L + 1, 4) and the likeliest token of
        every labelled column (r, c) out.
        """
        return self.score(self.encode(ids, offsets, positions, trunk), labels, offsets, weights, teachers)

    def encode(self, ids: Tensor, offsets: Tensor, positions: Tensor, trunk: int) -> Tensor:
        """Return the (r, c, d) last hidden states of a Layout's (r, c) tensors."""
        self.train(torch.is_grad_enabled())  # an adapter's dropout is no part of a validation
        if self._gate is not None:
            self._gate.open(offsets > 0)
        hidden: Tensor = self.lm.get_decoder()(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask(positions, offsets, trunk),
            use_cache=False,
        ).last_hidden_state
        return hidden

    def score(
        self, hidden: Tensor, labels: Tensor, offsets: Tensor, weights: Tensor, teachers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `forward` does, from `encode`'s hidden states."""
        loss, losses, predicted = weighted_cross_entropy(
            hidden.flatten(0, 1),
            self.lm.get_output_embeddings().weight,
            labels.flatten(),
            weights.flatten(),
            chunk=self._chunk,
            teachers_T=teachers.flatten(),
            soft=self._soft if torch.is_grad_enabled() else 0.0,
        )
        losses, predicted = losses.view_as(labels), predicted.view_as(labels)
        return loss, tally(losses, predicted, labels, offsets, L=self._L), predicted

    def _mask(self, positions: Tensor, offsets: Tensor, trunk: int) -> Mask | None:
        if positions.shape[1] == trunk:
            return None
        config = self.lm.config
        heads = config.num_attention_heads
        kernel = branch_kernel(
            self._attention,
            positions.device.type,
            self.lm.dtype,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dropout=getattr(config, "attention_dropout", 0.0),
        )
        return branch_mask(positions, offsets, trunk, kernel)

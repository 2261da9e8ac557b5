"""What DeepSpeed holds of a model in each moment of a step: fixed by its parameters, whatever the batch.

Pure arithmetic of ZeRO's stages (Rajbhandari et al. 2020, §3) with the buffers that DeepSpeed's
optimizers allocate (its runtime/zero/stage_1_and_2.py, stage3.py, fp16/unfused_optimizer.py).
Every moment is a pair: bytes of gradients, bytes of buffers.
"""

from dataclasses import dataclass
from typing import Any

BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements, where the settings name none
LIVE = 1_000_000_000  # its stage3_max_live_parameters
PREFETCH = 50_000_000  # its stage3_prefetch_bucket_size
SUB_GROUP = 1_000_000_000  # its sub_group_size


@dataclass(frozen=True)
class States:
    """What the engine holds of a model: fixed by its parameters, whatever the batch."""

    parameters: int
    trained: int  # of them, and of LoRA's
    largest_group: int  # of those that the optimizer steps at once: embeddings are a group of their own
    ranks: int
    stage: int
    b: int  # bytes of a weight, and of a gradient of one micro-batch
    g: int  # bytes of a gradient that several are added up in; above b only at stages 2 and 3
    accumulates: bool
    zero: dict[str, Any]
    cuda: bool  # where memory counts when it is allocated, not when it is first written to

    @property
    def offloaded(self) -> bool:
        """Whether the optimizer's states are in the machine's memory."""
        return (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @property
    def share(self) -> float:
        """Trained parameters of this rank's partition."""
        return self.trained / self.ranks

    @property
    def weights(self) -> float:
        """Of the model that computes."""
        if self.stage < 3:
            return self.parameters * self.b
        kept_apart = (self.zero.get("offload_param") or {}).get("device", "none") != "none"
        return 0 if kept_apart else self.parameters / self.ranks * self.b

    @property
    def optimizer(self) -> float:
        """Two moments and a float32 master; only without ZeRO a float32 model is its own master."""
        if self.stage == 0:
            return self.trained * (12 if self.b == 2 else 8)
        return 0 if self.offloaded else self.share * 12

    @property
    def host(self) -> float:
        """Masters, moments and a float32 gradient, with the 16-bit copy on its way back; weights of stage 3."""
        wide = self.g - self.b if self.stage == 3 else 0  # at stage 2 the sum stays on the device
        states = self.share * (16 + self.b + wide) if self.offloaded else 0
        kept_apart = (self.zero.get("offload_param") or {}).get("device", "none") != "none"
        return states + (self.parameters / self.ranks * self.b if kept_apart and self.stage == 3 else 0)

    @property
    def bucket(self) -> float:
        """Elements of the buffer that gradients are reduced in."""
        return float(self.zero.get("reduce_bucket_size", BUCKET))

    @property
    def filled(self) -> float:
        """How many of them are written at most."""
        return min(self.trained, self.bucket)

    @property
    def bucket_bytes(self) -> float:
        """Of the buffer itself; two where reduction overlaps with the backward pass (stages 1, 2)."""
        size = self.bucket if self.cuda else self.filled
        return size * self.b * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    @property
    def gathered(self) -> float:
        """Stage 3: whole layers that are in use or fetched ahead; all of a model that is small enough."""
        if self.stage < 3:
            return 0
        live = float(self.zero.get("stage3_max_live_parameters", LIVE))
        ahead = float(self.zero.get("stage3_prefetch_bucket_size", PREFETCH))
        return self.b * min(self.parameters, live + ahead)

    def while_forward(self) -> tuple[float, float]:
        """Gradients and buffers that lie beside all activations, before the backward pass."""
        if self.stage == 3:
            return (0 if self.offloaded else self.share * self.g), self.bucket_bytes + self.gathered
        if not self.accumulates:
            return 0, 0
        if self.stage == 2:
            return (0 if self.offloaded and self.g == self.b else self.share * self.g), 0
        return self.b * self.trained, 0

    def while_backward(self) -> tuple[float, float]:
        """The same with the buffers of reduction, in full where they fill before the pass ends."""
        gradients, buffers = self.while_forward()
        if self.stage == 0:
            return gradients, buffers
        if self.stage < 3 and self.cuda:
            buffers += self.bucket_bytes
        if self.stage >= 2 and self.bucket < self.trained:
            buffers += self.filled * self.b
            if self.stage == 2 and self.g > self.b:
                gradients = self.share * self.g  # one vector, which every micro-batch is added to
            elif self.stage == 2 and not self.offloaded:
                gradients += self.share * self.b
        return gradients, buffers

    def at_reduction(self) -> tuple[float, float]:
        """When the last gradient is there: the bucket, and a copy of it that is summed over ranks."""
        copied = self.filled * self.b
        if self.stage == 0:
            return self.trained * self.b, min(self.trained, BUCKET) * self.b
        held, buffers = self.while_forward()
        if self.stage == 1:
            moved = self.share * self.b if self.bucket < self.trained else 0
            waiting = (self.trained - self.filled) * self.b
            return waiting + moved, self.bucket_bytes + copied
        if self.stage == 2 and self.g > self.b:
            return self.share * self.g, self.bucket_bytes + copied
        if self.stage == 2:
            return held + (self.share * self.b if self.bucket < self.trained else 0), self.bucket_bytes + copied
        widened = self.filled / self.ranks * self.g if self.g > self.b else 0
        return held, buffers + copied + widened

    def at_step(self) -> tuple[float, float]:
        """The optimizer's step: gradients once more, flat and in float32, of one group after the other."""
        wide = 4 if self.g == 2 else 0  # a float32 gradient needs no copy in float32
        if self.stage == 0:
            return self.trained * self.b, self.trained * wide
        if self.offloaded:
            return (self.share * self.g if self.stage == 2 and self.g > self.b else 0), 0
        share = self.largest_group / self.ranks
        if self.stage == 3:
            share = min(share, float(self.zero.get("sub_group_size", SUB_GROUP)))
            bucket = self.bucket_bytes
            return self.share * self.g, bucket + share * (self.g + wide)
        if self.g > self.b:
            return self.share * self.g, 0
        return self.share * self.b, share * (self.b + wide)

"""The peers that a run asks for, by dtype and temperature; why one is left out is told once."""

from collections.abc import Mapping
from logging import getLogger

from transformers import PreTrainedModel

from infer.engine.sampling import Sampling
from infer.measure.runs import Decoder
from infer.models.checkpoint import Adaptive
from infer.models.draft import Draft
from infer.models.parallel import is_first
from infer.speed.config import PEERS, SpeedConfig
from infer.speed.peers import peer_decoders
from infer.speed.units import Group, Way
from infer.speed.vllm_peer import VLLM, Engines, load_engines


class Peers:
    """Of the models of all dtypes, for texts of up to `capacity` tokens."""

    def __init__(
        self,
        config: SpeedConfig,
        lms: Mapping[str, PreTrainedModel],
        drafts: Mapping[str, Draft],
        adaptive: Adaptive | None,
        *,
        capacity: int,
    ) -> None:
        self._config, self._lms, self._drafts, self._capacity = config, lms, drafts, capacity
        self._told = set[str]()
        self._engines = {dtype: self._serve(dtype, adaptive) for dtype in lms} if VLLM in config.peers else {}

    def decoders(self, group: Group, sampling: Sampling) -> dict[Way, Decoder]:
        """Of a dtype, with the sampling of its temperature."""
        config = self._config
        found, reasons = peer_decoders(
            self._lms[group.dtype],
            self._drafts.get(group.dtype),
            sampling=sampling,
            max_new_tokens=config.max_new_tokens,
            capacity=self._capacity,
            seed=config.seed,
        )
        wanted = [PEERS[name] for name in config.peers]
        for name, reason in reasons.items():
            if name in wanted:
                self._leave_out(name, reason)
        decoders = {Way(name): decoder for name, decoder in found.items() if name in wanted}
        engines = self._engines.get(group.dtype)
        if engines:
            served, unsampled = engines.decoders(
                sampling=sampling, max_new_tokens=config.max_new_tokens, seed=config.seed
            )
            if unsampled:
                self._leave_out(f"{VLLM} with drafts at a temperature", unsampled)
            decoders |= {Way(VLLM, k): decoder for k, decoder in served.items()}
        return decoders

    def _serve(self, dtype: str, adaptive: Adaptive | None) -> Engines | None:
        k = adaptive.L if adaptive else 0
        found = load_engines(self._config.model, adaptive, k, dtype=dtype, capacity=self._capacity)
        if isinstance(found, Engines):
            return found
        self._leave_out(VLLM, found)
        return None

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._told and is_first():
            getLogger(__name__).warning("peers: %s is left out: %s", name, reason)
        self._told.add(name)

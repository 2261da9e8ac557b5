"""The peers that a run asks for, by dtype and temperature; and why one is left out, which is told once."""

from collections.abc import Callable, Mapping
from logging import getLogger

from transformers import PreTrainedModel

from conf.errors import visible
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
    """Of the models of all dtypes, for texts of up to `capacity` tokens; `sampling` is that of a temperature.

    `left_out` says by the name of a peer why it is not there, or not everywhere.
    """

    def __init__(
        self,
        config: SpeedConfig,
        lms: Mapping[str, PreTrainedModel],
        drafts: Mapping[str, Draft],
        adaptive: Adaptive | None,
        *,
        sampling: Callable[[float], Sampling],
        capacity: int,
    ) -> None:
        self._config, self._capacity = config, capacity
        self.left_out = dict[str, str]()
        self._decoders = dict[Group, dict[Way, Decoder]]()
        for dtype, lm in lms.items():
            engines = self._serve(dtype, adaptive) if VLLM in config.peers else None
            for temperature in config.temperatures:
                drawn = sampling(temperature)
                own, served = self._library(lm, drafts.get(dtype), drawn), self._served(engines, drawn)
                self._decoders[Group(dtype, temperature)] = own | served

    def decoders(self, group: Group) -> dict[Way, Decoder]:
        """Of a dtype and a temperature."""
        return self._decoders[group]

    def _library(self, lm: PreTrainedModel, draft: Draft | None, sampling: Sampling) -> dict[Way, Decoder]:
        """The library's."""
        config = self._config
        found, reasons = peer_decoders(
            lm,
            draft,
            sampling=sampling,
            max_new_tokens=config.max_new_tokens,
            capacity=self._capacity,
            seed=config.seed,
        )
        wanted = [PEERS[name] for name in config.peers]
        for name, reason in reasons.items():
            if name in wanted:
                self._leave_out(name, reason)
        return {Way(name): decoder for name, decoder in found.items() if name in wanted}

    def _served(self, engines: Engines | None, sampling: Sampling) -> dict[Way, Decoder]:
        """VLLM's."""
        if engines is None:
            return {}
        config = self._config
        found, unsampled = engines.decoders(
            sampling=sampling, max_new_tokens=config.max_new_tokens, seed=config.seed
        )
        if unsampled:
            self._leave_out(f"{VLLM} with drafts at a temperature", unsampled)
        return {Way(VLLM, k): decoder for k, decoder in found.items()}

    def _serve(self, dtype: str, adaptive: Adaptive | None) -> Engines | None:
        k = adaptive.L if adaptive else 0
        found = load_engines(self._config.model, adaptive, k, dtype=dtype, capacity=self._capacity)
        if isinstance(found, str):
            self._leave_out(VLLM, found)
            return None
        if found.undrafted:
            self._leave_out(f"{VLLM} with drafts", found.undrafted)
        return found

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self.left_out and is_first():
            getLogger(__name__).warning("peers: %s is left out: %s", name, visible(reason))
        self.left_out.setdefault(name, reason)

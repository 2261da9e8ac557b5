"""The methods that draft from sources: adaptive tokens, and n-grams of text and data.

`infer.generate` and the `custom_generate` of an export share them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedModel

from conf.errors import UserError
from infer.config import METHODS, DecodeConfig
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy, check_probes
from infer.drafters.policy import MeasuredPolicy, length_class, remember_policies
from infer.drafters.stopwatch import Stopwatch
from infer.loop import Drafters
from infer.ngrams import FILE, Ngrams, NgramTable, NgramWeights
from infer.trees.lattice import DEEPEST, RANKS
from infer.trees.token_graph import Watch

#: Tokens in a row that n-grams draft by default
LOOKED_UP = 10


@dataclass
class SourceMethods:
    """Drafters of one model, from adaptive tokens (`ids`, if any) and n-grams.

    `L` is the widest window of training, `table` the n-grams of the training data, if
    there are some. The policies learn from one text to the next.
    """

    lm: PreTrainedModel
    ids: Sequence[int] = ()
    L: int = 1
    weights: NgramWeights = NgramWeights()
    table: NgramTable | None = None
    policies: Callable[..., MeasuredPolicy] = field(default_factory=remember_policies)

    def drafters(
        self,
        decode: DecodeConfig,
        *,
        batch: int,
        capacity: int,
        left: int,
        watch: Watch | None = None,
    ) -> Drafters:
        """Return drafters as Methods.drafters does, for a method with sources."""
        sources = self._sources(decode)
        ids = self.ids if "adaptive" in sources else ()
        k = min(decode.k or (self.L if ids else LOOKED_UP), max(1, left))
        if ids:
            try:
                check_probes(ids, k)
            except ValueError as error:
                raise UserError(f"decode.{error}") from error
        measured = decode.method == "hybrid" and decode.probes == "auto"
        stopwatch = None
        policy: Policy
        if measured or not (ids or decode.k):
            stopwatch = Stopwatch(self.lm)
            policy = self.policies(
                self.lm.device.type,
                k if ids else 0,
                decode.sampling,
                sources,
                batch,
                length_class(capacity),
            )
        else:
            policy = _fixed_policy(decode, k)
        ngrams = None
        if sources != {"adaptive"}:
            ngrams = Ngrams(
                self.table if "ngrams" in sources else None,
                self.lm.config.get_text_config().vocab_size,
                text="text" in sources,
                weights=self.weights,
            )
        return Drafters(partial(AdaptiveDrafter, ids, policy, ngrams, watch, stopwatch))

    def _sources(self, decode: DecodeConfig) -> frozenset[str]:
        """Return the sources, by default all that the method and the model have."""
        sources = frozenset(decode.sources or METHODS[decode.method or ""].sources)
        if "adaptive" in sources and not self.ids:
            raise UserError(
                f"decode.method={decode.method} needs a model with adaptive.json, got "
                "none. Use decode=plain, ngrams or prompt_lookup."
            )
        if "ngrams" in (decode.sources or ()) and self.table is None:
            raise UserError(
                f"decode.sources=ngrams needs {FILE} in the model directory, got none. "
                "Use decode.sources=[text]."
            )
        return sources if self.table else sources - {"ngrams"}


def _fixed_policy(decode: DecodeConfig, k: int) -> FixedPolicy:
    probes = "root" if decode.probes == "auto" else decode.probes
    if decode.tree == "chain":
        return FixedPolicy(k, probes)
    if k > DEEPEST:
        raise UserError(
            f"decode.k must be 1 to {DEEPEST} with decode.tree=paper, got {k}"
        )
    return FixedPolicy(k, probes, width=RANKS, tree="paper")

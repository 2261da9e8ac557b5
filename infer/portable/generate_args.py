"""The arguments of Transformers' `generate` in this decoder's terms, or refused.

B sequences, prompts of P columns, padded on the left
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Limits, Stop

WARPERS = (
    (TopPLogitsWarper, "top_p"),
    (TopKLogitsWarper, "top_k"),
    (TemperatureLogitsWarper, "temperature"),
)
# Their scores depend on earlier calls, and each sequence advances at its own pace.
STATEFUL = (
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
OUTPUTS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
LENGTHS = ("max_new_tokens", "max_length")
HARMLESS = {
    "use_cache",
    "logits_to_keep",
}  # change only the cost of the library's forwards


def check_supported(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    inputs: Mapping[str, Any],
    *,
    sequences: int,
) -> None:
    """Raise ValueError for what only the library can do; `inputs` are further inputs of the model."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refused(f"generate must decode greedily or sample, got {mode.value}")
    for name in OUTPUTS:
        if getattr(config, name, False):
            raise _refused(f"{name} must be False, got True")
    if config.cache_implementation:
        raise _refused(
            f"cache_implementation must be None, got {config.cache_implementation!r}"
        )
    for processor in processors:
        if isinstance(processor, STATEFUL):
            name = type(processor).__name__
            raise _refused(
                f"logits_processor must be functions of ids and scores, got {name}"
            )
        if sequences > 1 and isinstance(processor, PrefixConstrainedLogitsProcessor):
            raise _refused(
                f"prefix_allowed_tokens_fn must have one sequence, got {sequences}"
            )
    for name, value in inputs.items():
        if value is not None and name not in HARMLESS:
            raise _refused(
                f"{name} must be None, got a value: a prompt is token ids alone"
            )


def _refused(reason: str) -> ValueError:
    return ValueError(
        f"{reason}. Use the library's own transformers.GenerationMixin.generate(model, ...)"
    )


def first_set(
    name: str, args: Mapping[str, Any], configs: Sequence[GenerationConfig | None]
) -> Any:
    """Return an argument's value, or else the first config's that has one."""
    values = [
        args.get(name),
        *(getattr(config, name) for config in configs if config is not None),
    ]
    return next((value for value in values if value is not None), None)


def implies_sampling(
    config: GenerationConfig | None, default: GenerationConfig | None
) -> bool:
    """Return whether a call's config sets temperature or top_p but not do_sample, as `transformers serve` does.

    The library's own generate decodes greedily then.
    """
    if config is None or config is default or config.do_sample is not None:
        return False
    return any(
        (value := getattr(config, name)) is not None
        and value != getattr(default, name, None)
        for name in ("temperature", "top_p")
    )


def within_context(
    limits: Limits, *, longest: int, context: int, explicit: bool
) -> Limits:
    """Return limits that fit the model's context behind the longest prompt, with a warning if they did not.

    Raise ValueError for a length given as an argument (`explicit`), and for a prompt that fills the context:
    the cache is allocated for the whole length. `transformers serve` sets 1,024 new tokens by default.
    """
    new = limits.max_new_tokens
    left = context - longest
    if new <= left:
        return limits
    if explicit or left < 1:
        limit = f"the model's context of {context}"
        raise _refused(
            f"max_new_tokens (max_length) must fit {limit}, got {longest} + {new}"
        )
    message = "max_new_tokens=%d behind %d tokens exceeds the model's context of %d: the text ends after %d"
    getLogger(__name__).warning(message, new, longest, context, left)
    return replace(limits, max_new_tokens=left)


def whole_number(name: str, value: Any) -> int:
    """Return an argument as an int, from any library's integer type. Raise ValueError for others."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


def prompts_of(
    ids_BP: Tensor, mask_BP: Tensor | None, positions_BP: Tensor | None
) -> list[list[int]]:
    """Return each sequence's ids without padding.

    Raise ValueError for empty prompts, padding other than on the left, or positions that do not count from 0.
    """
    if not ids_BP.numel():
        raise ValueError(
            f"input_ids must have at least one token, got the shape {tuple(ids_BP.shape)}"
        )
    attended = torch.ones_like(ids_BP) if mask_BP is None else (mask_BP != 0).long()
    first_B1 = attended.argmax(
        1, keepdim=True
    )  # 0 for a row of zeros, which the next check refuses
    places = torch.arange(ids_BP.shape[1], device=ids_BP.device) - first_B1
    if attended.shape != ids_BP.shape or not torch.equal(attended.bool(), places >= 0):
        form = "zeros, then a 1 for each token of the prompt"
        raise ValueError(
            f"attention_mask must be {form}, got another. Use padding_side='left'."
        )
    if positions_BP is not None:
        counted = positions_BP.to(places.device).expand_as(places)
        if not torch.equal(counted[places >= 0], places[places >= 0]):
            raise ValueError(
                "position_ids must count from 0 in each prompt, got others. Omit them."
            )
    return [row[first:] for row, (first,) in zip(ids_BP.tolist(), first_B1.tolist())]


def sampling_of(
    processors: LogitsProcessorList, *, sample: bool
) -> tuple[Sampling, LogitsProcessorList]:
    """Split off the last processors that the pick itself applies: temperature, then top_k, then top_p."""
    if not sample:
        return GREEDY, processors
    rest = LogitsProcessorList(processors)
    values: dict[str, Any] = {}
    for kind, name in WARPERS:
        if rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            values[name] = getattr(rest.pop(), name)
    return Sampling(**{"temperature": 1.0, **values}), rest


def _is_plain(warper: Any) -> bool:
    cuts = getattr(warper, "filter_value", -float("inf")) == -float("inf")
    return cuts and getattr(warper, "min_tokens_to_keep", 1) == 1


class RowProcessor(LogitsProcessor):
    """A batch's processors applied to its row `b`, whose prompt has `prompt` tokens. They may use the number of
    rows and the padding, so they get the whole batch, with this row's ids in every row.
    """

    def __init__(
        self, processors: LogitsProcessorList, ids_BP: Tensor, b: int, *, prompt: int
    ) -> None:
        self._processors = processors
        self._b = b
        self._rows = len(ids_BP)
        self._padding = ids_BP[b : b + 1, : ids_BP.shape[1] - prompt]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return (1, V) scores of (1, n) ids and (1, V) scores."""
        device = self._padding.device  # for which the library made the processors
        ids: Any = torch.cat([self._padding, input_ids.to(device)], dim=1).repeat(
            self._rows, 1
        )
        processed = self._processors(ids, scores.to(device).repeat(self._rows, 1))
        return processed[self._b : self._b + 1].to(scores.device)


def limits_of(criteria: StoppingCriteriaList, ids_BP: Tensor) -> Limits:
    """Return when texts end: by length or EOS, or by other criteria, which are called after every token."""
    length = (
        min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        - ids_BP.shape[1]
    )
    ends: list[Any] = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    rest = StoppingCriteriaList(
        c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
    )
    eos = {id for ids in ends for id in ids.tolist()}
    return Limits(
        max(1, length),
        eos,
        (lambda b: _stop(rest, ids_BP[b : b + 1])) if rest else None,
    )


def _stop(criteria: StoppingCriteriaList, ids_1n: Any) -> Stop:
    def stops(token: int) -> bool:
        nonlocal ids_1n
        ids_1n = torch.cat([ids_1n, ids_1n.new_tensor([[token]])], dim=1)
        return bool(criteria(ids_1n, None).all())

    return stops


def padded(
    ids_BP: Tensor, texts: Sequence[Sequence[int]], pad: Tensor | None
) -> Tensor:
    """Return (B, P + n) prompts and texts, padded on the right."""
    n = max(map(len, texts))
    fill = 0 if pad is None else int(pad)
    return torch.cat(
        [
            ids_BP,
            ids_BP.new_tensor([[*text, *[fill] * (n - len(text))] for text in texts]),
        ],
        1,
    )

"""Convert the arguments of Transformers' `generate` to this decoder's.

Shapes: B sequences, and P columns of prompts that are padded on the left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
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

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Processors with scores that depend on earlier calls; here each sequence has its own pace.
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
# Inputs that only change the cost of the library's forwards.
HARMLESS = {"use_cache", "logits_to_keep"}


def check_arguments(
    args: Mapping[str, Any], configs: Sequence[GenerationConfig | None]
) -> None:
    """Raise ValueError for arguments that the library would not pass on to this decoder.

    It drops an assistant model, decodes by itself with a paged cache, and heals tokens by a
    tokenizer that it has dropped.
    """
    unsupported = []
    if args.get("assistant_model") is not None:
        unsupported.append("assistant_model")
    if args.get("cache_implementation") == "paged":
        unsupported.append("cache_implementation='paged'")
    values = [args.get("token_healing")]
    values += [config.token_healing for config in configs if config]
    if next((value for value in values if value is not None), False):
        unsupported.append("token_healing")
    _refuse(unsupported)


def check_supported(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    inputs: Mapping[str, Any],
    *,
    sequences: int,
    streams: bool,
) -> None:
    """Raise ValueError for arguments that only Transformers' own decoding supports.

    `inputs` are the caller's inputs of the model, without the ids. A call that `streams` must
    have one sequence: a streamer gets a token of every sequence at once, but here each
    sequence advances at its own pace.
    """
    mode = config.get_generation_mode()
    unsupported = [] if mode in MODES else [f"decoding by {mode.value}"]
    if streams and sequences > 1:
        unsupported.append("streamer for several sequences")
    unsupported += [name for name in OUTPUTS if getattr(config, name, False)]
    unsupported += [
        name
        for name, value in inputs.items()
        if value is not None and name not in HARMLESS
    ]
    for processor in processors:
        if isinstance(processor, STATEFUL):
            unsupported.append(f"{type(processor).__name__}, which has a state")
        if sequences > 1 and isinstance(processor, PrefixConstrainedLogitsProcessor):
            unsupported.append("prefix_allowed_tokens_fn for several sequences")
    _refuse(unsupported)


def _refuse(unsupported: Sequence[str]) -> None:
    if unsupported:
        raise ValueError(
            f"custom_generate must be called without {unsupported[0]}. Use the "
            "library's own decoding: transformers.GenerationMixin.generate(model, ...)"
        )


def implies_sampling(
    config: GenerationConfig | None, default: GenerationConfig | None
) -> bool:
    """Return True if a call's config sets temperature or top_p but not do_sample.

    `transformers serve` makes such configs. Transformers' own generate is greedy then. A
    temperature of 0 is greedy.
    """
    if config is None or config is default or config.do_sample is not None:
        return False
    if config.temperature == 0:
        return False
    return any(
        (value := getattr(config, name)) is not None
        and value != getattr(default, name, None)
        for name in ("temperature", "top_p")
    )


def prompts_of(ids_BP: Tensor, mask_BP: Tensor | None) -> list[list[int]]:
    """Return each sequence's ids without padding.

    Raises ValueError for an empty prompt, for a mask of another shape, and for padding that
    is not on the left.
    """
    if mask_BP is not None and mask_BP.shape != ids_BP.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {tuple(ids_BP.shape)}, got "
            f"{tuple(mask_BP.shape)}. Give the mask that the tokenizer returned with the ids."
        )
    attended = torch.ones_like(ids_BP) if mask_BP is None else (mask_BP != 0).long()
    if (
        not ids_BP.numel()
        or not attended[:, -1].all()
        or not torch.equal(attended, attended.cummax(1).values)
    ):
        raise ValueError(
            "input_ids must have at least one token in each row, and padding (attention_mask 0) "
            "only on the left. Use padding_side='left'."
        )
    starts = attended.argmax(1).tolist()
    return [row[start:] for row, start in zip(ids_BP.tolist(), starts)]


def sampling_of(
    processors: LogitsProcessorList, *, sample: bool
) -> tuple[Sampling, LogitsProcessorList]:
    """Return the sampling settings of the last processors, and the remaining processors.

    The last processors are temperature, top_k and top_p in this order; each may be absent.
    """
    if not sample:
        return GREEDY, processors
    rest = LogitsProcessorList(processors)
    sampling = Sampling(temperature=1.0)
    if _ends_with(rest, TopPLogitsWarper):
        sampling = replace(sampling, top_p=rest.pop().top_p)
    if _ends_with(rest, TopKLogitsWarper):
        sampling = replace(sampling, top_k=rest.pop().top_k)
    if _ends_with(rest, TemperatureLogitsWarper):
        sampling = replace(sampling, temperature=rest.pop().temperature)
    return sampling, rest


def _ends_with(processors: list[Any], kind: type) -> bool:
    """Return True if the last processor is a warper of this kind with default options."""
    if not processors or type(processors[-1]) is not kind:
        return False
    cut = getattr(processors[-1], "filter_value", -float("inf"))
    return (
        cut == -float("inf") and getattr(processors[-1], "min_tokens_to_keep", 1) == 1
    )


class RowProcessor(LogitsProcessor):
    """The processors of a batch, applied to row `b` alone. Its prompt has `prompt` tokens.

    The processors may use the number of rows and the padding. So they get a whole batch, and
    every row of it has the ids of row `b`.
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
        device = (
            self._padding.device
        )  # the library created the processors for this device
        row = torch.cat([self._padding, input_ids.to(device)], dim=1)
        ids: Any = row.repeat(self._rows, 1)
        processed = self._processors(ids, scores.to(device).repeat(self._rows, 1))
        return processed[self._b : self._b + 1].to(scores.device)


def limits_of(
    criteria: StoppingCriteriaList, ids_BP: Tensor, *, longest: int, context: int
) -> Limits:
    """Return the limits of the texts: length, EOS, and other criteria after every token.

    A length beyond the context is cut with a warning, because the cache is allocated for the
    whole length and `transformers serve` requests 1,024 tokens by default. Raises ValueError if
    the longest prompt, of `longest` tokens, fills the context.
    """
    new = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    new = max(1, new - ids_BP.shape[1])
    left = context - longest
    if left < 1:
        raise ValueError(
            f"input_ids must leave room in the model's context of {context} tokens, got "
            f"{longest}. Shorten the prompt."
        )
    if new > left:
        message = "max_new_tokens=%d exceeds the model's context: cut to %d"
        getLogger(__name__).warning(message, new, left)
    eos: list[Any] = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    rest = StoppingCriteriaList(
        c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
    )
    return Limits(
        min(new, left),
        {id for ids in eos for id in ids.tolist()},
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
    rows = [[*text, *[fill] * (n - len(text))] for text in texts]
    return torch.cat([ids_BP, ids_BP.new_tensor(rows)], 1)

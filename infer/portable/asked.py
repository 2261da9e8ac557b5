"""What Transformers' `generate` asks of a decoding method, in this decoder's terms, or refused.

B sequences, prompts of P columns, filled up on the left
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

WARPERS = ((TopPLogitsWarper, "top_p"), (TopKLogitsWarper, "top_k"), (TemperatureLogitsWarper, "temperature"))
# Their scores depend on the calls before, and sequences go on at paces of their own.
REMEMBERING = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
TOLD = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
LENGTHS = ("max_new_tokens", "max_length")  # arguments that say how long a text may become
HARMLESS = {"use_cache", "logits_to_keep"}  # they change what the library's forwards cost


def check_asked(
    config: GenerationConfig, processors: LogitsProcessorList, given: dict[str, Any], *, sequences: int
) -> None:
    """Raises ValueError, in a sentence, for what only the library's own decoding can do; `given` is what the
    model is to be fed beside ids, their mask and their positions.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refused(f"wanted greedy decoding or sampling, found what asks for {mode.value}")
    told = [name for name in TOLD if getattr(config, name, False)]
    if told:
        raise _refused(f"{told[0]}: wanted tokens alone, found {told[0]}=True")
    if config.cache_implementation:
        raise _refused(
            f"cache_implementation: wanted none beside the decoder's own, found {config.cache_implementation!r}"
        )
    remembering = [type(one).__name__ for one in processors if isinstance(one, REMEMBERING)]
    if remembering:
        raise _refused(f"logits_processor: wanted functions of ids and scores, found {remembering[0]}")
    if sequences > 1 and any(isinstance(one, PrefixConstrainedLogitsProcessor) for one in processors):
        raise _refused(f"prefix_allowed_tokens_fn: wanted one sequence with it, found {sequences}")
    further = [name for name, value in given.items() if value is not None and name not in HARMLESS]
    if further:
        raise _refused(f"{further[0]}: wanted a prompt of token ids alone, found it beside them")


def _refused(reason: str) -> ValueError:
    return ValueError(f"{reason} (transformers.GenerationMixin.generate(model, ...) is the library's own)")


def check_healing(asked: Mapping[str, Any], configs: Sequence[GenerationConfig]) -> None:
    """Raises ValueError where the arguments, or else these configs in their order, ask for token healing: the
    library does that before it decodes, with a tokenizer that it loses where it is given a callable.
    """
    said = (asked.get("token_healing"), *(config.token_healing for config in configs))
    if next((one for one in said if one is not None), False):
        raise _refused("token_healing: wanted none, found it asked for")


def asks_to_sample(config: GenerationConfig | None, default: GenerationConfig | None) -> bool:
    """Return whether a call's config has a temperature or top_p of its own, and nothing for do_sample.

    `transformers serve` makes such a config of a request. The library's own generate then decodes greedily and
    warns: a temperature of 0.8 changes nothing.
    """
    if config is None or config is default or config.do_sample is not None:
        return False
    return any(
        (value := getattr(config, name)) is not None and value != getattr(default, name, None)
        for name in ("temperature", "top_p")
    )


def within_context(limits: Limits, *, longest: int, context: int, explicit: bool) -> Limits:
    """Return limits whose new tokens behind the longest prompt fit into the model's context.

    Logs a warning where they did not.

    Raises ValueError where the caller gave the length as an argument (`explicit`), and for a prompt that fills
    the context. There the library goes on with a warning, and with learned positions fails in the middle of a
    text. This decoder's cache has its whole length from the start: one meant as "without end" would fill the
    memory. `transformers serve` asks for 1,024 new tokens where a request names no number.
    """
    new, left = limits.max_new_tokens, context - longest
    if new <= left:
        return limits
    if explicit or left < 1:
        raise _refused(
            f"max_new_tokens (max_length): wanted the prompt and the new tokens within the model's context of "
            f"{context}, found {longest} + {new}"
        )
    getLogger(__name__).warning(
        "max_new_tokens=%d behind a prompt of %d tokens exceeds the model's context of %d: "
        "the text ends after %d",
        new,
        longest,
        context,
        left,
    )
    return replace(limits, max_new_tokens=left)


def whole(name: str, value: Any) -> int:
    """An argument that is to be a whole number, of whatever library. Raises ValueError, naming it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name}: wanted a whole number, found {value!r}") from None


def prompts_of(ids_BP: Tensor, mask_BP: Tensor | None, positions_BP: Tensor | None) -> list[list[int]]:
    """Each sequence's ids without what fills it up.

    Raises ValueError where there are none, where that does not stand on the left, or positions are not counted
    from 0 on.
    """
    if not ids_BP.numel():
        raise ValueError(f"input_ids: wanted at least one token, found the shape {tuple(ids_BP.shape)}")
    attended = torch.ones_like(ids_BP) if mask_BP is None else (mask_BP != 0).long()
    first_B1 = attended.argmax(1, keepdim=True)  # of a row without any 1 it is 0, which is told below
    places = torch.arange(ids_BP.shape[1], device=ids_BP.device) - first_B1
    if attended.shape != ids_BP.shape or not torch.equal(attended.bool(), places >= 0):
        raise ValueError(
            "attention_mask: wanted a 1 for each token of a prompt and zeros before them alone "
            "(padding_side='left'), found others"
        )
    if positions_BP is not None:
        counted = positions_BP.to(places.device).expand_as(places)
        if not torch.equal(counted[places >= 0], places[places >= 0]):
            raise ValueError("position_ids: wanted none, or those from 0 on in each prompt, found others")
    return [row[first:] for row, (first,) in zip(ids_BP.tolist(), first_B1.tolist())]


def sampling_of(processors: LogitsProcessorList, *, sample: bool) -> tuple[Sampling, LogitsProcessorList]:
    """The last processors as far as the pick does the same (temperature, then top_k, then top_p), and those
    before them.
    """
    if not sample:
        return GREEDY, processors
    rest, found = LogitsProcessorList(processors), dict[str, Any]()
    for kind, name in WARPERS:
        if rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            found[name] = getattr(rest.pop(), name)
    return Sampling(**{"temperature": 1.0, **found}), rest


def _is_plain(warper: Any) -> bool:
    cuts = getattr(warper, "filter_value", -float("inf")) == -float("inf")
    return cuts and getattr(warper, "min_tokens_to_keep", 1) == 1


def row_processors(processors: LogitsProcessorList, ids_BP: Tensor, b: int, *, prompt: int) -> Any:
    """The library's processors for the sequence `b`, whose prompt has so many tokens, if there are any."""
    fill = ids_BP[b : b + 1, : ids_BP.shape[1] - prompt]
    return LogitsProcessorList([RowProcessor(processors, b, len(ids_BP), fill)]) if processors else None


class RowProcessor(LogitsProcessor):
    """Processors of a whole batch, applied to one of its rows.

    They may count on the batch's number of rows (the repetition penalty does) and on what fills them
    up (min_length does): so they see it, with this row's ids in the place of every other's.
    """

    def __init__(self, processors: LogitsProcessorList, b: int, rows: int, fill_1p: Tensor) -> None:
        self._processors, self._b, self._rows, self._fill = processors, b, rows, fill_1p

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """(1, n) ids and (1, V) scores in, (1, V) out."""
        device = self._fill.device  # the prompt's, for which the library made them
        ids: Any = torch.cat([self._fill, input_ids.to(device)], dim=1).repeat(self._rows, 1)
        found = self._processors(ids, scores.to(device).repeat(self._rows, 1))
        return found[self._b : self._b + 1].to(scores.device)


def limits_of(criteria: StoppingCriteriaList, ids_BP: Tensor) -> Limits:
    """When a text ends. The loop watches ids and lengths; other criteria are asked after every token."""
    most = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria) - ids_BP.shape[1]
    ends: list[Any] = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    rest = StoppingCriteriaList(
        one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
    )
    eos = {id for some in ends for id in some.tolist()}
    return Limits(max(1, most), eos, (lambda b: _stop(rest, ids_BP[b : b + 1])) if rest else None)


def _stop(criteria: StoppingCriteriaList, ids_1n: Any) -> Stop:
    def stops(token: int) -> bool:
        nonlocal ids_1n
        ids_1n = torch.cat([ids_1n, ids_1n.new_tensor([[token]])], dim=1)
        return bool(criteria(ids_1n, None).all())

    return stops


def padded(ids_BP: Tensor, texts: Sequence[Sequence[int]], pad: Tensor | None) -> Tensor:
    """(B, P + n) prompts and texts; a text that ended before the longest is filled up on the right."""
    n, fill = max(map(len, texts)), 0 if pad is None else int(pad)
    return torch.cat([ids_BP, ids_BP.new_tensor([[*text, *[fill] * (n - len(text))] for text in texts])], 1)

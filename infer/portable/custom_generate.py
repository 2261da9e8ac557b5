"""SDSAT as `model.generate`: what the folder custom_generate/ of a model directory runs, by Transformers alone.

    model.generate(**inputs, max_new_tokens=256, custom_generate=DIR, trust_remote_code=True)

The library does all that it does before it decodes: it merges the generation config, validates every
argument, repeats prompts for num_return_sequences, and makes its processors and criteria. Decoding itself
is this project's loop. train/export/bundle.py writes this module and those that it imports into that
folder, so none of them may need more than Transformers, PyTorch and NumPy.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from conf.errors import UserError
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy, check_probes
from infer.drafters.places import SOURCES
from infer.engine.forward import context_length
from infer.engine.reading import Request
from infer.engine.sampling import SEEDS, Sampling
from infer.loop import Drafters, Limits, decode
from infer.ngrams import Ngrams, NgramTable, NgramWeights
from infer.portable.asked import (
    LENGTHS,
    asks_to_sample,
    check_asked,
    check_healing,
    limits_of,
    padded,
    prompts_of,
    row_processors,
    sampling_of,
    whole,
    within_context,
)
from infer.portable.kept import Kept, kept_for

PROBES = ("auto", "root", "all")


@dataclass(frozen=True)
class Drafting:
    """The adaptive tokens of a model, and how a call wants to draft with them."""

    ids: Sequence[int]
    k: int  # drafts in a row
    given: bool  # by the call; else it is the training's
    probes: str | int  # under which drafts: "auto", "root", "all" or a number
    sources: frozenset[str]
    weights: NgramWeights
    has_table: bool  # the export had a table of n-grams
    gated: bool  # the adapter beside the weights acts on adaptive tokens alone
    seed: int | None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        L: int,
        ngrams: Mapping[str, Any] | None,
        gated: bool,
        k: Any,
        probes: Any,
        sources: Any,
        seed: Any,
    ) -> "Drafting":
        """By a call's arguments, of any type, and what adaptive.json says of n-grams.

        Raises ValueError, naming the argument, for what cannot be.
        """
        weights = NgramWeights() if ngrams is None else NgramWeights.from_json(ngrams)
        has_table = ngrams is not None and ngrams["table"] is not None
        given, k = k is not None, whole("k", L if k is None else k)
        check_probes(ids, k)
        if seed is not None and not 0 <= (seed := whole("seed", seed)) < SEEDS:
            raise ValueError(f"seed: wanted a number of up to 63 bits, found {seed}")
        probes = "auto" if probes is None else probes
        if not isinstance(probes, str):
            probes = whole("probes", probes)
        if probes not in PROBES and (isinstance(probes, str) or probes < 1):
            raise ValueError(f"probes: wanted auto, root, all or a number of nodes from 1 on, found {probes!r}")
        sources = list(SOURCES) if sources is None else sources
        if isinstance(sources, str) or not sources or not set(sources) <= set(SOURCES):
            raise ValueError(f"sources must be some of {', '.join(SOURCES)}, got {sources!r}")
        return cls(ids, k, given, probes, frozenset(sources), weights, has_table, gated, seed)

    @property
    def automatic(self) -> bool:
        """Whether measurements decide how much is drafted; k bounds it then."""
        return self.probes == "auto"

    def policy(self, kept: Kept, *, batch: int, capacity: int, sampling: Sampling) -> Policy:
        """How much is drafted, and where."""
        if self.automatic:
            texts: Any = {"batch": batch, "capacity": capacity, "sampling": sampling}
            return kept.policy(self.k if "adaptive" in self.sources else 0, self.sources, **texts)
        return FixedPolicy(self.k, self.probes)

    def drafters(self, policy: Policy, table: NgramTable | None, vocabulary: int) -> Drafters:
        """Those of each sequence."""
        table = table if "ngrams" in self.sources else None
        text = "text" in self.sources
        ngrams = Ngrams(table, vocabulary, text=text, weights=self.weights) if table or text else None
        ids = self.ids if "adaptive" in self.sources else ()
        return Drafters(partial(AdaptiveDrafter, ids, policy, ngrams))

    def within(self, left: int) -> "Drafting":
        """No more drafts in a row than the context has room for; measurements draft less in any case.

        Raises ValueError where more were asked for.
        """
        if self.k <= left or self.automatic:
            return self
        if self.given:
            raise ValueError(f"k: wanted at most the {left} tokens that the context has left, found {self.k}")
        return replace(self, k=left)

    def seeds(self, sampling: Sampling, sequences: int) -> list[int]:
        """Another one for each sequence. Where none is given PyTorch's generator decides, as over the
        library's draws: two calls differ, and `set_seed` repeats them.
        """
        if not sampling.temperature:
            return [0] * sequences
        first = int(torch.randint(SEEDS - 1, ())) if self.seed is None else self.seed
        return [(first + b) % SEEDS for b in range(sequences)]


def generate(
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    adaptive_ids: Sequence[int],
    L: int,
    ngrams: Mapping[str, Any] | None = None,
    gated: bool = False,
    k: int | None = None,
    probes: str | int | None = None,
    sources: Collection[str] | None = None,
    seed: int | None = None,
    custom_generate: Any = None,
    **asked: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Arguments and result of the library's `generate`, greedy and sampled; and these of its own:

    k       drafts in a row, at most: by default L of training; no more than there are diverse tokens
    probes  under which drafts the next are made: "auto" (by measurement: seconds, once for each batch, length
            and kind of sampling), "root" (the paper's two forwards in turn), "all" (one forward), or a number
    sources of drafts: some of "adaptive", "text" (n-grams of the text so far) and "ngrams" (of the training
            data, from ngrams.safetensors beside the weights); by default all that there are
    seed    of the draws; the same one gives the same text, whatever is drafted. Sequence b has seed + b.
            By default PyTorch's generator decides, so that `set_seed` repeats a text.

    The tokens are those of decoding without drafts; in bfloat16 and float16 up to near-ties. Logits processors
    are to be functions of the ids and scores alone: of several sequences each goes on at its own pace.
    A temperature or top_p in `generation_config` samples where do_sample is not set, as in requests to
    `transformers serve`; a length in it that leads beyond the context ends there.
    Raises ValueError for what it cannot do, such as beams or, as an argument, a length beyond the context (the
    library warns).
    """
    library: Any = partial(GenerationMixin.generate, model, inputs, generation_config)  # type: ignore[arg-type]
    if custom_generate is not None:  # where `model.generate` is this function, and another is wanted
        own = {"k": k, "probes": probes, "sources": sources, "seed": seed}
        given = {name: value for name, value in own.items() if value is not None}
        return library(custom_generate=custom_generate, **asked, **given)
    if asked.get("assistant_model") is not None or asked.get("past_key_values") is not None:
        raise ValueError("assistant_model, past_key_values: wanted none, since this model drafts by itself")
    drafting = Drafting.of(adaptive_ids, L, ngrams, gated, k, probes, sources, seed)
    configs = [one for one in (generation_config, model.generation_config) if one]
    check_healing(asked, configs)
    _take_stop_strings(asked, configs)
    if "do_sample" not in asked and asks_to_sample(generation_config, model.generation_config):
        asked["do_sample"] = True
    # The library gives a streamer the prompt, and keeps it from a callable.
    decoder = partial(_decode, drafting=drafting, streamer=asked.get("streamer"), given=frozenset(asked))
    return library(custom_generate=decoder, **asked)


def _take_stop_strings(asked: dict[str, Any], configs: Sequence[GenerationConfig]) -> None:
    """A tokenizer and stop strings become a criterion: the library loses the tokenizer where it is given a
    callable, and then asks for one.
    """
    tokenizer, sources = asked.pop("tokenizer", None), (config.stop_strings for config in configs)
    strings = next((some for some in (asked.get("stop_strings"), *sources) if some), None)
    if strings and tokenizer is not None:
        criteria = [*(asked.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        asked.update(stop_strings=None, stopping_criteria=StoppingCriteriaList(criteria))


def _decode(
    lm: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafting: Drafting,
    streamer: BaseStreamer | None,
    given: frozenset[str],
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method as the library calls it: prompts (B, P) in, (B, P + n) out; `given` names the user's
    arguments.

    No parameter may have the name of anything that the library prepares, such as attention_mask: what a
    callable names itself is handed to it past all preparation.
    """
    B = len(input_ids)
    mask, positions = (prepared.pop(name, None) for name in ("attention_mask", "position_ids"))
    beside = {name: value for name, value in prepared.items() if name in given}
    check_asked(generation_config, logits_processor, beside, sequences=B)
    prompts, limits = prompts_of(input_ids, mask, positions), limits_of(stopping_criteria, input_ids)
    pad: Any = generation_config._pad_token_tensor
    context = context_length(lm.config)
    explicit = not given.isdisjoint(LENGTHS)
    limits = within_context(limits, longest=max(map(len, prompts)), context=context, explicit=explicit)
    drafting = drafting.within(context - max(map(len, prompts)))
    _check_together(lm, drafting, limits, pad, streamer, sequences=B)
    sampling, processors = sampling_of(logits_processor, sample=generation_config.do_sample)
    requests = [
        Request(prompt, seed, row_processors(processors, input_ids, b, prompt=len(prompt)))
        for b, (prompt, seed) in enumerate(zip(prompts, drafting.seeds(sampling, B)))
    ]
    try:
        texts = _texts(lm, requests, limits, sampling, drafting, streamer)
    except UserError as error:  # a sentence already
        raise ValueError(str(error)) from error
    sequences = padded(input_ids, texts, pad)
    told = generation_config.return_dict_in_generate
    return GenerateDecoderOnlyOutput(sequences=sequences) if told else sequences  # type: ignore[arg-type]


def _check_together(
    lm: PreTrainedModel,
    drafting: Drafting,
    limits: Limits,
    pad: Tensor | None,
    streamer: BaseStreamer | None,
    *,
    sequences: int,
) -> None:
    """Raises ValueError for what several sequences cannot have, and for another model's adaptive tokens."""
    if streamer is not None and sequences > 1:
        raise ValueError(f"streamer: wanted one sequence with it, found {sequences}")
    if sequences > 1 and limits.stop and pad is None:
        raise ValueError(
            f"pad_token_id: wanted one for {sequences} sequences with stopping_criteria, found none"
        )
    last, rows = max(drafting.ids), lm.config.vocab_size
    if last >= rows:
        raise ValueError(f"model: wanted the one of these adaptive tokens, found no id {last} among its {rows}")


def _texts(
    lm: PreTrainedModel,
    requests: Sequence[Request],
    limits: Limits,
    sampling: Sampling,
    drafting: Drafting,
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """The new tokens of each sequence."""
    texts = [list[int]() for _ in requests]
    capacity = max(len(request.prompt) for request in requests) + limits.max_new_tokens
    kept = kept_for(lm, has_table=drafting.has_table, gated=drafting.gated)
    policy = drafting.policy(kept, batch=len(requests), capacity=capacity, sampling=sampling)
    drafters = drafting.drafters(policy, kept.table, lm.config.get_text_config().vocab_size)
    runner = kept.runners.take(batch=len(requests), capacity=capacity, max_rows=drafters.max_rows)
    for steps in decode(runner, requests, drafters, limits, sampling):
        for step in steps:
            texts[step.sequence] += step.tokens
            for token in step.tokens if streamer else ():
                streamer.put(torch.tensor([token]))  # type: ignore[union-attr]
    kept.runners.give(runner)
    if streamer:
        streamer.end()
    return texts

"""SDSAT as `model.generate`: what custom_generate/ of a model directory runs, with Transformers alone.

    model.generate(**inputs, max_new_tokens=256, custom_generate=DIR, trust_remote_code=True)

The library prepares as always: it merges the generation config, validates arguments, repeats prompts for
num_return_sequences, and creates processors and criteria. Decoding itself is this project's loop.
train/export/sidecars.py copies this module and those that it imports into that folder, so none of them may need
more than Transformers, PyTorch and NumPy.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, proxy

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
from transformers.utils.hub import cached_file

from conf.errors import UserError
from infer.drafters.adaptive import AdaptiveDrafter, FixedPolicy, Policy, check_probes
from infer.drafters.auto import Policies
from infer.drafters.costs import prior_costs
from infer.drafters.places import SOURCES
from infer.engine.attention import view_of
from infer.engine.families import check_family, check_tree
from infer.engine.forward import addresses_of, context_length, shares
from infer.engine.output import Request
from infer.engine.runner import Runners
from infer.engine.sampling import SEEDS, Sampling
from infer.loop import Drafters, Limits, decode
from infer.models.gated import CONFIG, FOLDER, WEIGHTS, gated_layers
from infer.ngrams import ABSENT, FILE, Ngrams, NgramTable, NgramWeights
from infer.portable.generate_args import (
    LENGTHS,
    RowProcessor,
    check_supported,
    first_set,
    implies_sampling,
    limits_of,
    padded,
    prompts_of,
    sampling_of,
    whole_number,
    within_context,
)

PROBES = ("auto", "root", "all")


@dataclass
class ModelState:
    """What one call leaves for the next: a runner's graphs, and what was measured and learned.

    It may refer to the model only weakly: `lm` is a proxy or, with a gated adapter, a view of the same weights.
    """

    addresses: Hashable  # of the model's tensors
    lm: PreTrainedModel
    runners: Runners
    table: NgramTable | None
    policies: Policies = field(default_factory=Policies)


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()
_lock = Lock()  # or two threads create a state each, and both measure


def state_of(
    lm: PreTrainedModel, *, has_table: bool = False, gated: bool = False
) -> ModelState:
    """Return a model's state, a new one if the model was moved: a graph has the addresses of its weights.

    A missing n-gram table that the export had (`has_table`) is logged once. Raise UserError for an unsupported
    family or a missing `gated` adapter, ValueError for several devices or a model that keeps no cache.
    """
    if lm.training and lm.is_gradient_checkpointing:
        strange = "training with gradient checkpointing, which keeps no cache"
        raise ValueError(
            f"model must be in evaluation, got {strange}. Call model.eval() first."
        )
    addresses = addresses_of(lm)
    with _lock:
        state = _states.get(lm)
        if state is None or state.addresses != addresses:
            devices = sorted({str(parameter.device) for parameter in lm.parameters()})
            if len(devices) > 1 or "meta" in devices:
                raise ValueError(
                    f"model must be on one device, got {', '.join(devices)}"
                )
            if shares(lm) > 1:
                raise ValueError(f"model must be in one process, got {shares(lm)}")
            check_family(lm.config)
            check_tree(lm)
            decoding: Any = (
                view_of(lm, gated_layers(lm, _adapter_of(lm))) if gated else proxy(lm)
            )
            # Graphs stay valid; another library's layers (adapters, quantized weights) may change.
            modules = (type(module).__module__.split(".")[0] for module in lm.modules())
            runners = Runners(
                decoding,
                static=None if set(modules) <= {"torch", "transformers"} else False,
            )
            table = state.table if state else _find_table(lm, expected=has_table)
            state = _states[lm] = ModelState(addresses, decoding, runners, table)
        return state


def _find_table(lm: PreTrainedModel, *, expected: bool) -> NgramTable | None:
    path = _file_of(lm, FILE)
    if path is not None:
        return NgramTable(path, lm.config.get_text_config().vocab_size)
    if expected:
        getLogger(__name__).warning(ABSENT, Path(lm.name_or_path or "") / FILE)
    return None


def _adapter_of(lm: PreTrainedModel) -> Path:
    files = [_file_of(lm, f"{FOLDER}/{name}") for name in (CONFIG, WEIGHTS)]
    if None in files:
        there = f"{lm.name_or_path or 'no name'} and no {FOLDER}/ there"
        load = "Load the model from the directory or repository that has it."
        raise UserError(
            f"model must have come with its gated adapter, got {there}. {load}"
        )
    return files[0].parent  # type: ignore[union-attr]


def _file_of(lm: PreTrainedModel, file: str) -> Path | None:
    """Return a file of the directory, or of the hub's repository and commit, that a model came from."""
    name = lm.name_or_path
    if not name or (Path(name) / file).is_file():
        return Path(name) / file if name else None
    try:
        cached = cached_file(
            name, file, revision=getattr(lm.config, "_commit_hash", None)
        )
    except OSError:  # no such file, repository, or network
        return None
    return Path(cached) if cached else None


@dataclass(frozen=True)
class Drafting:
    """The adaptive tokens of a model, and how a call drafts with them."""

    ids: Sequence[int]
    k: int  # drafts in a row
    explicit: bool  # k is the call's, not the training's
    probes: str | int  # under which drafts: one of PROBES or a number
    sources: frozenset[str]
    weights: NgramWeights
    seed: int | None

    def policy(
        self, state: ModelState, *, batch: int, capacity: int, sampling: Sampling
    ) -> Policy:
        """Return how much is drafted, and where; with "auto" by measurement."""
        if self.probes != "auto":
            return FixedPolicy(self.k, self.probes)
        k = self.k if "adaptive" in self.sources else 0
        prior = prior_costs(state.lm.device.type)
        return state.policies.auto(
            k,
            self.sources,
            batch=batch,
            capacity=capacity,
            sampling=sampling,
            load=lambda: [prior],
        )

    def drafters(
        self, policy: Policy, table: NgramTable | None, vocabulary: int
    ) -> Drafters:
        """Return the drafters of all sequences."""
        table = table if "ngrams" in self.sources else None
        text = "text" in self.sources
        ngrams = (
            Ngrams(table, vocabulary, text=text, weights=self.weights)
            if table or text
            else None
        )
        ids = self.ids if "adaptive" in self.sources else ()
        return Drafters(partial(AdaptiveDrafter, ids, policy, ngrams))

    def within(self, left: int) -> "Drafting":
        """Limit k to the room `left` in the context. Raise ValueError if the call itself gave more."""
        if (
            self.k <= left or self.probes == "auto"
        ):  # measurement drafts less in any case
            return self
        if self.explicit:
            raise ValueError(
                f"k must be at most the {left} tokens left in the context, got {self.k}"
            )
        return replace(self, k=left)

    def seeds(self, sampling: Sampling, sequences: int) -> list[int]:
        """Return a seed per sequence, by default from PyTorch's generator: `set_seed` repeats them."""
        if not sampling.temperature:
            return [0] * sequences
        first = int(torch.randint(SEEDS - 1, ())) if self.seed is None else self.seed
        return [(first + b) % SEEDS for b in range(sequences)]


def drafting_of(
    ids: Sequence[int],
    L: int,
    ngrams: Mapping[str, Any] | None,
    k: Any,
    probes: Any,
    sources: Any,
    seed: Any,
) -> Drafting:
    """Return a call's drafting, from arguments of any type and adaptive.json's n-grams. Raise ValueError."""
    explicit = k is not None
    k = whole_number("k", L if k is None else k)
    check_probes(ids, k)
    if seed is not None and not 0 <= (seed := whole_number("seed", seed)) < SEEDS:
        raise ValueError(f"seed must be a number of up to 63 bits, got {seed}")
    probes = "auto" if probes is None else probes
    if not isinstance(probes, str):
        probes = whole_number("probes", probes)
    if probes not in PROBES and (isinstance(probes, str) or probes < 1):
        raise ValueError(
            f"probes must be auto, root, all or a number of nodes of at least 1, got {probes!r}"
        )
    sources = list(SOURCES) if sources is None else sources
    if isinstance(sources, str) or not sources or not set(sources) <= set(SOURCES):
        raise ValueError(
            f"sources must be some of {', '.join(SOURCES)}, got {sources!r}"
        )
    weights = NgramWeights() if ngrams is None else NgramWeights.from_json(ngrams)
    return Drafting(ids, k, explicit, probes, frozenset(sources), weights, seed)


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
    **args: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode as the library's `generate`, greedily or by sampling. Own arguments:

    k       drafts in a row, at most: by default L of training; no more than there are diverse tokens
    probes  under which drafts the next are made: "auto" (by measurement: seconds, once for each batch, length
            and kind of sampling), "root" (the paper's two forwards in turn), "all" (one forward), or a number
    sources of drafts: some of "adaptive", "text" (n-grams of the text so far) and "ngrams" (of the training
            data, from ngrams.safetensors beside the weights); by default all that there are
    seed    of sampling: the same seed gives the same text, whatever is drafted. Sequence b has seed + b.
            By default from PyTorch's generator, so that `set_seed` repeats a text.

    The tokens are those of decoding without drafts; in bfloat16 and float16 up to near-ties. Logits processors
    must be functions of ids and scores: each sequence advances at its own pace. A temperature or top_p in
    `generation_config` implies do_sample, as in requests to `transformers serve`; a length in it is cut at the
    context. Raise ValueError for what is not supported, such as beams or a length argument beyond the context.
    """
    library: Any = partial(GenerationMixin.generate, model, inputs, generation_config)  # type: ignore[arg-type]
    if (
        custom_generate is not None
    ):  # another decoder, given to a `model.generate` that is this function
        own = {"k": k, "probes": probes, "sources": sources, "seed": seed}
        args |= {name: value for name, value in own.items() if value is not None}
        return library(custom_generate=custom_generate, **args)
    for name in ("assistant_model", "past_key_values"):
        if args.get(name) is not None:
            raise ValueError(
                f"{name} must be None, got a value: this model drafts by itself"
            )
    drafting = drafting_of(adaptive_ids, L, ngrams, k, probes, sources, seed)
    # Given a callable, the library loses the tokenizer that these two need.
    configs = (generation_config, model.generation_config)
    tokenizer = args.pop("tokenizer", None)
    if first_set("token_healing", args, configs):
        raise ValueError("token_healing must be False, got True")
    strings = first_set("stop_strings", args, configs)
    if strings and tokenizer is not None:
        criteria = [
            *(args.get("stopping_criteria") or ()),
            StopStringCriteria(tokenizer, strings),
        ]
        args |= {
            "stop_strings": None,
            "stopping_criteria": StoppingCriteriaList(criteria),
        }
    if "do_sample" not in args and implies_sampling(
        generation_config, model.generation_config
    ):
        args["do_sample"] = True
    # The library gives a streamer the prompt, but does not pass it to a callable.
    decoder = partial(
        _decode,
        drafting=drafting,
        find_state=partial(
            state_of,
            has_table=ngrams is not None and ngrams["table"] is not None,
            gated=gated,
        ),
        streamer=args.get("streamer"),
        given=frozenset(args),
    )
    return library(custom_generate=decoder, **args)


def _decode(
    lm: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafting: Drafting,
    find_state: Callable[[PreTrainedModel], ModelState],
    streamer: BaseStreamer | None,
    given: frozenset[str],
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode (B, P) prompts to (B, P + n) ids, as the library calls a decoding method.

    `given` names the caller's arguments. No parameter may be named like anything that the library prepares,
    such as attention_mask: the library would pass the caller's value unprepared.
    """
    B = len(input_ids)
    rows = lm.config.vocab_size
    context = context_length(lm.config)
    mask, positions = (
        prepared.pop(name, None) for name in ("attention_mask", "position_ids")
    )
    further = {name: value for name, value in prepared.items() if name in given}
    check_supported(generation_config, logits_processor, further, sequences=B)
    prompts = prompts_of(input_ids, mask, positions)
    longest = max(map(len, prompts))
    explicit = not given.isdisjoint(LENGTHS)
    limits = limits_of(stopping_criteria, input_ids)
    limits = within_context(limits, longest=longest, context=context, explicit=explicit)
    drafting = drafting.within(context - longest)
    pad: Any = generation_config._pad_token_tensor
    if streamer is not None and B > 1:
        raise ValueError(f"streamer must have one sequence, got {B}")
    if B > 1 and limits.stop and pad is None:
        raise ValueError(
            f"pad_token_id must be set for {B} sequences with stopping_criteria, got None"
        )
    if max(drafting.ids) >= rows:
        raise ValueError(
            f"model must have the adaptive id {max(drafting.ids)}, got {rows} ids"
        )
    sampling, processors = sampling_of(
        logits_processor, sample=generation_config.do_sample
    )
    seeds = drafting.seeds(sampling, B)
    requests = []
    for b, prompt in enumerate(prompts):
        row: Any = [RowProcessor(processors, input_ids, b, prompt=len(prompt))]
        requests.append(
            Request(prompt, seeds[b], LogitsProcessorList(row) if processors else None)
        )
    try:
        texts = _texts(find_state(lm), requests, limits, sampling, drafting, streamer)
    except UserError as error:
        raise ValueError(str(error)) from error
    sequences = padded(input_ids, texts, pad)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _texts(
    state: ModelState,
    requests: Sequence[Request],
    limits: Limits,
    sampling: Sampling,
    drafting: Drafting,
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    texts = [list[int]() for _ in requests]
    capacity = max(len(request.prompt) for request in requests) + limits.max_new_tokens
    policy = drafting.policy(
        state, batch=len(requests), capacity=capacity, sampling=sampling
    )
    drafters = drafting.drafters(
        policy, state.table, state.lm.config.get_text_config().vocab_size
    )
    runner = state.runners.take(
        batch=len(requests), capacity=capacity, max_rows=drafters.max_rows
    )
    for steps in decode(runner, requests, drafters, limits, sampling):
        for step in steps:
            texts[step.sequence] += step.tokens
            for token in step.tokens if streamer else ():
                streamer.put(torch.tensor([token]))  # type: ignore[union-attr]
    state.runners.give(runner)
    if streamer:
        streamer.end()
    return texts

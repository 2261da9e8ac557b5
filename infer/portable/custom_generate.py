"""The `generate` of custom_generate/ in a model directory. It needs only Transformers.

    model.generate(**inputs, max_new_tokens=256, custom_generate=DIR, trust_remote_code=True)

Transformers prepares the call as usual: it merges the generation config, validates
arguments, repeats prompts for num_return_sequences, and creates processors and criteria.
The decoding loop is this project's. train/export/sidecars.py copies this module and its
imports into the directory. So they may import only Transformers, PyTorch and NumPy.
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

from conf.adapter import CONFIG, FOLDER, HEAD, WEIGHTS
from conf.errors import UserError
from infer.config import DecodeConfig
from infer.drafters.planner import MeasuredPlanner, remember_planners
from infer.engine.attention import view_of
from infer.engine.families import check_family, check_tree
from infer.engine.forward import addresses_of, context_length, shares
from infer.engine.output import Request
from infer.engine.runner import Runners
from infer.engine.sampling import SEEDS, Sampling
from infer.loop import Limits, decode
from infer.methods import Methods
from infer.models.gated import NO_HEAD, gated_layers, read_head
from infer.ngrams import ABSENT, FILE, NgramTable, NgramWeights
from infer.portable.generate_args import (
    RowProcessor,
    check_arguments,
    check_supported,
    implies_sampling,
    limits_of,
    padded,
    prompts_of,
    sampling_of,
)
from infer.trees.mask_tokens import MaskTokens, mask_tokens


@dataclass
class ModelState:
    """The state of a model between calls: runners with CUDA graphs, and planners.

    A strong reference to the model would prevent it from being freed. So `lm` is a weak proxy
    or, with a gated adapter, a view of the same weights.
    """

    addresses: Hashable  # of the model's tensors
    lm: PreTrainedModel
    runners: Runners
    table: NgramTable | None
    planners: Callable[..., MeasuredPlanner] = field(default_factory=remember_planners)


_states: WeakKeyDictionary[PreTrainedModel, ModelState] = WeakKeyDictionary()
_lock = Lock()  # so that two threads do not create two states


def state_of(
    lm: PreTrainedModel,
    *,
    has_table: bool = False,
    gated: bool = False,
    has_head: bool = False,
) -> ModelState:
    """Return a model's state. It is new if weights have moved, since CUDA graphs have addresses.

    `has_table` and `has_head` say that the export had an n-gram table and a previous-token
    head; a missing file is logged once. Raises UserError for an unsupported family or a
    missing `gated` adapter, and ValueError for several devices or a model without a cache.
    """
    if lm.training and lm.is_gradient_checkpointing:
        raise ValueError(
            "model must be in evaluation mode, got training with gradient checkpointing, which "
            "disables the cache. Call model.eval() first."
        )
    addresses = addresses_of(lm)
    with _lock:
        state = _states.get(lm)
        if state is None or state.addresses != addresses:
            _check_model(lm)
            decoding: Any = proxy(lm)
            if gated:
                decoding = _gated_view(lm, has_head=has_head and state is None)
            # A CUDA graph would miss changes in another library's layers, such as switched
            # adapters or quantized weights.
            modules = (type(module).__module__.split(".")[0] for module in lm.modules())
            own = set(modules) <= {"torch", "transformers"}
            runners = Runners(decoding, static=None if own else False)
            table = state.table if state else _find_table(lm, expected=has_table)
            state = ModelState(addresses, decoding, runners, table)
            _states[lm] = state
        return state


def _check_model(lm: PreTrainedModel) -> None:
    devices = sorted({str(parameter.device) for parameter in lm.parameters()})
    if len(devices) > 1 or "meta" in devices or shares(lm) > 1:
        raise ValueError(
            "model must be on one device and in one process, got devices "
            f"{', '.join(devices)} and {shares(lm)} processes."
        )
    check_family(lm.config)
    check_tree(lm)


def _gated_view(lm: PreTrainedModel, *, has_head: bool) -> Any:
    """Return a view of the model with its adapter; with `has_head` an absent head is logged."""
    view: Any = view_of(lm, gated_layers(lm, _adapter_of(lm)))
    if head := _file_of(lm, f"{FOLDER}/{HEAD}"):
        view.previous_token_head = read_head(view, head)
    elif has_head:
        name = Path(lm.name_or_path or "") / FOLDER / HEAD
        getLogger(__name__).warning(NO_HEAD, name)
    return view


def _find_table(lm: PreTrainedModel, *, expected: bool) -> NgramTable | None:
    path = _file_of(lm, FILE)
    if path is not None:
        return NgramTable(path, lm.config.get_text_config().vocab_size)
    if expected:
        getLogger(__name__).warning(ABSENT, Path(lm.name_or_path or "") / FILE)
    return None


def _adapter_of(lm: PreTrainedModel) -> Path:
    config = _file_of(lm, f"{FOLDER}/{CONFIG}")
    weights = _file_of(lm, f"{FOLDER}/{WEIGHTS}")
    if config is None or weights is None:
        raise UserError(
            f"model must have its gated adapter, got no {FOLDER}/ in "
            f"{lm.name_or_path or 'a model without a name'}. Load the model from the "
            f"directory or repository with {FOLDER}/."
        )
    return weights.parent


def _file_of(lm: PreTrainedModel, file: str) -> Path | None:
    """Return the path of a file in the model's directory, or in its repository at its commit."""
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
    """The adaptive tokens of a model (`mask`), and the settings of a call.

    Without a `seed` it is drawn from PyTorch's generator, so that `set_seed` repeats a text.
    """

    mask: MaskTokens
    L: int
    decode: DecodeConfig
    weights: NgramWeights
    seed: int | None

    def seeds(self, sampling: Sampling, sequences: int) -> list[int]:
        """Return a seed per sequence."""
        if not sampling.temperature:
            return [0] * sequences
        first = int(torch.randint(SEEDS - 1, ())) if self.seed is None else self.seed
        return [(first + b) % SEEDS for b in range(sequences)]


def generate(
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    L: int,
    adaptive_ids: Sequence[int] = (),
    noise: bool = False,
    ngrams: Mapping[str, Any] | None = None,
    gated: bool = False,
    head: bool = False,
    k: int | None = None,
    probes: str | int | None = None,
    sources: Collection[str] | None = None,
    seed: int | None = None,
    custom_generate: Any = None,
    **args: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode as Transformers' `generate`, greedily or by sampling. Additional arguments:

    k        maximum number of adaptive tokens in a row, by default L. It must not exceed the
             number of diverse tokens
    probes   drafts that get adaptive tokens for the next step: "auto" (by measured costs),
             "root" (the paper's two forwards in turn), "all" (one forward), or a number
    sources  sources of drafts among "adaptive", "text" (n-grams of the text so far) and
             "ngrams" (n-grams of the training data); by default all available sources
    seed     seed of sampling; the same seed gives the same text, whatever is drafted. Sequence
             b has seed + b. By default it is drawn from PyTorch's generator (`set_seed`)

    The tokens equal the tokens of decoding without drafts, in bfloat16 and float16 up to
    near-ties. Logits processors must be functions of ids and scores, because each sequence
    advances at its own pace. A temperature or top_p in `generation_config` implies
    do_sample, as in requests to `transformers serve`. A length beyond the context is cut.
    Raises ValueError for unsupported arguments, such as beams.
    """
    library: Any = partial(GenerationMixin.generate, model, inputs, generation_config)  # type: ignore[arg-type]
    if (
        custom_generate is not None
    ):  # the caller passed it, and model.generate is this function
        own = {"k": k, "probes": probes, "sources": sources, "seed": seed}
        args |= {name: value for name, value in own.items() if value is not None}
        answer: Tensor | GenerateDecoderOnlyOutput
        answer = library(custom_generate=custom_generate, **args)
        return answer
    mask = _mask_of(model, adaptive_ids, noise=noise)
    settings = _settings_of(k, probes, sources, seed)
    mask.check(settings.k or L)
    weights = NgramWeights() if ngrams is None else NgramWeights.from_json(ngrams)
    drafting = Drafting(mask, L, settings, weights, seed)
    configs = (generation_config, model.generation_config)
    check_arguments(args, configs)
    _convert_stop_strings(args, configs)
    if "do_sample" not in args and implies_sampling(*configs):
        args["do_sample"] = True
    has_table = bool(ngrams and ngrams["table"] is not None)
    decoder = partial(
        _decode,
        drafting=drafting,
        find_state=partial(state_of, has_table=has_table, gated=gated, has_head=head),
        streamer=args.get("streamer"),  # the library does not pass it to a callable
        arguments=frozenset(args),
    )
    answer = library(custom_generate=decoder, **args)
    return answer


def _mask_of(
    lm: PreTrainedModel, adaptive_ids: Sequence[int], *, noise: bool
) -> MaskTokens:
    """Return the tokens that take the places of drafts. Raises ValueError for ids without a row."""
    vocabulary = lm.config.get_text_config().vocab_size
    if any(id >= vocabulary for id in adaptive_ids):
        raise ValueError(
            f"model must have the adaptive token {max(adaptive_ids)}, got a model of "
            f"{vocabulary} ids. Load the model from the directory of custom_generate."
        )
    return mask_tokens(adaptive_ids, noise=noise, vocabulary=vocabulary)


def _settings_of(
    k: int | None,
    probes: str | int | None,
    sources: Collection[str] | None,
    seed: int | None,
) -> DecodeConfig:
    """Return the settings of a call, with defaults for None. Raises ValueError for a wrong value."""
    if isinstance(sources, str):
        sources = [sources]
    try:
        return DecodeConfig(
            "hybrid",
            sources=None if sources is None else [*sources],
            k=k,
            probes="auto" if probes is None else str(probes),
            seed=0 if seed is None else seed,
        )
    except ValueError as error:  # the arguments here are no settings of a group
        raise ValueError(str(error).replace("decode.", "")) from error


def _convert_stop_strings(
    args: dict[str, Any], configs: Sequence[GenerationConfig | None]
) -> None:
    """Replace the stop strings of a call by a stopping criterion.

    With a callable as custom_generate, the library drops the tokenizer that stop strings need.
    """
    tokenizer = args.pop("tokenizer", None)
    of_configs = [config.stop_strings for config in configs if config]
    strings = next(filter(None, [args.get("stop_strings"), *of_configs]), None)
    if strings and tokenizer is not None:
        criteria = [
            *(args.get("stopping_criteria") or ()),
            StopStringCriteria(tokenizer, strings),
        ]
        args["stop_strings"] = None
        args["stopping_criteria"] = StoppingCriteriaList(criteria)


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
    arguments: frozenset[str],
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode (B, P) prompts to (B, P + n) ids, with the signature of a decoding method.

    `arguments` are the names of the caller's arguments. A parameter must not have the name of
    an input that the library prepares, such as attention_mask: the library would pass the
    caller's unprepared value.
    """
    mask = prepared.pop("attention_mask", None)
    inputs = {name: value for name, value in prepared.items() if name in arguments}
    B = len(input_ids)
    check_supported(
        generation_config,
        logits_processor,
        inputs,
        sequences=B,
        streams=streamer is not None,
    )
    prompts = prompts_of(input_ids, mask)
    limits = limits_of(
        stopping_criteria,
        input_ids,
        longest=max(map(len, prompts)),
        context=context_length(lm.config),
    )
    sampling, processors = sampling_of(
        logits_processor, sample=generation_config.do_sample
    )
    seeds = drafting.seeds(sampling, B)
    requests = []
    for b, prompt in enumerate(prompts):
        row: Any = [RowProcessor(processors, input_ids, b, prompt=len(prompt))]
        of_row = LogitsProcessorList(row) if processors else None
        requests.append(Request(prompt, seeds[b], of_row))
    try:
        texts = _texts(find_state(lm), requests, limits, sampling, drafting, streamer)
    except UserError as error:
        raise ValueError(str(error)) from error
    pad: Any = generation_config._pad_token_tensor
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
    """Return the new tokens of each request, and pass them to the streamer."""
    longest = max(len(request.prompt) for request in requests)
    capacity = longest + limits.max_new_tokens
    methods = Methods(
        state.lm,
        drafting.mask,
        drafting.L,
        drafting.weights,
        state.table,
        planners=state.planners,
    )
    drafters = methods.drafters(
        replace(drafting.decode, **vars(sampling)),
        batch=len(requests),
        capacity=capacity,
        left=context_length(state.lm.config) - longest,
    )
    runner = state.runners.take(
        batch=len(requests), capacity=capacity, max_rows=drafters.max_rows
    )
    texts: list[list[int]] = [[] for _ in requests]
    for steps in decode(runner, requests, drafters, limits, sampling):
        for step in steps:
            texts[step.sequence] += step.tokens
            if streamer:
                for token in step.tokens:
                    streamer.put(torch.tensor([token]))
    state.runners.give(runner)
    if streamer:
        streamer.end()
    return texts

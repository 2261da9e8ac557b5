"""Decoding for programs: load a model directory, generate from prompts.

    model = load("runs/7b/model")
    for step in generate(model, "def fib(n):", DecodeConfig(k=5)):
        print(step.text, end="", flush=True)

Knows the order of things and refuses what cannot be done; what is done is the loop's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from conf import UserError
from conf.dtype import AUTO, choose_dtype
from conf.hub import find_folder
from infer import loop
from infer.config import DTYPES, DecodeConfig, DraftConfig, Infill
from infer.engine.forward import context_length, shares
from infer.engine.memory import enough_memory
from infer.engine.output import Request
from infer.engine.runner import Runners
from infer.engine.static import fixed_shapes
from infer.loop import Limits, Step
from infer.methods import DraftMethods, Methods, library_processors
from infer.models.checkpoint import Adaptive, ModelDirectory, eos_ids
from infer.models.draft import Draft, DraftSource
from infer.models.parallel import processes
from infer.requests import Prompt, Taken, batch_of, check_lengths, ids_of, seeds_of
from infer.text import Output, Text
from infer.trees.token_graph import Watch

SMALLER = (
    "Lower decode.max_new_tokens, the prompt's length, the number of prompts, or the "
    "tree's size by decode.k, decode.probes or decode.nodes"
)


@dataclass(frozen=True)
class Model:
    """A loaded model directory. `context` is the number of its positions, in tokens."""

    lm: PreTrainedModel = field(repr=False)
    text: Text
    adaptive: (
        Adaptive | None
    )  # None for a model that was trained without adaptive tokens
    eos: frozenset[int]
    context: int
    draft: Draft | None  # what drafts for it, where asked for
    methods: Methods = field(repr=False)
    runners: Runners = field(repr=False)


@dataclass(frozen=True, slots=True)
class TextStep(Step):
    """A Step of the prompt with the index `sequence`, and the text that each of its tokens completes: in the
    middle of a character "".
    """

    texts: list[str]

    @property
    def text(self) -> str:
        """The step's text."""
        return "".join(self.texts)


def load(
    model_dir: str | Path | ModelDirectory,
    dtype: str = "auto",
    device: str | None = None,
    *,
    draft: DraftConfig | str | Path | None = None,
    compile: bool = False,
) -> Model:
    """Load a model directory, or a model of the hub by its name, on a GPU where there is one.

    `dtype` is float32, bfloat16, float16, or "auto": bfloat16 where the device computes in it as fast as in
    float32. `draft` is a smaller model with the same token ids, or "self:N" for the model's own first N layers.
    `compile` has torch.compile fuse the kernels of a GPU's forward, in about a minute of the first text.
    Raises UserError for what cannot be loaded, drafted with or compiled so, and for too little memory.
    """
    if dtype not in DTYPES:
        raise UserError(
            f"dtype must be one of {', '.join(DTYPES)}, got {dtype or 'none'}"
        )
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device not in (None, *devices, *(["cuda"] if len(devices) > 1 else [])):
        raise UserError(f"device must be one of {', '.join(devices)}, got {device}")
    directory = (
        model_dir
        if isinstance(model_dir, ModelDirectory)
        else ModelDirectory(find_folder(model_dir))
    )
    text = directory.text
    adaptive = directory.adaptive
    try:
        draft_config = (
            draft
            if isinstance(draft, DraftConfig)
            else DraftConfig(None if draft is None else str(draft))
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if draft_config.model:
        draft_config = replace(
            draft_config, model=str(find_folder(draft_config.model, setting="draft"))
        )
    source = DraftSource(draft_config, text) if draft_config.model else None
    if (
        dtype == AUTO
        and processes() > 1
        and device in (None, "cpu")
        and not torch.cuda.is_available()
    ):
        dtype = "float32"  # ranks that share a model must not choose each for itself
    dtype = choose_dtype(dtype, device)
    lm = directory.load(dtype=dtype, device=device)
    check_compile(lm, compile)
    drafting = source.load(lm, adaptive) if source else None
    draft_methods = DraftMethods(lm, drafting, compile=compile) if drafting else None
    methods = Methods(lm, adaptive, draft_methods, directory.ngrams)
    runners = Runners(lm, compile=compile)
    return Model(
        lm,
        text,
        adaptive,
        eos_ids(lm),
        context_length(lm.config),
        drafting,
        methods,
        runners,
    )


def check_compile(lm: PreTrainedModel, compile: bool) -> None:
    """Raise UserError where forwards have no fixed shapes to compile."""
    if compile and lm.device.type != "cuda":
        raise UserError(f"compile=true: the model must be on a GPU, got {lm.device}")
    if compile and not fixed_shapes(lm):
        reason = (
            f"a part of it on each of {shares(lm)} ranks"
            if shares(lm) > 1
            else lm.config.model_type
        )
        raise UserError(
            f"compile=true: the model must be whole and take fixed shapes, got {reason}"
        )


def generate(
    model: Model,
    prompts: Prompt | Iterable[Prompt],
    decode: DecodeConfig | None = None,
    *,
    seeds: Iterable[int] | None = None,
    processors: LogitsProcessorList | None = None,
    watch: Watch | None = None,
) -> Iterator[TextStep]:
    """Continue 1 to 8 prompts side by side; yield the steps as they are made.

    A prompt is a text, an `Infill`, or token ids (n,) of any kind. A sequence's tokens do not depend on
    `decode.method` nor on the sequences beside it: they are those of plain decoding with the same seed,
    `decode.seed` for all or one each by `seeds` (in narrow types up to near-ties), or with `decode.verify`
    "ratio" others, of the same distribution. `processors` are further ones of Transformers': functions of the
    ids (1, n) before a place and the scores (1, V) alone. `watch` receives each step's draft, where it is a
    graph, before the step comes. Raises UserError, before anything is decoded, for what cannot be done; later
    only when the memory does not suffice.
    """
    decode = decode or DecodeConfig()
    batch, names = batch_of(prompts)
    rows = model.lm.config.get_text_config().vocab_size
    ids = [
        ids_of(prompt, name, text=model.text, rows=rows)
        for prompt, name in zip(batch, names)
    ]
    check_lengths(ids, names, new=decode.max_new_tokens, context=model.context)
    requests = [
        Request(prompt, seed, _processors(model, prompt, decode, processors))
        for prompt, seed in zip(ids, seeds_of(seeds, decode.seed, len(ids)))
    ]
    outputs = [
        _output(model, prompt, prompt_ids, decode)
        for prompt, prompt_ids in zip(batch, ids)
    ]
    longest = max(map(len, ids))
    batch_size = len(ids)
    capacity = longest + decode.max_new_tokens
    with enough_memory(SMALLER):
        drafters = model.methods.drafters(
            decode,
            batch=batch_size,
            capacity=capacity,
            left=model.context - longest,
            watch=watch,
        )
    max_rows = drafters.max_rows
    with enough_memory(SMALLER):
        runner = model.runners.take(
            batch=batch_size, capacity=capacity, max_rows=max_rows
        )
    limits = Limits(decode.max_new_tokens, model.eos, outputs.__getitem__)
    decoded = loop.decode(runner, requests, drafters, limits, decode.sampling)

    def steps() -> Iterator[TextStep]:
        with enough_memory(SMALLER):
            for step in chain.from_iterable(decoded):
                values = {
                    field.name: getattr(step, field.name) for field in fields(Step)
                }
                yield TextStep(
                    **values, texts=outputs[step.sequence].take(finished=step.finished)
                )
        model.runners.give(runner)

    return steps()


def _processors(
    model: Model,
    prompt: Sequence[int],
    decode: DecodeConfig,
    further: LogitsProcessorList | None,
) -> LogitsProcessorList | None:
    ends = model.eos | model.text.ends(prompt)
    own = library_processors(
        decode, prompt=len(prompt), ends=ends, device=model.lm.device
    )
    return (
        LogitsProcessorList([*(own or ()), *(further or ())])
        if own or further
        else None
    )


def _output(
    model: Model, prompt: Taken, ids: Sequence[int], decode: DecodeConfig
) -> Output:
    # An SPM middle without a prefix begins its text, and so does what follows BOS alone.
    opens = (
        prompt.order == "spm" and not prompt.prefix
        if isinstance(prompt, Infill)
        else model.text.is_empty(ids)
    )
    stream = model.text.stream(opens=opens)
    return Output(
        stream,
        stop=decode.stop,
        ends=model.text.ends(ids) | model.text.unseen(decode.stop),
    )

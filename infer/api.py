"""The Python interface of decoding: load a model directory and continue prompts.

model = load("runs/7b/model")
for step in generate(model, "def fib(n):", DecodeConfig(k=5)):
    print(step.text, end="", flush=True)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from logging import getLogger
from pathlib import Path

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from conf.console import torchrun_rank
from conf.devices.dtype import AUTO
from conf.errors import UserError
from conf.hub import find_folder
from conf.settings.schema import any_of
from infer import loop
from infer.config import DTYPES, DecodeConfig, Infill, draft_layers
from infer.drafters.draft_model import DraftModelSources
from infer.engine.forward import context_length
from infer.engine.memory import enough_memory
from infer.engine.output import Request
from infer.engine.runner import Runner, Runners
from infer.engine.static import fixed_shapes
from infer.generation import Generation, not_applied, read_generation
from infer.loop import Limits, Step
from infer.methods import Methods
from infer.models.checkpoint import Adaptive, ModelDirectory, eos_ids
from infer.models.draft import Draft, DraftSource
from infer.models.parallel import processes
from infer.requests import Prompt, batch_of, check_length, ids_of, seeds_of
from infer.text import Output, Text
from infer.trees.token_graph import Watch

REMEDY = (
    "Lower decode.max_new_tokens, the prompt's length, the number of prompts, or the "
    "tree's size by decode.k, decode.probes or decode.nodes."
)


@dataclass(frozen=True)
class Model:
    """A loaded model directory. `context` is the model's context length in tokens."""

    lm: PreTrainedModel = field(repr=False)
    text: Text
    adaptive: Adaptive | None  # None for a model trained without adaptive tokens
    eos: frozenset[int]
    generation: Generation = field(repr=False)
    context: int
    draft: Draft | None
    methods: Methods = field(repr=False)
    runners: Runners = field(repr=False)


@dataclass(frozen=True, slots=True)
class TextStep(Step):
    """A step of one sequence, with the text of each token.

    A token that ends within a character has the text "". The next token completes it.
    """

    texts: list[str]

    @property
    def text(self) -> str:
        """The text of the step."""
        return "".join(self.texts)


def load(
    model_dir: str | Path | ModelDirectory,
    dtype: str | torch.dtype = AUTO,
    device: str | torch.device | None = None,
    *,
    draft: str | None = None,
    compile: bool = False,
) -> Model:
    """Load a model directory, or a model of the hub by its name, by default on a GPU.

    `dtype` is float32, bfloat16, float16, int8 (on a CPU), or "auto": bfloat16 if the
    device has instructions for it, or on a CPU if the weights of a Llama, Mistral or Qwen2
    model are stored in it; otherwise float32. `draft` is a smaller model with the
    same token ids, or "self:N" for the model's own first N layers. `compile` fuses the
    kernels of a GPU's forward with torch.compile, which adds a minute to the first text.
    Raises UserError for an unsuitable directory, draft model or device, and for too little
    memory.
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"dtype must be {any_of(DTYPES)}, got {dtype!r}")
    device = None if device is None else str(device)
    check_device(device)
    directory = (
        model_dir
        if isinstance(model_dir, ModelDirectory)
        else ModelDirectory(find_folder(model_dir))
    )
    source = None
    if draft is not None:
        try:
            layers = draft_layers(draft)
        except ValueError as error:
            raise UserError(str(error)) from error
        model = layers or find_folder(draft, setting="draft")
        source = DraftSource(model, directory.text)
    if dtype == AUTO and processes() > 1 and not torch.cuda.is_available():
        dtype = "float32"  # ranks that share a model must not choose different types
    dtype = directory.choose_dtype(dtype, device)
    lm = directory.load(dtype=dtype, device=device)
    check_compile(lm, compile)
    generation = read_generation(lm, directory.path)
    if (sentence := not_applied(lm, directory.path)) and not torchrun_rank()[0]:
        _log_once(sentence)
    adaptive = directory.adaptive
    methods = Methods(lm, table=directory.ngrams)
    if adaptive:
        methods = Methods(
            lm,
            adaptive.mask(lm.config.get_text_config().vocab_size),
            adaptive.L,
            adaptive.ngrams,
            directory.ngrams,
        )
    drafting = None
    if source:
        drafting = source.load(lm)
        methods.draft = DraftModelSources(lm, drafting, compile=compile)
    return Model(
        lm,
        directory.text,
        adaptive,
        eos_ids(lm),
        generation,
        context_length(lm.config),
        drafting,
        methods,
        Runners(lm, compile=compile),
    )


@cache
def _log_once(sentence: str) -> None:
    """Log a warning once, because a report loads the model again for each of its parts."""
    getLogger(__name__).warning(sentence)


def check_device(device: str | None) -> None:
    """Raise UserError if this machine does not have the device."""
    available = ["cpu"]
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        available += ["cuda", *(f"cuda:{index}" for index in gpus)]
    if device is not None and device not in available:
        raise UserError(
            f"device must be one of {', '.join(available)}, got {device}. Omit it to "
            "take the first GPU, or the CPU."
        )


def check_compile(lm: PreTrainedModel, compile: bool) -> None:
    """Raise UserError if `compile` is set and the model's forwards cannot have fixed shapes."""
    if compile and not (lm.device.type == "cuda" and fixed_shapes(lm)):
        raise UserError(
            "compile=true needs a model that is whole on one GPU and supports fixed shapes, "
            f"got {lm.config.model_type} on {lm.device}. Omit it."
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
    """Continue one or more prompts as a batch; yield each step when it is decoded.

    A prompt is a text, an `Infill`, or (n,) token ids. The tokens of a sequence equal the
    tokens of plain decoding with the same seed (in narrow types up to near-ties). They do
    not depend on `decode.method` or on the rest of the batch. With `decode.verify` "ratio"
    the tokens differ from plain decoding's and have the same distribution. All sequences
    have the seed `decode.seed`, or `seeds` has a seed for each prompt. `processors` are
    additional logits processors of Transformers; they must be functions of the (1, n) ids
    before a place and the (1, V) scores. `watch` is called with each step's draft before the
    step is yielded. The draft of a sequence's last step comes after that step, without its
    verification.

    Raises UserError before decoding for a request that the model cannot decode, and for too
    little memory.
    """
    decode = decode or DecodeConfig()
    batch, names = batch_of(prompts)
    rows = model.lm.config.get_text_config().vocab_size
    ids = [
        ids_of(prompt, name, text=model.text, rows=rows)
        for prompt, name in zip(batch, names)
    ]
    for prompt_ids, name in zip(ids, names):
        check_length(prompt_ids, name, new=decode.max_new_tokens, context=model.context)
    requests = [
        Request(prompt_ids, seed, _processors(model, prompt_ids, decode, processors))
        for prompt_ids, seed in zip(ids, seeds_of(seeds, decode.seed, len(ids)))
    ]
    outputs = [
        _output(model, prompt, prompt_ids, decode)
        for prompt, prompt_ids in zip(batch, ids)
    ]
    longest = max(map(len, ids))
    capacity = longest + decode.max_new_tokens
    with enough_memory(REMEDY):
        drafters = model.methods.drafters(
            decode,
            batch=len(ids),
            capacity=capacity,
            left=model.context - longest,
            watch=watch,
        )
        runner = model.runners.take(
            batch=len(ids), capacity=capacity, max_rows=drafters.max_rows
        )
    limits = Limits(decode.max_new_tokens, model.eos, outputs.__getitem__)
    decoded = loop.decode(runner, requests, drafters, limits, decode.sampling)

    return _text_steps(model, decoded, outputs, runner)


def _text_steps(
    model: Model,
    decoded: Iterator[list[Step]],
    outputs: Sequence[Output],
    runner: Runner,
) -> Iterator[TextStep]:
    """Yield the steps with their texts; afterwards keep the runner for the next call.

    It is kept too if the caller reads no further, but not after an error.
    """
    with enough_memory(REMEDY):
        try:
            for step in chain.from_iterable(decoded):
                values = {each.name: getattr(step, each.name) for each in fields(step)}
                texts = outputs[step.sequence].take(finished=step.finished)
                yield TextStep(**values, texts=texts)
        except GeneratorExit:
            model.runners.give(runner)
            raise
    model.runners.give(runner)


def _processors(
    model: Model,
    prompt: Sequence[int],
    decode: DecodeConfig,
    additional: LogitsProcessorList | None,
) -> LogitsProcessorList | None:
    ends = model.eos | model.text.ends(prompt)
    own = model.generation.processors(model.lm, decode, prompt, ends)
    processors = LogitsProcessorList([*(own or ()), *(additional or ())])
    return processors or None


def _output(
    model: Model, prompt: Prompt, ids: Sequence[int], decode: DecodeConfig
) -> Output:
    # The output begins a text if it follows BOS alone, or in SPM an empty prefix.
    opens = (
        model.text.opens(prompt)
        if isinstance(prompt, Infill)
        else model.text.is_empty(ids)
    )
    stop = decode.stop or model.generation.stop
    return Output(
        model.text.stream(opens=opens),
        stop=stop,
        ends=model.text.ends(ids),
        before=model.text.with_special(ids) if stop else "",
        special=model.text.special_pieces() if stop else {},
    )

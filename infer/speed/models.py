"""The models of a run, and every row's decoder. Loaded once; what learns goes on learning from set to set."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from transformers import PreTrainedModel

from conf import UserError
from infer.api import check_compile
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.drafters.adaptive import check_probes
from infer.engine.cache import shape
from infer.engine.forward import context_length
from infer.engine.memory import enough_for_weights, enough_memory, gib
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits
from infer.methods import DraftMethods, Methods
from infer.models.checkpoint import Adaptive, ModelDirectory, eos_ids
from infer.models.draft import base_pieces, check_draft, lacking, load_draft
from infer.requests import check_lengths
from infer.speed import BY_ADAPTIVE, GSD_PROBES, PLAIN, Condition, DecoderSpec, SpeedConfig, specs
from infer.speed.peers import Peers
from infer.text import NoInfilling, Text
from infer.trees.token_graph import Watch


@dataclass(frozen=True)
class Prepared:
    """What a run needs beside weights."""

    text: Text
    adaptive: Adaptive | None
    prompts: Mapping[str, Sequence[TokenPrompt]]
    shared: int  # `Draft.rows`, 0 without a draft model
    k: list[int]  # those that the adaptive tokens allow
    skipped: Mapping[str, str]  # the sets that the model cannot read, and why


def prepare(config: SpeedConfig) -> Prepared:
    """Read all but weights. Raise UserError for models, prompts, drafts and a base that do not fit together."""
    directory = ModelDirectory(config.model)
    text = directory.text
    probes = not set(BY_ADAPTIVE).isdisjoint(config.decoders)
    adaptive = directory.need_adaptive() if probes else directory.adaptive
    k = config.k
    if adaptive and "sdsat" in config.decoders:
        try:
            check_probes(adaptive.ids, min(k))
        except ValueError as error:
            raise UserError(str(error)) from error
        # Diverse tokens are for a place each (SDSAT, Appendix B).
        k = [number for number in k if len(adaptive.ids) == 1 or number <= len(adaptive.ids)]
    shared = check_draft(config.draft, text) if config.draft.model else 0
    prompts, skipped = dict[str, Sequence[TokenPrompt]](), dict[str, str]()
    for name, prompt_set in config.prompts.items():
        try:
            prompts[name] = load_prompts(name, prompt_set, text, seed=config.seed)
        except UserError as error:  # infillings of a model that has none are left out while another set is left
            last = len(skipped) == len(config.prompts) - 1
            if last or not isinstance(error.__cause__, NoInfilling):
                raise
            skipped[name] = str(error.__cause__)
    if config.base:
        ids = ((prompt.id, prompt.ids) for prompt_set in prompts.values() for prompt in prompt_set)
        if strange := lacking(base_pieces(config.base, text), ids):
            raise UserError(f"base={config.base} must be a model with the ids of every prompt, got {strange}")
    return Prepared(text, adaptive, prompts, shared, k, skipped)


def fingerprint_prompts(prompts: Sequence[TokenPrompt]) -> str:
    """Return the SHA-256 of a set's prompts: their names and token ids, and what ends their texts."""
    facts = [(prompt.id, prompt.ids, sorted(prompt.ends), prompt.max_new_tokens) for prompt in prompts]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


DEFAULT = DecoderSpec("auto")  # all sources of drafts, by measurement


@dataclass(frozen=True)
class DecoderSetup:
    """A decoder of ours: all that the loop takes."""

    runner: Runner
    drafters: Drafters
    limits: Limits
    sampling: Sampling


class ModelPool:
    """Models of all dtypes are in memory together, so that they can take turns; `device` is this rank's GPU.

    Raises UserError for what `load` and `load_draft` refuse, for texts that are longer than a model's
    context, and where the memory does not suffice.
    """

    def __init__(self, config: SpeedConfig, prepared: Prepared, *, device: str | None = None) -> None:
        self._config, self._prepared = config, prepared
        self.lms = {dtype: self._load("model", config.model, dtype, device) for dtype in config.dtypes}
        self._bases = {
            dtype: self._load("base", config.base, dtype, device) for dtype in config.dtypes if config.base
        }
        drafts = {
            dtype: load_draft(config.draft, lm, rows=prepared.shared, adaptive=prepared.adaptive)
            for dtype, lm in self.lms.items()
            if config.draft.model
        }
        self._methods, table = dict[tuple[Condition, bool], Methods](), ModelDirectory(config.model).ngrams
        for dtype, lm in self.lms.items():
            # What the draft model draws by levels, and where asked for by its own adaptive tokens.
            draft, drawings = drafts.get(dtype), dict[bool, DraftMethods | None]({False: None})
            if draft:
                drawings[False] = DraftMethods(lm, replace(draft, adaptive=None), compile=config.compile)
            if draft and draft.adaptive:
                drawings[True] = DraftMethods(lm, draft, compile=config.compile)
            for temperature, (probes, drawing) in product(config.temperatures, drawings.items()):
                methods = Methods(lm, prepared.adaptive, drawing, table)
                self._methods[Condition(dtype, temperature), probes] = methods
        longest = max(self.capacity(prompts) for prompts in prepared.prompts.values())
        self.peers = Peers(
            config, self.lms, drafts, prepared.adaptive, sampling=self._sampling, capacity=longest
        )
        models = [*self.lms.values(), *self._bases.values()]
        self._runners = {id(lm): Runners(lm, compile=config.compile) for lm in models}
        self._lent = list[tuple[Runners, Runner]]()
        size = sum(lm.dtype.itemsize * prod(shape(lm.config, 1, longest)) for lm in models)
        self._needed = f"{gib(size)} for caches of {longest} tokens beside the weights"

    def capacity(self, prompts: Sequence[TokenPrompt]) -> int:
        """Return tokens of the longest text."""
        new = self._config.max_new_tokens
        return max(len(prompt.ids) + (prompt.max_new_tokens or new) for prompt in prompts)

    def own(self, name: str) -> dict[Condition, dict[DecoderSpec, DecoderSetup]]:
        """Return our decoders of a set, of model and base model; those of the set before are no longer used."""
        for runners, runner in self._lent:
            runners.give(runner)
        self._lent = []
        setups = dict[Condition, dict[DecoderSpec, DecoderSetup]]()
        for dtype, lm in self.lms.items():
            drafters = {
                (temperature, way): self.drafters(name, Condition(dtype, temperature), way)
                for temperature in self._config.temperatures
                for way in specs(self._config, temperature)
            }
            runner = self._runner(lm, name, max(drafter.max_rows for drafter in drafters.values()))
            for (temperature, way), drafter in drafters.items():
                own = self._own(lm, runner, drafter, temperature)
                setups.setdefault(Condition(dtype, temperature), {})[way] = own
        for dtype, lm in self._bases.items():
            runner = self._runner(lm, name, 1)
            for temperature in self._config.temperatures:
                own = self._own(lm, runner, Drafters(Drafter), temperature)
                setups[Condition(dtype, temperature)][DecoderSpec("base")] = own
        return setups

    @contextmanager
    def batch(self, name: str, group: Condition, size: int) -> Iterator[dict[str, DecoderSetup]]:
        """Return plain decoding and the default decoder for `size` texts of a set side by side."""
        lm = self.lms[group.dtype]
        drafters = {way: self.drafters(name, group, way, batch=size) for way in (PLAIN, DEFAULT)}
        rows, runners = max(drafter.max_rows for drafter in drafters.values()), self._runners[id(lm)]
        runner = runners.take(batch=size, capacity=self.capacity(self._prepared.prompts[name]), max_rows=rows)
        yield {
            way.decoder: self._own(lm, runner, drafter, group.temperature) for way, drafter in drafters.items()
        }
        runners.give(runner)

    def drafters(
        self, name: str, group: Condition, way: DecoderSpec, watch: Watch | None = None, *, batch: int = 1
    ) -> Drafters:
        """Return the drafters of a decoder, for the texts of a set."""
        prompts, lm = self._prepared.prompts[name], self.lms[group.dtype]
        decode = specs(self._config, group.temperature)[way]
        methods = self._methods[group, way.decoder == GSD_PROBES]
        capacity = self.capacity(prompts)
        left = context_length(lm.config) - max(len(prompt.ids) for prompt in prompts)
        return methods.drafters(decode, batch=batch, capacity=capacity, left=left, watch=watch)

    def enough_memory(self) -> AbstractContextManager[None]:
        """Guard whatever decodes against running out of memory."""
        advice = "lower max_new_tokens or prompts.NAME.max_tokens, or take one of dtypes"
        return enough_memory(self._needed, advice)

    def _own(self, lm: PreTrainedModel, runner: Runner, drafters: Drafters, temperature: float) -> DecoderSetup:
        limits = Limits(self._config.max_new_tokens, eos_ids(lm))
        return DecoderSetup(runner, drafters, limits, self._sampling(temperature))

    def _sampling(self, temperature: float) -> Sampling:
        config = self._config
        return Sampling(temperature, config.top_k, config.top_p) if temperature else Sampling()

    def _runner(self, lm: PreTrainedModel, name: str, rows: int) -> Runner:
        runners, capacity = self._runners[id(lm)], self.capacity(self._prepared.prompts[name])
        runner = runners.take(batch=1, capacity=capacity, max_rows=rows)
        self._lent.append((runners, runner))
        return runner

    def _load(self, setting: str, folder: str, dtype: str, device: str | None) -> PreTrainedModel:
        narrow = "dtypes=[bfloat16]"
        directory = ModelDirectory(folder, setting=setting)
        with enough_for_weights(folder, dtype, device, narrow=narrow):
            lm = directory.load(dtype=dtype, device=device)
            check_compile(lm, self._config.compile)
        context = context_length(lm.config)
        for name, prompts in self._prepared.prompts.items():
            named = [f"{prompt.id} of prompts.{name}" for prompt in prompts]
            own = prompts[0].max_new_tokens
            setting = f"prompts.{name}.max_new_tokens" if own else "max_new_tokens"
            new = own or self._config.max_new_tokens
            check_lengths([prompt.ids for prompt in prompts], named, new=new, context=context, setting=setting)
        return lm

"""The models of a run, and every row's decoder. Loaded once; what learns goes on learning from set to set."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import prod

from transformers import PreTrainedModel

from infer.api import check_compile
from infer.benchmarks.prompts import TokenPrompt
from infer.drafters.outcome import Watch
from infer.engine.cache import shape
from infer.engine.forward import context_length
from infer.engine.memory import enough_for_weights, enough_memory, gib
from infer.engine.runner import Runner, Runners
from infer.engine.sampling import Sampling
from infer.loop import Drafter, Drafters, Limits
from infer.measure.runs import Decoder, loop_decoder
from infer.methods import DraftMethods, Methods
from infer.models.checkpoint import eos_ids, load_model, load_ngrams
from infer.models.draft import Draft, load_draft, told_as
from infer.requests import check_lengths
from infer.speed.config import SpeedConfig
from infer.speed.peering import Peers
from infer.speed.prepare import Prepared
from infer.speed.units import PLAIN, Group, Way
from infer.speed.ways import GSD_PROBES, ways

DEFAULT = Way("auto")  # all sources of drafts, by measurement


@dataclass(frozen=True)
class Own:
    """One of our ways, as the loop takes it."""

    runner: Runner
    drafters: Drafters
    limits: Limits
    sampling: Sampling

    def decoder(self, seed: int) -> Decoder:
        """As a function of the prompt."""
        return loop_decoder(self.runner, self.drafters, self.limits, self.sampling, seed=seed)


class Bench:
    """Models of all dtypes are in memory together, so that they can take turns; `device` is this rank's GPU.

    Raises UserError for what `load_model` and `load_draft` refuse, for texts that are longer than a model's
    context, and where the memory does not suffice.
    """

    def __init__(self, config: SpeedConfig, prepared: Prepared, *, device: str | None = None) -> None:
        self._config, self._prepared = config, prepared
        self.lms = {dtype: self._load("model", config.model, dtype, device) for dtype in config.dtypes}
        self._bases = {
            dtype: self._load("base", config.base, dtype, device) for dtype in config.dtypes if config.base
        }
        drafts = {dtype: self._draft(lm) for dtype, lm in self.lms.items() if config.draft.model}
        self._methods, table = dict[tuple[Group, bool], Methods](), load_ngrams(config.model)
        for dtype, lm in self.lms.items():
            drawings = _drawings(lm, drafts.get(dtype), compile=config.compile)
            for temperature in config.temperatures:
                for probes, drawing in drawings.items():
                    group = Group(dtype, temperature)
                    self._methods[group, probes] = Methods(lm, prepared.adaptive, drawing, table)
        longest = max(self.capacity(prompts) for prompts in prepared.prompts.values())
        self.peers = Peers(
            config, self.lms, drafts, prepared.adaptive, sampling=self._sampling, capacity=longest
        )
        self._runners = {id(lm): Runners(lm, compile=config.compile) for lm in self._models}
        self._lent = list[tuple[Runners, Runner]]()

    @property
    def _models(self) -> list[PreTrainedModel]:
        return [*self.lms.values(), *self._bases.values()]

    def capacity(self, prompts: Sequence[TokenPrompt]) -> int:
        """Tokens of the longest text."""
        new = self._config.max_new_tokens
        return max(len(prompt.ids) + (prompt.max_new_tokens or new) for prompt in prompts)

    def own(self, name: str) -> dict[Group, dict[Way, Own]]:
        """Our ways to decode a set, the model's and the base model's; those of the set before are no longer
        used.
        """
        for runners, runner in self._lent:
            runners.give(runner)
        self._lent = []
        found = dict[Group, dict[Way, Own]]()
        for dtype, lm in self.lms.items():
            drafters = {
                (temperature, way): self.drafters(name, Group(dtype, temperature), way)
                for temperature in self._config.temperatures
                for way in ways(self._config, temperature)
            }
            runner = self._runner(lm, name, max(one.max_rows for one in drafters.values()))
            for (temperature, way), one in drafters.items():
                own = self._own(lm, runner, one, temperature)
                found.setdefault(Group(dtype, temperature), {})[way] = own
        for dtype, lm in self._bases.items():
            runner = self._runner(lm, name, 1)
            for temperature in self._config.temperatures:
                own = self._own(lm, runner, Drafters(Drafter), temperature)
                found[Group(dtype, temperature)][Way("base")] = own
        return found

    @contextmanager
    def batch(self, name: str, group: Group, size: int) -> Iterator[dict[str, Own]]:
        """Plain decoding and the default decoder for `size` texts of a set side by side."""
        lm = self.lms[group.dtype]
        drafters = {way: self.drafters(name, group, way, batch=size) for way in (PLAIN, DEFAULT)}
        rows, runners = max(one.max_rows for one in drafters.values()), self._runners[id(lm)]
        runner = runners.take(batch=size, capacity=self.capacity(self._prepared.prompts[name]), max_rows=rows)
        yield {way.decoder: self._own(lm, runner, one, group.temperature) for way, one in drafters.items()}
        runners.give(runner)

    def drafters(
        self, name: str, group: Group, way: Way, watch: Watch | None = None, *, batch: int = 1
    ) -> Drafters:
        """Of a way, for the texts of a set."""
        prompts, lm = self._prepared.prompts[name], self.lms[group.dtype]
        decode = ways(self._config, group.temperature)[way]
        methods = self._methods[group, way.decoder == GSD_PROBES]
        capacity = self.capacity(prompts)
        left = context_length(lm.config) - max(len(prompt.ids) for prompt in prompts)
        return methods.drafters(decode, batch=batch, capacity=capacity, left=left, watch=watch)

    def enough_memory(self) -> AbstractContextManager[None]:
        """Around whatever decodes."""
        longest = max(self.capacity(prompts) for prompts in self._prepared.prompts.values())
        size = sum(lm.dtype.itemsize * prod(shape(lm.config, 1, longest)) for lm in self._models)
        wanted = f"{gib(size)} for caches of {longest} tokens beside the weights"
        return enough_memory(wanted, "lower max_new_tokens or prompts.NAME.max_tokens, or take one of dtypes")

    def _own(self, lm: PreTrainedModel, runner: Runner, drafters: Drafters, temperature: float) -> Own:
        limits = Limits(self._config.max_new_tokens, eos_ids(lm))
        return Own(runner, drafters, limits, self._sampling(temperature))

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
        with told_as(setting, folder), enough_for_weights(folder, dtype, device, narrow=narrow):
            lm = load_model(folder, dtype=dtype, device=device)
            check_compile(lm, self._config.compile)
        context = context_length(lm.config)
        for name, prompts in self._prepared.prompts.items():
            named = [f"{prompt.id} of prompts.{name}" for prompt in prompts]
            own = prompts[0].max_new_tokens
            setting = f"prompts.{name}.max_new_tokens" if own else "max_new_tokens"
            new = own or self._config.max_new_tokens
            check_lengths([prompt.ids for prompt in prompts], named, new=new, context=context, setting=setting)
        return lm

    def _draft(self, lm: PreTrainedModel) -> Draft:
        prepared = self._prepared
        return load_draft(self._config.draft, lm, rows=prepared.shared, adaptive=prepared.adaptive)


def _drawings(lm: PreTrainedModel, draft: Draft | None, *, compile: bool) -> Mapping[bool, DraftMethods | None]:
    """What the draft model draws by levels, and where asked for by its own adaptive tokens."""
    if draft is None:
        return {False: None}
    levels = DraftMethods(lm, replace(draft, adaptive=None), compile=compile)
    return {False: levels} | ({True: DraftMethods(lm, draft, compile=compile)} if draft.adaptive else {})

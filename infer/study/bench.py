"""A model, what drafts for it, and prompts: every measurement of the study decodes with these."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from conf import UserError
from infer.api import load
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.config import GROWTH, DecodeConfig, DraftConfig
from infer.drafters.outcome import Outcome, Watch
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits
from infer.measure.crew import ALONE, Members
from infer.measure.runs import Decoder, loop_decoder
from infer.methods import DraftMethods, Methods
from infer.models.draft import Draft, check_draft, load_draft
from infer.study.config import StudyConfig
from infer.study.counts import Counts
from infer.study.rates import DraftedRun

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Way(NamedTuple):
    """A way to decode; `own`: the model's own first layers draft, not the draft model."""

    decode: DecodeConfig
    own: bool = False


class Bench:
    """Loaded once by each of `members`, who divide the prompts. Raises UserError for what `load` and
    `load_prompts` refuse, and for texts that are longer than the model's context.
    """

    def __init__(self, config: StudyConfig, members: Members = ALONE) -> None:
        self.config, self.members = config, members
        device = None if config.divide == "model" else members.device()
        self.model = load(config.model, config.dtype, device, draft=config.draft)
        self.prompts = {
            name: load_prompts(name, prompt_set, self.model.text, seed=config.seed)
            for name, prompt_set in config.prompts.items()
        }
        self._longest = max(len(prompt.ids) for prompt in self.all_prompts)
        self.capacity = max(
            len(prompt.ids) + (prompt.max_new_tokens or config.max_new_tokens) for prompt in self.all_prompts
        )
        if self.capacity > self.model.context:
            raise UserError(
                f"max_new_tokens={config.max_new_tokens}: wanted prompt and new tokens within the model's "
                f"{self.model.context} positions, found {self.capacity}"
            )

    @property
    def all_prompts(self) -> list[TokenPrompt]:
        """Of all sets."""
        return list(chain.from_iterable(self.prompts.values()))

    def each(self, work: Callable[[TokenPrompt], T]) -> list[T]:
        """The work's results on all prompts, which the ranks divide; the same list on every rank."""
        return self.members.gather([work(prompt) for prompt in self.members.share(self.all_prompts)])

    @property
    def draft(self) -> Draft:
        """The draft model."""
        assert self.model.draft is not None
        return self.model.draft

    def decode(self, method: str, **settings: Any) -> DecodeConfig:
        """The study's settings, those of the paper's Appendix A by default, but for those given."""
        study = {name: getattr(self.config, name) for name in GROWTH.get(method, ())}
        if method != "plain":
            study["nodes"] = self.config.nodes
        return DecodeConfig(method, **({"max_new_tokens": self.config.max_new_tokens} | study | settings))

    def drafters(self, way: Way, watch: Watch | None = None) -> Drafters:
        """New ones, that have learned nothing yet."""
        lm, draft = self.model.lm, self.own_layers() if way.own else self.draft
        methods = Methods(lm, self.model.adaptive, DraftMethods(lm, draft))
        left = self.model.context - self._longest
        return methods.drafters(way.decode, batch=1, capacity=self.capacity, left=left, watch=watch)

    def own_layers(self) -> Draft:
        """The model's own first layers (Self-SSD)."""
        config, model = DraftConfig(f"self:{self.config.self_layers}"), self.model
        return load_draft(config, model.lm, rows=check_draft(config, model.text), adaptive=None)

    def decoders(self, ways: Mapping[K, Way]) -> dict[K, Decoder]:
        """Side by side on one runner of the model."""
        counts = list[Counts]()

        def watch(outcome: Outcome) -> None:
            counts.append(Counts.of(outcome))

        drafters = {key: self.drafters(way, watch) for key, way in ways.items()}
        runner = self.runner(drafters.values())
        return {key: self._decoder(runner, one, ways[key].decode, counts) for key, one in drafters.items()}

    def runner(self, drafters: Iterable[Drafters]) -> Runner:
        """Of the model, for trees of any of these."""
        rows = max(one.max_rows for one in drafters)
        return Runner(self.model.lm, capacity=self.capacity, max_rows=rows)

    def limits(self) -> Limits:
        """The end of a text."""
        return Limits(self.config.max_new_tokens, self.model.eos)

    def run(self, decode: DecodeConfig) -> list[DraftedRun]:
        """All prompts once."""
        (decoder,) = self.decoders({None: Way(decode)}).values()
        return self.each(decoder)  # type: ignore[arg-type]

    def outcomes(self, decode: DecodeConfig, prompt: TokenPrompt) -> list[Outcome]:
        """The graph of every step but the last, as a prompt is decoded."""
        found = list[Outcome]()
        drafters = self.drafters(Way(decode), found.append)
        runner = self.runner([drafters])
        loop_decoder(runner, drafters, self.limits(), decode.sampling)(prompt)
        return found

    def _decoder(
        self, runner: Runner, drafters: Drafters, decode: DecodeConfig, counts: list[Counts]
    ) -> Decoder:
        decoder = loop_decoder(runner, drafters, self.limits(), decode.sampling)

        def run(prompt: TokenPrompt) -> DraftedRun:
            counts.clear()
            return DraftedRun(**asdict(decoder(prompt)), counts=tuple(counts))

        return run

"""A model, what drafts for it, and prompts: every measurement of the study decodes with these."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from conf import UserError
from infer.api import load
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.config import GROWTH, DecodeConfig, DraftConfig
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits
from infer.measure.distributed import ALONE, WorkerGroup
from infer.measure.runs import Decoder, loop_decoder
from infer.methods import DraftMethods, Methods
from infer.models.draft import Draft, check_draft, load_draft
from infer.study.config import StudyConfig
from infer.study.counts import Counts, DraftedRun
from infer.trees.token_graph import Outcome, Watch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class StudyDecoder(NamedTuple):
    """A spec to decode; `own`: the model's own first layers draft, not the draft model."""

    decode: DecodeConfig
    own: bool = False


class StudyModels:
    """Loaded once by each of `workers`, who divide the prompts. Raises UserError for what `load` and
    `load_prompts` refuse, and for texts that are longer than the model's context.
    """

    def __init__(self, config: StudyConfig, workers: WorkerGroup = ALONE) -> None:
        self.config, self.workers = config, workers
        device = None if config.divide == "model" else workers.device()
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
                f"max_new_tokens={config.max_new_tokens}: prompt and new tokens must be within the model's "
                f"{self.model.context} positions, got {self.capacity}"
            )

    @property
    def all_prompts(self) -> list[TokenPrompt]:
        """Of all sets."""
        return list(chain.from_iterable(self.prompts.values()))

    def each(self, work: Callable[[TokenPrompt], T]) -> list[T]:
        """Return the work's results on all prompts, which the ranks divide; the same list on every rank."""
        return self.workers.gather([work(prompt) for prompt in self.workers.share(self.all_prompts)])

    @property
    def draft(self) -> Draft:
        """The draft model."""
        assert self.model.draft is not None
        return self.model.draft

    def decode(self, method: str, **settings: Any) -> DecodeConfig:
        """Return the study's settings, those of the paper's Appendix A by default, but for those given."""
        study = {name: getattr(self.config, name) for name in GROWTH.get(method, ())}
        if method != "plain":
            study["nodes"] = self.config.nodes
        return DecodeConfig(method, **({"max_new_tokens": self.config.max_new_tokens} | study | settings))

    def drafters(self, spec: StudyDecoder, watch: Watch | None = None) -> Drafters:
        """Return new drafters, which have learned nothing yet."""
        lm, draft = self.model.lm, self.own_layers() if spec.own else self.draft
        methods = Methods(lm, self.model.adaptive, DraftMethods(lm, draft))
        left = self.model.context - self._longest
        return methods.drafters(spec.decode, batch=1, capacity=self.capacity, left=left, watch=watch)

    def own_layers(self) -> Draft:
        """Return the model's own first layers (Self-SSD)."""
        config, model = DraftConfig(f"self:{self.config.self_layers}"), self.model
        return load_draft(config, model.lm, rows=check_draft(config, model.text), adaptive=None)

    def decoders(self, specs: Mapping[K, StudyDecoder]) -> dict[K, Decoder]:
        """Return the decoders side by side on one runner of the model."""
        counts = list[Counts]()

        def watch(outcome: Outcome) -> None:
            counts.append(Counts.of(outcome))

        drafters = {key: self.drafters(spec, watch) for key, spec in specs.items()}
        runner = self.runner(drafters.values())
        return {
            key: self._decoder(runner, drafter, specs[key].decode, counts) for key, drafter in drafters.items()
        }

    def runner(self, drafters: Iterable[Drafters]) -> Runner:
        """Return a runner of the model, for trees of any of these."""
        rows = max(drafter.max_rows for drafter in drafters)
        return Runner(self.model.lm, capacity=self.capacity, max_rows=rows)

    def limits(self) -> Limits:
        """Return the end of a text."""
        return Limits(self.config.max_new_tokens, self.model.eos)

    def run(self, decode: DecodeConfig) -> list[DraftedRun]:
        """Run all prompts once."""
        (decoder,) = self.decoders({None: StudyDecoder(decode)}).values()
        return self.each(decoder)  # type: ignore[arg-type]

    def outcomes(self, decode: DecodeConfig, prompt: TokenPrompt) -> list[Outcome]:
        """Return the graph of every step but the last, as a prompt is decoded."""
        outcomes = list[Outcome]()
        drafters = self.drafters(StudyDecoder(decode), outcomes.append)
        runner = self.runner([drafters])
        loop_decoder(runner, drafters, self.limits(), decode.sampling)(prompt)
        return outcomes

    def _decoder(
        self, runner: Runner, drafters: Drafters, decode: DecodeConfig, counts: list[Counts]
    ) -> Decoder:
        decoder = loop_decoder(runner, drafters, self.limits(), decode.sampling)

        def run(prompt: TokenPrompt) -> DraftedRun:
            counts.clear()
            return DraftedRun(**asdict(decoder(prompt)), counts=tuple(counts))

        return run

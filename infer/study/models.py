r"""A model, what drafts for it, and prompts, and what became of each step's draft, in numbers.

    graph                    tree         accepted y b a c: each the likeliest child, ranks 1 1 1;
                                          c stands behind the merged a, and so the merging succeeded
        y                     y
       / \\                   / \
      b   a                 b   a
      |   |                 |   |
      a . c                 a   c
                            |
                            c

Of a text's last step, whose tokens may be cut, the draft is not known: what is counted of graphs leaves that
step out.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from conf import UserError
from infer.api import load
from infer.benchmarks.prompts import TokenPrompt, load_prompts
from infer.config import GROWTH, DecodeConfig, DraftConfig
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits
from infer.measure.distributed import ALONE, WorkerGroup
from infer.measure.runs import Decoder, Run, loop_decoder
from infer.methods import DraftMethods, Methods
from infer.models.draft import Draft, check_draft, load_draft
from infer.study import StudyConfig
from infer.trees.token_graph import Outcome, Watch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """One step: the `nodes` of its graph without the root and merged ones, the `levels` that were drafted, the
    `rows` that the draft model was fed, the `tokens` that it emitted, the rank of each accepted draft among its
    siblings (1 is the likeliest: GSD, Appendix F), and whether one of them was a copy.
    """

    nodes: int
    levels: int
    rows: int
    tokens: int
    ranks: tuple[int, ...]
    succeeded: bool

    @classmethod
    def of(cls, outcome: Outcome) -> "Counts":
        """Return the numbers of a step; the levels are those of nodes' own paths, not through merged ones."""
        graph, depths = outcome.graph, [0]
        for parent in graph.parents[1:]:
            depths.append(depths[parent] + 1)
        nodes = [outcome.drafts.nodes[node] for node in outcome.path]
        ranks = tuple(1 + graph.children[before].index(node) for before, node in pairwise(nodes))
        return cls(graph.drafted, max(depths), outcome.rows, len(outcome.tokens), ranks, outcome.succeeded)


@dataclass(frozen=True, slots=True)
class DraftedRun(Run):
    """With what became of each draft but the last step's. Other steps without one drafted nothing."""

    counts: tuple[Counts, ...]


def figures(runs: Sequence[DraftedRun]) -> dict[str, float | None]:
    """Return the figures of runs with drafts (Table 1, Figure 5); None where nothing was drafted.

    `acceptance_rate` is accepted drafts over levels drafted, the mean of the texts: the paper names no formula;
    its authors' code (`matchness`) adds a level for every forward of the draft model, whatever the number of
    nodes on it. `drafted_share` is of the emitted tokens: a/(a+1) at a accepted drafts a step. Nodes of the
    graphs but merged ones are drafted (`drafted_token_num`), rows of the draft model are fed (the nodes that
    got children, and the text itself), and `graph_success` is the share of drafts whose accepted path goes on
    behind a merged node.
    """
    counts = [step for run in runs for step in run.counts]
    rates = [
        sum(len(step.ranks) for step in run.counts) / levels
        for run in runs
        if (levels := sum(step.levels for step in run.counts))
    ]
    drafted = any(run.drafted for run in runs)
    accepted = sum(run.accepted for run in runs)
    bare = sum(run.forwards - 1 - len(run.counts) for run in runs)  # steps without a draft emit one token
    tokens = sum(step.tokens for step in counts) + bare if counts else 0
    return {
        "acceptance_rate": fmean(rates) if rates else None,
        "drafted_share": accepted / sum(len(run.tokens) for run in runs) if drafted else None,
        "accepted_per_step": accepted / sum(run.forwards for run in runs) if drafted else None,
        "drafted_per_token": sum(step.nodes for step in counts) / tokens if tokens else None,
        "fed_per_token": sum(step.rows for step in counts) / tokens if tokens else None,
        "graph_success": fmean(step.succeeded for step in counts) if counts else None,
    }


def rank_shares(ranks: Sequence[int], k: int) -> list[float] | None:
    """Return the share of the accepted drafts that were their parent's child of rank 1 to k (Figures 7, 8)."""
    by_rank = Counter(ranks)
    return [by_rank[rank] / len(ranks) for rank in range(1, k + 1)] if ranks else None


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
        lm, draft = self.model.lm, self.draft
        if spec.own:  # Self-SSD
            own = DraftConfig(f"self:{self.config.self_layers}")
            draft = load_draft(own, lm, rows=check_draft(own, self.model.text), adaptive=None)
        methods = Methods(lm, self.model.adaptive, DraftMethods(lm, draft))
        left = self.model.context - self._longest
        return methods.drafters(spec.decode, batch=1, capacity=self.capacity, left=left, watch=watch)

    def decoders(self, specs: Mapping[K, StudyDecoder]) -> dict[K, Decoder]:
        """Return the decoders side by side on one runner of the model."""
        counts = list[Counts]()
        drafters = {
            key: self.drafters(spec, lambda outcome: counts.append(Counts.of(outcome)))
            for key, spec in specs.items()
        }
        runner = self.runner(drafters.values())

        def counted(decoder: Decoder) -> Decoder:
            def run(prompt: TokenPrompt) -> DraftedRun:
                counts.clear()
                return DraftedRun(**asdict(decoder(prompt)), counts=tuple(counts))

            return run

        return {
            key: counted(loop_decoder(runner, drafter, self.limits(), specs[key].decode.sampling))
            for key, drafter in drafters.items()
        }

    def runner(self, drafters: Iterable[Drafters]) -> Runner:
        """Return a runner of the model, for trees of any of these."""
        return Runner(self.model.lm, capacity=self.capacity, max_rows=max(d.max_rows for d in drafters))

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

"""A model's answers to problems, and who produced each of their tokens.

A unit of the work is a batch: which answers are wanted, and of which model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from infer.api import Model, TextStep, generate
from infer.benchmarks.problem import Problem
from infer.config import DecodeConfig
from infer.engine.sampling import seed_from
from infer.quality.config import QualityConfig
from infer.text import Text, in_pieces

Ask = tuple[Problem, int]  # a problem, and which of its answers


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers that are decoded side by side and kept together; all end with the same texts."""

    who: str  # "model" or "base"
    decoder: str
    benchmark: str
    language: str
    temperature: float  # 0: the likeliest answer
    asks: tuple[Ask, ...]
    index: int

    @property
    def name(self) -> str:
        """That of the unit."""
        kind = f"sampled{self.temperature:g}" if self.temperature else "greedy"
        parts = (self.benchmark, self.language, self.who, self.decoder, kind, f"{self.index:04}")
        return "-".join(part for part in parts if part)

    @property
    def facts(self) -> dict[str, str | float]:
        """What the answers have in common, as it is kept beside them."""
        return {
            "benchmark": self.benchmark,
            "language": self.language,
            "who": self.who,
            "decoder": self.decoder,
            "temperature": self.temperature,
        }

    def decode(self, config: QualityConfig) -> DecodeConfig:
        """How it is decoded."""
        return DecodeConfig(
            method=self.decoder,
            temperature=self.temperature,
            top_p=config.top_p if self.temperature else 1.0,
            max_new_tokens=config.max_new_tokens,
            stop=list(self.asks[0][0].stop),
        )

    def seeds(self, seed: int) -> list[int]:
        """One for each answer, whatever stands beside it: the same for every model and decoder."""
        return [seed_from(seed, self.benchmark, self.language, problem.id, n) for problem, n in self.asks]


def plan(
    benchmarks: Mapping[str, Sequence[Problem]],
    config: QualityConfig,
    decoders: Sequence[str],
    apart: Collection[tuple[str, str]] = (),
) -> list[Batch]:
    """All of them: the model's by each of the decoders, then the base's by plain decoding, but on the
    benchmarks and languages `apart`. Sampled answers are wanted of problems that are executed.
    """
    ways = [("model", decoder) for decoder in decoders] + [("base", "plain")] * (config.base is not None)
    batches = list[Batch]()
    for (who, decoder), (benchmark, problems) in product(ways, benchmarks.items()):
        executed = [problem for problem in problems if problem.tests]
        kinds = ((0.0, _asks(problems, 1)), (config.temperature, _asks(executed, config.samples)))
        for temperature, asks in kinds:
            for language, part in _parts(asks, config.batch):
                if who == "base" and (benchmark, language) in apart:
                    continue
                batches.append(Batch(who, decoder, benchmark, language, temperature, part, len(batches)))
    return batches


def _asks(problems: Iterable[Problem], answers: int) -> list[Ask]:
    return [(problem, n) for problem in problems for n in range(answers)]


def _parts(asks: Iterable[Ask], size: int) -> Iterator[tuple[str, tuple[Ask, ...]]]:
    """By language, up to `size` that end with the same texts."""
    groups: dict[tuple[str, tuple[str, ...]], list[Ask]] = {}
    for ask in asks:
        groups.setdefault((ask[0].language, ask[0].stop), []).append(ask)
    for (language, _), alike in groups.items():
        for at in range(0, len(alike), size):
            yield language, tuple(alike[at : at + size])


Answer = dict[str, Any]


def answer(model: Model, batch: Batch, config: QualityConfig) -> list[Answer]:
    """Those that a batch asks for, in its order.

    A prompt that leaves no room for `max_new_tokens` in the model's context gets an empty answer, marked
    `too_long`: the problem stays in the count.
    """
    prompts = [ids_of(model.text, problem.prompt) for problem, _ in batch.asks]
    fit = [at for at, ids in enumerate(prompts) if len(ids) + config.max_new_tokens <= model.context]
    seeds = batch.seeds(config.seed)
    steps = _decoded(model, [prompts[at] for at in fit], batch.decode(config), [seeds[at] for at in fit])
    steps_by_prompt = dict(zip(fit, steps))
    return [
        {
            "id": problem.id,
            "sample": number,
            "tokens": [token for step in steps_by_prompt.get(at, ()) for token in step.tokens],
            "pieces": in_pieces(
                tokens for step in steps_by_prompt.get(at, ()) for tokens in zip(step.kinds, step.texts)
            ),
            "too_long": at not in steps_by_prompt,
        }
        for at, (problem, number) in enumerate(batch.asks)
    ]


def ids_of(text: Text, prompt: Any) -> list[int]:
    """Return a prompt's ids as the tuned model was trained on them; the base model gets the same."""
    return text.encode(prompt) if isinstance(prompt, str) else text.infill(prompt)


def _decoded(
    model: Model, prompts: Sequence[list[int]], decode: DecodeConfig, seeds: Sequence[int]
) -> list[list[TextStep]]:
    steps: list[list[TextStep]] = [[] for _ in prompts]
    for step in generate(model, prompts, decode, seeds=seeds) if prompts else ():
        steps[step.sequence].append(step)
    return steps


def completion(answer: Answer) -> str:
    """Return the whole text, with what ended it."""
    return "".join(text for _, text in answer["pieces"])

"""A model's answers to problems, and who produced each of their tokens."""

from collections.abc import Sequence
from typing import Any

from infer.api import Model, TextStep, generate
from infer.config import DecodeConfig
from infer.output import in_pieces
from infer.quality.batches import Batch
from infer.quality.config import QualityConfig
from infer.text import Text

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
    found = dict(zip(fit, steps))
    return [
        {
            "id": problem.id,
            "sample": number,
            "tokens": [token for step in found.get(at, ()) for token in step.tokens],
            "pieces": in_pieces(told for step in found.get(at, ()) for told in zip(step.kinds, step.texts)),
            "too_long": at not in found,
        }
        for at, (problem, number) in enumerate(batch.asks)
    ]


def ids_of(text: Text, prompt: Any) -> list[int]:
    """A problem's prompt as the tuned model was trained to read it; the base model is given the same ids."""
    return text.encode(prompt) if isinstance(prompt, str) else text.infill(prompt)


def _decoded(
    model: Model, prompts: Sequence[list[int]], decode: DecodeConfig, seeds: Sequence[int]
) -> list[list[TextStep]]:
    found: list[list[TextStep]] = [[] for _ in prompts]
    for step in generate(model, prompts, decode, seeds=seeds) if prompts else ():
        found[step.sequence].append(step)
    return found


def completion(answer: Answer) -> str:
    """The whole text, with what ended it."""
    return "".join(text for _, text in answer["pieces"])

"""Sets of prompts as token ids, to decode for speed.

Which prompts are taken is decided by the seed alone, before anything is decoded.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import TypeVar

from conf import UserError
from infer.benchmarks import PromptSetConfig
from infer.benchmarks.reading import read_problems
from infer.benchmarks.rows import Problem
from infer.config import Infill
from infer.text import Text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt; `ends` are the ids that end its text beside EOS: EOT, where it asks for a middle.

    `max_new_tokens` is the limit of its set; None: that of the whole run.
    """

    id: str
    ids: tuple[int, ...]
    ends: frozenset[int]
    before: str  # the text that the new one follows
    after: str  # and the one that follows it, where it is a middle
    max_new_tokens: int | None = None


def load_prompts(name: str, config: PromptSetConfig, text: Text, *, seed: int) -> list[TokenPrompt]:
    """Draw `count` prompts of at most `max_tokens`, or truncated to `truncate`, without replacement from the
    `first` problems; equally many of each category and language while they last.

    Raises UserError as `read_problems` does, for infillings of a model that has none, for too few prompts
    of fitting length, and for infillings that would be truncated.
    """
    problems = read_problems(name, config)
    problems = problems[: max(1, int(config.first * len(problems)))]
    if config.truncate and any(isinstance(problem.prompt, Infill) for problem in problems):
        raise UserError(
            f"prompts.{name}.truncate must be null for infilling prompts, which need both prefix and suffix, "
            f"got {config.truncate}. Use prompts.{name}.max_tokens"
        )
    random.Random(seed).shuffle(problems)
    groups = dict[tuple[str, str], list[Problem]]()
    for problem in problems:
        groups.setdefault((problem.category, problem.language), []).append(problem)
    try:
        fitting = _in_turn(_fitting(group, config, text) for group in groups.values())
        prompts = list(islice(fitting, config.count))
    except UserError as error:
        raise UserError(f"prompts.{name}: {error}") from error
    limit = f" max_tokens={config.max_tokens}" if config.max_tokens else ""
    if config.count and len(prompts) < config.count:
        raise UserError(
            f"prompts.{name}.count must be at most {len(prompts)}, the prompts of {len(problems)} that fit"
            f"{limit}, got {config.count}"
        )
    if not prompts:
        raise UserError(f"prompts.{name} must have a prompt that fits{limit}, got none of {len(problems)}")
    return prompts


def _fitting(problems: Iterable[Problem], config: PromptSetConfig, text: Text) -> Iterator[TokenPrompt]:
    for problem in problems:
        prompt = replace(token_prompt(problem, text), max_new_tokens=config.max_new_tokens)
        if config.truncate is not None:
            prompt = truncated(prompt, text, config.truncate)
        if config.max_tokens is None or len(prompt.ids) <= config.max_tokens:
            yield prompt


def _in_turn(groups: Iterable[Iterator[T]]) -> Iterator[T]:
    missing = object()
    for turn in zip_longest(*groups, fillvalue=missing):
        yield from (prompt for prompt in turn if prompt is not missing)  # type: ignore[misc]


def truncated(prompt: TokenPrompt, text: Text, most: int) -> TokenPrompt:
    """Return the prompt, or BOS and its last tokens, `most` in all: what it asks for stands at its end.

    GSD (Appendix A) truncates inputs to 512 tokens and does not say at which end.
    """
    if len(prompt.ids) <= most:
        return prompt
    bos = text.encode("")
    ids = (*bos, *prompt.ids[len(prompt.ids) - (most - len(bos)) :])
    return replace(prompt, ids=ids, before=text.decode(ids))


def token_prompt(problem: Problem, text: Text) -> TokenPrompt:
    """Return a problem as it is given to a model; its id has the language where that is not Python."""
    prompt = problem.prompt
    if isinstance(prompt, Infill):
        ids, before, after = text.infill(prompt), prompt.prefix, prompt.suffix
    else:
        ids, before, after = text.encode(prompt), prompt, ""
    if not ids:
        raise UserError(f"{problem.id} must have a prompt of at least one token, got none")
    id = problem.id if problem.language in ("", "python") else f"{problem.language}/{problem.id}"
    return TokenPrompt(id, tuple(ids), text.ends(ids), before, after)

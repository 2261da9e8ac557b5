"""Sets of prompts that nothing is judged by: questions, instructions, articles, and any text."""

from infer.benchmarks import PromptSetConfig, SourceConfig
from infer.benchmarks.rows import Problem, Row, by_row

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}

GSM8K_RULES = (
    "GSM8K (Cobbe et al. 2021), test split: 'Question: ...', a newline, 'Answer:', without examples. For speed "
    "only: the text ends at EOS or at the limit of new tokens."
)
SPEC_BENCH_RULES = (
    "Spec-Bench (Xia et al. 2024): the first turn of each question as it stands, without a chat template, "
    "equally many of each of its six tasks (the eight categories of MT-Bench are one). For speed only."
)
ALPACA_RULES = (
    "Alpaca (Taori et al. 2023): the instruction, and its input where it has one, in the prompt that Alpaca "
    "was trained with, up to '### Response:'. For speed only."
)
XSUM_RULES = "XSum (Narayan et al. 2018): 'Article: ...', a newline, 'Summary:'. For speed only."
WMT14_RULES = (
    "WMT14 (Bojar et al. 2014), English to German: 'English: ...', a newline, 'German:', without examples. For "
    "speed only."
)
JSONL_RULES = "A file's texts as they stand, or the first lines of each. For speed only."

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write "
    "a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:"
)


@by_row
def gsm8k(row: Row, config: SourceConfig) -> Problem:
    """Read the field question."""
    return Problem(f"GSM8K/{row.number}", f"Question: {row.text('question')}\nAnswer:")


@by_row
def spec_bench(row: Row, config: SourceConfig) -> Problem:
    """Read the fields question_id, category, turns."""
    turns, category = row.texts("turns"), row.text("category")
    if not turns:
        raise row.lacks("at least one turn", "turns")
    task = "mt_bench" if category in MT_BENCH else category
    return Problem(f"Spec-Bench/{row.whole('question_id')}", turns[0], category=task)


@by_row
def alpaca(row: Row, config: SourceConfig) -> Problem:
    """Read the fields instruction, and input, or instances with an input each (the seed tasks)."""
    instances = row.values.get("instances")
    given = instances[0] if isinstance(instances, list) and instances else row.values
    text = given.get("input") if isinstance(given, dict) else None
    if text is not None and not isinstance(text, str):
        raise row.lacks("a text 'input'", "instances", "input")
    template = ALPACA_INPUT if text else ALPACA
    return Problem(f"Alpaca/{row.number}", template.format(instruction=row.text("instruction"), input=text))


@by_row
def xsum(row: Row, config: SourceConfig) -> Problem:
    """Read the field document."""
    return Problem(f"XSum/{row.number}", f"Article: {row.text('document')}\nSummary:")


@by_row
def wmt14(row: Row, config: SourceConfig) -> Problem:
    """Read the field en, or translation with it."""
    pair = row.values.get("translation", row.values)
    if not isinstance(pair, dict) or not isinstance(pair.get("en"), str):
        raise row.lacks("a text 'en', or a 'translation' with it", "translation", "en")
    return Problem(f"WMT14/{row.number}", f"English: {pair['en']}\nGerman:")


@by_row
def jsonl(row: Row, config: PromptSetConfig) -> Problem:
    """Read the field `key`; of its text the first `share` of the lines, at least one."""
    text = row.text(config.key or "prompt")
    lines = text.splitlines(keepends=True)
    part = "".join(lines[: max(1, round(config.share * len(lines)))]) if config.share < 1 else text
    return Problem(f"{row.source}/{row.number}", part)

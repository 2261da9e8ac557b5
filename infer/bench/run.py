"""python -m infer.bench: measure each part into its own folder, then write the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conf.console import print_line
from conf.errors import ANOTHER, NOT_IDENTICAL, UserError
from conf.runs.files import read_result, with_checksum, write_json
from conf.runs.fingerprint import MANIFEST
from conf.runs.stage import (
    collect_provenance,
    is_finished,
    model_directories,
    reopen,
    write_manifest,
)
from infer.bench.config import BENCHMARKS, NEED_ADAPTIVE, PARTS, BenchConfig
from infer.bench.gsd import GsdPart
from infer.bench.harness import (
    Part,
    WorkerGroup,
    circumstances,
    digest,
    hardware,
    init_workers,
    result_folder,
)
from infer.bench.load import LoadPart
from infer.bench.names import PEER
from infer.bench.prompts import (
    InfillingPrompts,
    Prompt,
    expand_names,
    name_of,
    read_prompts,
)
from infer.bench.quality import QualityPart
from infer.bench.report import RESULT, print_report, write_report
from infer.bench.speed import SpeedPart
from infer.config import decontaminated
from infer.models.checkpoint import ModelDirectory
from infer.models.draft import base_pieces, missing_id
from infer.requests import check_length

# The parts that decode prompt sets, each with its class.
SET_PARTS: dict[str, type[SpeedPart] | type[GsdPart] | type[LoadPart]] = {
    "speed": SpeedPart,
    "gsd": GsdPart,
    "load": LoadPart,
}

# The types that give the same text with every decoder.
EXACT_TYPES = ("float32", "int8")


def bench(config: BenchConfig) -> None:
    """Measure the parts that are not finished, write the report and print it.

    Raises UserError for inputs that cannot be measured, and if a text in float32 or int8 differs
    from the text of plain decoding.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    workers = init_workers(divided=config.tensor_parallel)
    directory = ModelDirectory(config.model)
    dtype = workers.agreed(directory.choose_dtype(config.dtype))
    config = replace(config, dtype=dtype)
    # All files are read before the first measurement, so that a wrong one ends the command at once.
    parts = {name: read_part(name, config, directory) for name in config.parts}
    if not any(part.tasks for part in parts.values()):
        reasons = (f"part {name}: {part.left_out()}" for name, part in parts.items())
        raise UserError(f"nothing to measure. {' '.join(reasons)}")
    for name in config.parts:
        # popped, so that the models of a part are freed before the next
        measure_part(name, parts.pop(name), config, directory, workers)
    if workers.first:
        report = write_report(Path(config.out), config.tracker)
        print_report(report, [name for name in config.parts if report[name]])
        print_line(f"bench: plots and tables are in {config.out}/index.html")
        check_same(report)


def read_part(name: str, config: BenchConfig, directory: ModelDirectory) -> Part:
    """Return a part with its prompts or problems, without its models."""
    if name == "quality":
        return QualityPart(config, directory)
    sets = read_prompt_sets(config, directory)
    if not (name == "load" and config.load.endpoint):  # a server has its own context
        check_context(name, config, directory.context, sets)
    if name == "speed" and config.base:
        reader = f" for base={config.base}"
        check_context(name, config, ModelDirectory(config.base).context, sets, reader)
    return SET_PARTS[name](config, directory, sets)


def check_context(
    part: str,
    config: BenchConfig,
    context: int | None,
    sets: Mapping[str, Sequence[Prompt]],
    reader: str = "",
) -> None:
    """Raise UserError if a prompt and its new tokens exceed the model's context.

    The check needs only the tokenizer. Without a `context` the loaded model checks each prompt.
    `reader` names in the message a model other than `model`.
    """
    if context is None:
        return
    new = getattr(config, part).max_new_tokens
    for name, prompts in sets.items():
        for prompt in prompts:
            own = prompt.max_new_tokens if part == "speed" else None
            check_length(
                prompt.ids,
                f"prompts ({name}, {prompt.id}){reader}",
                new=own or new,
                context=context,
                setting="infilling_tokens" if own else f"{part}.max_new_tokens",
                cure="lower prompt_tokens",
            )


def measure_part(
    name: str,
    part: Part,
    config: BenchConfig,
    directory: ModelDirectory,
    workers: WorkerGroup,
) -> None:
    """Measure a part into its folder, unless it is finished."""
    inputs = {
        "model": config.model,
        "base": config.base,
        "draft": config.draft,
    }
    unused = (group for group in PARTS if group not in config.groups(name))
    # `content` identifies the prompts, so the paths of their files are ignored.
    ignored = ("tracker", "part", "prompts_folder", "gguf", *unused)
    facts = collect_provenance(config, model_directories(inputs), ignore=ignored)
    facts |= {"content": digest(part.content), "hardware": hardware()}
    ranks = workers.world if workers.divided else 1  # the number of ranks of one model
    if ranks > 1:
        facts["ranks"] = ranks
    out = Path(config.out) / name
    check_other_parts(config, name, facts["inputs"]["model"])
    if is_finished(out, name, facts):
        if not (out / RESULT).is_file():
            raise UserError(
                f"out={config.out}: the finished part {name} has no {RESULT}. "
                f"Delete {out} to measure it again."
            )
        if part.is_complete(read_result(out / RESULT)):
            if workers.first:
                print_line(f"bench: {out} is finished: nothing to do")
            return
        workers.wait()  # until all ranks have read the result
        if workers.first:
            print_line(f"bench: {out} is continued: more can be measured now")
            reopen(out, facts)
    if not part.tasks:
        if workers.first:
            print_line(f"bench: part {name} is left out: {part.left_out()}")
        return
    known = decontaminated(config.model)
    if workers.first:
        for line in left_out(name, config, directory):
            print_line(f"bench: {line}", error=True)
        print_line(f"bench: loading the models for part {name} ...")
    part.load(workers)
    with result_folder(out, facts, workers) as partial:
        records = part.run(partial, workers)
        measured = part.measure_model() if workers.first or workers.divided else {}
        if workers.first:
            result = measured | part.result(records, partial)
            warnings = result.get("warnings", [])
            warnings += contamination(known, result["rows"])
            shared = {"kind": name, "gated": directory.gated, "warnings": warnings}
            shared["ranks"] = ranks
            result = {**shared, **circumstances(config), **result}
            write_json(partial / RESULT, with_checksum(result))
            write_manifest(partial, name, facts)


def left_out(
    name: str, config: BenchConfig, directory: ModelDirectory
) -> Iterator[str]:
    """Yield a sentence for the decoders of a part that the model cannot have."""
    if names := config.without_draft_model(name):
        yield f"{name}.decoders={','.join(names)} left out: give draft=DIR or draft=self:N"
    decoders = [] if name == "gsd" else getattr(config, name).decoders
    adaptive = [each for each in decoders if each in NEED_ADAPTIVE]
    if adaptive and not directory.adaptive:
        yield (
            f"{name}.decoders={','.join(adaptive)} left out: model={config.model} has no adaptive tokens"
        )


def check_other_parts(config: BenchConfig, name: str, model: str) -> None:
    """Raise UserError if another finished part is of a model with another fingerprint than `model`."""
    for other in PARTS:
        folder = Path(config.out) / other
        if other == name or not (folder / MANIFEST).is_file():
            continue
        if read_result(folder / MANIFEST)["inputs"]["model"] != model:
            raise UserError(
                f"out={config.out}: the finished part {other} is of another model than "
                f"model={config.model}. Use another out=, or delete {folder}.",
                page=ANOTHER,
            )


def read_prompt_sets(
    config: BenchConfig, directory: ModelDirectory
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts by prompt set. Raises UserError if the base does not have all their ids."""
    sources = expand_names(config.prompts)
    read = partial(
        read_prompts,
        text=directory.text,
        folder=directory.path,
        count=config.count,
        seed=config.seed,
        published=config.prompts_folder,
        infilling=InfillingPrompts(
            config.infilling_share, config.infilling_tokens, config.infilling_order
        ),
    )
    lengths = config.prompt_lengths
    sets: dict[str, Sequence[Prompt]] = {}
    for source in sources:
        name = name_of(source)
        for length in lengths:
            window = (length, max(lengths))
            sets[f"{name}-{length}"] = read(source, max_tokens=length, window=window)
        if not lengths:
            sets[name] = read(source, max_tokens=config.prompt_tokens)
    if len(sets) < len(sources) * max(1, len(lengths)):
        raise UserError(
            f"prompts must be prompt sets with different names, got {', '.join(config.prompts)}. "
            "Rename a file, or measure one set with another out=."
        )
    prompts = [(p.id, p.ids) for prompts in sets.values() for p in prompts]
    if config.base:
        missing = missing_id(base_pieces(config.base, directory.text), prompts)
        if missing:
            raise UserError(
                f"base={config.base} must have the ids of every prompt, got {missing}. Omit base, or "
                "choose other prompts."
            )
    return sets


def contamination(
    known: Sequence[str] | None, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return a warning for each benchmark that the training data may contain.

    `known` are the benchmarks that the data were decontaminated against; None: not known.
    """
    if known is None:
        return []
    names = dict.fromkeys(row.get("prompt_set", row.get("benchmark")) for row in rows)
    return [
        f"{name}: the training data was not decontaminated against this benchmark. Prepare it with "
        "benchmarks=all."
        for name in names
        if benchmark_of(name) not in ("", "lines", *known)
    ]


def benchmark_of(name: str) -> str:
    """Return the benchmark of a set of prompts or problems, by its name or its file's; "" for another set."""
    first, _, rest = name.lower().removeprefix("sanitized-").partition("-")
    if first != "humaneval" or not rest:
        return first if first in BENCHMARKS else ""
    # A file of human-eval-infilling, or MultiPL-E's humaneval-LANG.
    return "infilling" if "infilling" in rest else "multipl_e"


def check_same(report: Mapping[str, Any]) -> None:
    """Raise UserError if a text in an exact type differs from plain decoding; peers may differ."""
    for name in PARTS:
        part = report.get(name)
        if not part or (dtype := part["settings"]["dtype"]) not in EXACT_TYPES:
            continue
        for row in part["rows"]:
            differing = row["compared"] - row["same"]
            decoder = row.get("decoder") or row["setting"]
            if differing and not decoder.startswith(PEER):
                name = row.get("prompt_set") or row["benchmark"]
                raise UserError(
                    f"{dtype} texts must equal plain decoding's; different texts: {differing} "
                    f"({decoder}, {name}).",
                    page=NOT_IDENTICAL,
                )

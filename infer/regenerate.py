"""python -m infer.regenerate: generate training text with the model, from documents or prompts.

    OUT/own-00000.jsonl   a continued document has id, language, content and prefix: the first
                          `prefix` characters of `content` are the document's, the rest is
                          the model's. An answered prompt has id, language, messages (the last
                          message is the model's) and ends: true if the model ended it
    OUT/manifest.json     written last

`python -m data_prep experiment=own` prepares continued documents, experiment=own_chat
answers. Under torchrun the texts are divided over the ranks in batches, and each batch is
saved when it is done. The output is byte-identical for any number of ranks and after a kill.

infer/own_text.py chooses the documents and prompts, and generates their texts.
With `endpoint` a server with OpenAI's API answers the prompts with its own chat template,
`batch` requests at once. Each answer is saved as it arrives.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.console import print_line, print_once
from conf.errors import AllRanksError, counted
from conf.runs.files import write_bytes
from conf.runs.fingerprint import fingerprint_file
from conf.runs.stage import (
    collect_provenance,
    is_finished,
    write_manifest,
)
from conf.settings.cli import run
from infer.config import check_directory
from infer.engine.sampling import seed_from
from infer.own_text import (
    ChatPrompts,
    DocumentSpan,
    TrainingDocuments,
    before_loop,
    chat_row,
)
from infer.prompts import ChatPrompt
from infer.regenerate_config import RegenerateConfig

if TYPE_CHECKING:
    from infer.endpoint import Answer

KIND = "own_text"
UNITS = "units"  # the folder of finished batches; removed at the end
SHARD_DOCUMENTS = 4096
SEEDS = 2**31  # 31 bits, because servers accept seeds of different widths
#: Splits a server's answer, which comes without its tokens, into words of about their length.
WORDS = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")
#: Finish reasons of an answer that the model ended. A server may also abort an answer.
ENDED = ("stop", "tool_calls", "function_call")
MESSAGE_KEYS = ("tool_calls", "reasoning_content", "reasoning")  # kept in the output


def main(config: RegenerateConfig) -> None:
    """Write the texts, unless the folder already contains the result."""
    inputs = {}
    ignored = ["endpoint", "timeout"]
    if config.endpoint:
        # A rerun may use another server, or fewer concurrent requests.
        ignored += ["batch"]
    else:
        check_directory(config.model)
        inputs["model"] = config.model
    if config.data.path:
        inputs["data.path"] = config.data.path
    origin = collect_provenance(config, inputs, ignored)
    for file in filter(os.path.isfile, config.prompts):
        origin["inputs"][file] = fingerprint_file(Path(file))
    if is_finished(config.out, KIND, origin):
        line = f"{config.out} is finished: nothing to do"
    elif config.endpoint:
        line = write_answers(config, config.endpoint, origin)
    elif config.data.path:
        line = write_own_text(config, TrainingDocuments(config), origin)
    else:
        line = write_own_text(config, ChatPrompts(config), origin)
    print_once(f"regenerate: {line}")


def write_own_text(
    config: RegenerateConfig,
    source: "TrainingDocuments | ChatPrompts",
    origin: dict[str, Any],
) -> str:
    """Write `out` together with the other ranks; return what was written, for rank 0."""
    # Imported late, so that an error in the settings or a finished run loads no PyTorch.
    from infer.api import load
    from infer.bench.harness import Records, init_workers, result_folder
    from infer.chat import check_template
    from infer.models.checkpoint import ModelDirectory

    workers = init_workers()
    directory = ModelDirectory(config.model)
    dtype = workers.agreed(directory.choose_dtype(config.dtype))
    source.check_tokenizer(directory.text)
    if config.question or not config.data.path:
        check_template(directory.path)
    batches: dict[str, Sequence[Any]] = {}

    def temperature(text: DocumentSpan | ChatPrompt) -> float:
        return config.decode(text.id).temperature

    # The texts of a batch are decoded together, so they share a temperature.
    documents: Sequence[Any] = sorted(source.drawn(), key=temperature)
    if directory.context:  # otherwise the loaded model checks each text
        source.check_context(documents, directory.text, directory.context)
    for shared, group in groupby(documents, temperature):
        texts = list(group)
        for start in range(0, len(texts), config.batch):
            # With the dtype, because "auto" may be another one where the run continues.
            name = f"{dtype}-{shared:g}-{start:08}"
            batches[name] = texts[start:][: config.batch]
    with result_folder(config.out, origin, workers) as partial:
        units = Records(partial / UNITS, list(batches))
        model = load(config.model, dtype, workers.device())

        def unit(name: str) -> dict[str, Any]:
            return {"rows": source.write(model, batches[name])}

        units.make(workers, "batches of texts", unit)
        written = 0
        if workers.first:  # only this rank reads the batches, because it removes them
            rows = (units.load(name)["rows"] for name in batches)
            written = finish(partial, origin, rows)
        check_written(workers.agreed(written), partial)
    drawn = "documents" if config.data.path else "prompts"
    return f"texts: {written}, {drawn}: {len(documents)}"


def write_answers(
    config: RegenerateConfig, endpoint: str, origin: dict[str, Any]
) -> str:
    """Write `out` from the answers of a server; return what was written, for rank 0.

    Under torchrun the prompts are divided over the ranks.
    """
    # Imported late, so that an error in the settings or a finished run loads no PyTorch.
    from infer.bench.harness import Records, init_workers, result_folder
    from infer.bench.progress import progress
    from infer.endpoint import Answer, ask

    workers = init_workers()
    prompts = {f"{n:08}": p for n, p in enumerate(ChatPrompts(config).drawn())}
    with result_folder(config.out, origin, workers) as partial:
        units = Records(partial / UNITS, list(prompts))
        bodies = {
            name: request_body(prompts[name], config) for name in units.open(workers)
        }
        with progress("answers", len(bodies), silent=not workers.first) as advance:

            def save(name: str, answer: Answer | str) -> None:
                prompt = prompts[name]
                if isinstance(answer, str):
                    reason = f"regenerate: {prompt.id} is left out: {answer}"
                    print_line(reason, error=True)
                    units.save(name, {"rows": [], "finish": "refused"})
                else:
                    rows = answer_rows(prompt, answer)
                    units.save(name, {"rows": rows, "finish": answer.finish})
                advance()

            ask(endpoint, bodies, save, at_once=config.batch, timeout=config.timeout)
        workers.wait()
        written = 0
        if workers.first:
            records = units.read().values()
            finishes = dict(Counter(record["finish"] for record in records))
            rows = [record["rows"] for record in records]
            report_answers(config, len(prompts), sum(map(len, rows)), finishes)
            written = finish(partial, origin, rows, finishes=finishes)
        check_written(workers.agreed(written), partial)
    return f"texts: {written}, prompts: {len(prompts)}"


def request_body(prompt: ChatPrompt, config: RegenerateConfig) -> dict[str, Any]:
    """Return the body of an OpenAI chat completions request for a prompt.

    top_p=1 makes sampled answers come from the model's full distribution even if the
    server's default differs.
    """
    temperature = config.decode(prompt.id).temperature
    body: dict[str, Any] = {
        "model": config.model,
        "messages": list(prompt.messages),
        "max_tokens": config.max_new_tokens,
        "temperature": temperature,
    }
    if temperature:
        body |= {"top_p": 1.0, "seed": seed_from(config.seed, prompt.id) % SEEDS}
    return body | ({"tools": list(prompt.tools)} if prompt.tools else {})


def answer_rows(prompt: ChatPrompt, answer: "Answer") -> list[dict[str, Any]]:
    """Return the row of an answer in a list; the list is empty for an empty answer.

    The text is cut where its words begin to loop.
    """
    given = answer.message.get("content") or ""
    words: list[str] = WORDS.findall(given.rstrip("\ufffd"))
    ids = {word: n for n, word in enumerate(dict.fromkeys(words))}
    text = "".join(words[: len(before_loop([ids[word] for word in words]))])
    kept = {name: v for name in MESSAGE_KEYS if (v := answer.message.get(name))}
    if not text.strip() and "tool_calls" not in kept:
        return []
    message = {"role": "assistant", "content": text, **kept}
    ends = text == given and answer.finish in ENDED
    return [chat_row(prompt.id, [*prompt.messages, message], ends, prompt.tools)]


def report_answers(
    config: RegenerateConfig, prompts: int, written: int, finishes: Mapping[str, int]
) -> None:
    """Print the numbers of missing and of cut-off answers to standard error."""
    if written < prompts:
        print_line(
            f"regenerate: no answer to {prompts - written} of {counted(prompts, 'prompt')}: it was "
            "empty, or the server refused the prompt.",
            error=True,
        )
    if cut := finishes.get("length"):
        print_line(
            f"regenerate: max_new_tokens={config.max_new_tokens} cut off {cut} of "
            f"{counted(prompts, 'answer')}. Raise it for complete answers.",
            error=True,
        )


def finish(
    partial: Path,
    origin: Mapping[str, Any],
    batches: Iterable[list[dict[str, Any]]],
    **facts: Any,
) -> int:
    """Write the shards and the manifest, and remove the records; return the number of rows.

    Without any row it writes nothing.
    """
    written = write_shards(partial, batches)
    if not written:
        return 0
    write_manifest(partial, KIND, origin, documents=written, **facts)
    shutil.rmtree(partial / UNITS)
    return written


def check_written(written: int, partial: Path) -> None:
    """Raise AllRanksError if no row was written; every rank must call it with the same number."""
    if not written:
        raise AllRanksError(
            f"no prompt got a text: all answers were empty, refused, or longer than the model's "
            f"context. Use other prompts or another model, and delete {partial}."
        )


def write_shards(folder: Path, batches: Iterable[list[dict[str, Any]]]) -> int:
    """Write the rows of all batches in order; return the number of rows."""
    lines = (
        json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
        for rows in batches
        for row in rows
    )
    total = 0
    for index in count():
        shard = list(islice(lines, SHARD_DOCUMENTS))
        if not shard:
            break
        write_bytes(folder / f"own-{index:05}.jsonl", b"".join(shard))
        total += len(shard)
    return total


if __name__ == "__main__":
    run("regenerate", RegenerateConfig, main)

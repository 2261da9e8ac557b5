"""Data preparation against the bare tokenizer and against a plain `datasets.map`, in one run.

    python -m tests.benchmarks.data_prep SAMPLE TOKENIZER [--workers 2] [--rounds 3] [--copies 1]

SAMPLE is a folder in StarCoder's layout (a folder of parquet files per language), TOKENIZER
one with tokenizer.json. All take turns on the same text and cores, each in processes of its
own, and print MB/s of text (metadata stripped):

    tokenizers      the tokenizer as it comes, encode_batch_fast on texts in memory, nothing else
    encoder         this project's encoder alone, on texts in memory
    sentencepiece   the same by sentencepiece, where it is installed and there is a tokenizer.model
    datasets.map    the same job as a plain script: read, filter, decontaminate, infilling layout,
                    the tokenizer as it comes, pack, save; with this project's pure functions
    data_prep       python -m data_prep as a function call: worker processes started, shards written

With --copies each document is read that often under other names, for sizes beyond the sample.
The last line is JSON: median speeds, medians of the rounds' ratios, and the highest resident
memory that any process of data_prep had.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf import settings
from data_prep.config import DataPrepConfig, VocabConfig
from data_prep.sources import METADATA

ADAPTIVE = [32011]


def read_texts(sample: Path) -> list[str]:
    paths = sorted(sample.glob("*/*.parquet"))
    rows = (
        text for path in paths for text in pq.read_table(path)["content"].to_pylist()
    )
    return [METADATA.sub("", text, count=1) for text in rows]


def library(tokenizer: Path) -> Any:
    """The tokenizer as it comes, except that no text becomes a control id."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return lambda texts: loaded.encode_batch_fast(texts, add_special_tokens=False)


def encoder(tokenizer: Path) -> Any:
    from data_prep.encode import Encoder
    from data_prep.vocab import find_vocab, load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return Encoder(loaded, find_vocab(loaded, VocabConfig(adaptive=ADAPTIVE))).encode


def sentencepiece(tokenizer: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(str(tokenizer / "tokenizer.model")).encode


BARE = {"tokenizers": library, "encoder": encoder, "sentencepiece": sentencepiece}


def encode_texts(
    name: str,
    sample: Path,
    tokenizer: Path,
    rank: int,
    workers: int,
    start: Any,
    end: Any,
) -> None:
    """One process of a bare tokenizer: its share of the texts, between two barriers."""
    texts = read_texts(sample)[rank::workers]
    encode = BARE[name](tokenizer)
    start.wait()
    for first in range(0, len(texts), 256):
        encode(texts[first : first + 256])
    end.wait()


def time_bare(name: str, sample: Path, tokenizer: Path, workers: int) -> float:
    context = multiprocessing.get_context("spawn")
    start, end = context.Barrier(workers + 1), context.Barrier(workers + 1)
    arguments = (name, sample, tokenizer)
    processes = [
        context.Process(
            target=encode_texts, args=(*arguments, rank, workers, start, end)
        )
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    start.wait()
    begun = time.perf_counter()
    end.wait()
    seconds = time.perf_counter() - begun
    for process in processes:
        process.join()
    return seconds


@lru_cache
def plain_tools(sample: Path, tokenizer: Path) -> tuple[Any, ...]:
    """What each process of the plain script needs: settings, control ids, benchmarks, tokenizer."""
    from data_prep.filters import Index, entries, index_entries
    from data_prep.vocab import find_vocab, load_tokenizer

    config = data_prep_settings(sample, tokenizer, 1, Path())
    vocab = find_vocab(load_tokenizer(tokenizer), config.vocab)
    return (
        config,
        vocab,
        Index(**index_entries(entries(config.decontaminate))),
        library(tokenizer),
    )


def plain_encode(
    batch: dict[str, list[Any]], sample: Path, tokenizer: Path
) -> dict[str, list[Any]]:
    from data_prep.document import Document, generator
    from data_prep.encode import choose_cuts, choose_mode, document_segments
    from data_prep.filters import reason_to_drop

    config, vocab, index, encode = plain_tools(sample, tokenizer)
    texts = [METADATA.sub("", text, count=1) for text in batch["content"]]
    good = [
        reason_to_drop(Document("", text, ""), config.filters) is None for text in texts
    ]
    clean = [match is None for match in index.search(texts)]
    result: dict[str, list[Any]] = {"ids": [], "mode": []}
    for id, text, keep in zip(batch["id"], texts, map(all, zip(good, clean))):
        if keep:
            mode = choose_mode(generator(0, "mode", id), fim_rate=0.5, spm_rate=0.5)
            cuts = choose_cuts(generator(0, "cuts", id), len(text))
            segments = document_segments(
                text, mode, cuts, vocab=vocab, lead=lambda text: text
            )
            encoded = iter(
                encode([segment for segment in segments if isinstance(segment, str)])
            )
            result["ids"].append(
                [
                    i
                    for s in segments
                    for i in (next(encoded).ids if isinstance(s, str) else [s])
                ]
            )
            result["mode"].append(int(mode))
    return result


def plain_pack(
    batch: dict[str, list[Any]], sample: Path, tokenizer: Path
) -> dict[str, list[Any]]:
    from data_prep.encode import Mode
    from data_prep.packing import Encoded, pack

    config, vocab, _, _ = plain_tools(sample, tokenizer)
    documents = [
        Encoded(
            "",
            0,
            Mode(mode) if len(ids) <= config.seq_len else Mode.PLAIN,
            np.array(ids),
        )
        for ids, mode in zip(batch["ids"], batch["mode"])
    ]
    packed = pack(documents, config.seq_len)
    return {
        "tokens": [sequence.tokens(config.seq_len, vocab.eos) for sequence in packed]
    }


def run_datasets_map(sample: Path, tokenizer: Path, workers: int, out: Path) -> None:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = sorted(map(str, sample.glob("*/*.parquet")))
    rows = load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(out / "cache")
    )
    more = {
        "batched": True,
        "num_proc": workers,
        "fn_kwargs": {"sample": sample, "tokenizer": tokenizer},
    }
    encoded = rows.map(plain_encode, remove_columns=rows.column_names, **more).shuffle(
        seed=0
    )
    packed = encoded.map(
        plain_pack, remove_columns=encoded.column_names, batch_size=2000, **more
    )
    packed.save_to_disk(str(out / "saved"))


def data_prep_settings(
    sample: Path, tokenizer: Path, workers: int, out: Path
) -> DataPrepConfig:
    arguments = [
        "experiment=starcoder",
        f"data.path={sample}",
        f"tokenizer={tokenizer}",
        f"workers={workers}",
    ]
    return settings("data_prep", DataPrepConfig, [*arguments, f"out={out / 'shards'}"])


def run_data_prep(sample: Path, tokenizer: Path, workers: int, out: Path) -> None:
    from data_prep.pipeline import prepare

    prepare(data_prep_settings(sample, tokenizer, workers, out))


JOBS = {"datasets.map": run_datasets_map, "data_prep": run_data_prep}


def time_job(
    name: str, sample: Path, tokenizer: Path, workers: int
) -> tuple[float, float]:
    """Seconds of a job in a fresh interpreter, imports not counted, and its largest process in GB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.data_prep",
            str(sample),
            str(tokenizer),
        ]
        command += ["--workers", str(workers), "--job", name, "--out", folder]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        largest = 0.0
        while process.poll() is None:
            largest = max(largest, largest_of_session(process.pid))
            time.sleep(1)  # seldom, since looking costs the cores that are measured
        assert process.returncode == 0 and process.stdout is not None
        return float(process.stdout.read().splitlines()[-1]), largest


def largest_of_session(session: int) -> float:
    """The highest resident memory in GB that any living process of the session has had."""
    highest = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getsid(int(status.parent.name)) == session:
                lines = status.read_text().splitlines()
                highest += [
                    int(line.split()[1]) for line in lines if line.startswith("VmHWM")
                ]
        except (OSError, ValueError):  # it has just ended
            continue
    return max(highest) / 1e6


def run_job(name: str, sample: Path, tokenizer: Path, workers: int, out: Path) -> None:
    """In the fresh interpreter: run one job and print its seconds."""
    import datasets

    import data_prep.pipeline  # noqa: F401

    assert datasets
    begun = time.perf_counter()
    JOBS[name](sample, tokenizer, workers, out)
    print(time.perf_counter() - begun)


def copy_sample(sample: Path, copies: int, out: Path) -> Path:
    """The sample with each document `copies` times, every copy with its own id and a word changed."""
    for path in sorted(sample.glob("*/*.parquet")):
        table = pq.read_table(path)
        for copy in range(copies):
            texts = [
                text.replace("e", f"e{copy}", 20)
                for text in table["content"].to_pylist()
            ]
            ids = [f"{id}-{copy}" for id in table["id"].to_pylist()]
            changed = table.set_column(
                table.schema.get_field_index("content"), "content", pa.array(texts)
            )
            changed = changed.set_column(
                table.schema.get_field_index("id"), "id", pa.array(ids)
            )
            target = out / path.parent.name / f"{copy:03d}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(changed, target)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sample", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.job:
        run_job(given.job, given.sample, given.tokenizer, given.workers, given.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        sample = (
            given.sample
            if given.copies == 1
            else copy_sample(given.sample, given.copies, Path(folder))
        )
        size = sum(len(text.encode()) for text in read_texts(sample)) / 1e6
        names = [
            name
            for name in BARE
            if name != "sentencepiece" or _has_sentencepiece(given.tokenizer)
        ]
        seconds: dict[str, list[float]] = {name: [] for name in [*names, *JOBS]}
        memory = 0.0
        for _ in range(given.rounds):
            for name in names:
                seconds[name].append(
                    time_bare(name, sample, given.tokenizer, given.workers)
                )
            for name in JOBS:
                spent, largest = time_job(name, sample, given.tokenizer, given.workers)
                seconds[name].append(spent)
                memory = max(memory, largest) if name == "data_prep" else memory
    print(
        f"{size:.1f} MB of text, {given.workers} processes, {given.rounds} rounds; MB/s, median (least, most)"
    )
    speeds = {
        name: sorted(size / value for value in values)
        for name, values in seconds.items()
    }
    for name, result in speeds.items():
        print(
            f"  {name:14} {statistics.median(result):6.2f} ({result[0]:.2f}, {result[-1]:.2f})"
        )
    ratios = {
        f"data_prep / {name}": round(
            statistics.median(
                other / own for other, own in zip(seconds[name], seconds["data_prep"])
            ),
            3,
        )
        for name in seconds
        if name != "data_prep"
    }
    medians = {
        name: round(statistics.median(result), 3) for name, result in speeds.items()
    }
    print(
        json.dumps(
            {
                "mb_per_s": medians,
                "ratios": ratios,
                "largest_process_gb": round(memory, 3),
            }
        )
    )


def _has_sentencepiece(tokenizer: Path) -> bool:
    import importlib.util

    return (
        importlib.util.find_spec("sentencepiece") is not None
        and (tokenizer / "tokenizer.model").is_file()
    )


if __name__ == "__main__":
    main()

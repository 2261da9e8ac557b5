"""Data preparation beside the bare tokenizer and beside a plain `datasets.map`, in one run.

    python -m tests.benchmarks.data_prep SAMPLE TOKENIZER [--workers 2] [--rounds 3]

SAMPLE is a folder in StarCoder's layout (a folder of parquet files per language), TOKENIZER
one with tokenizer.json. All take turns on the same text and cores, in processes of their own,
and print MB/s of text without metadata:

    tokenizers      encode_batch_fast of the tokenizer on texts in memory, nothing else
    datasets.map    the same job as a plain script: read, filter, decontaminate, infilling
                    layout, tokenizer, packing, saving; with this project's pure functions
    data_prep       python -m data_prep as a function call, with its worker processes

The last line is JSON: median speeds, medians of the rounds' ratios, and the peak resident
memory of any process of data_prep.
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
import pyarrow.parquet as pq

from conf import settings
from data_prep.config import DataPrepConfig
from data_prep.sources import METADATA


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


def encode_texts(
    sample: Path,
    tokenizer: Path,
    rank: int,
    workers: int,
    start: Any,
    end: Any,
) -> None:
    """One process of a bare tokenizer: its share of the texts, between two barriers."""
    texts = read_texts(sample)[rank::workers]
    encode = library(tokenizer)
    start.wait()
    for first in range(0, len(texts), 256):
        encode(texts[first : first + 256])
    end.wait()


def time_bare(sample: Path, tokenizer: Path, workers: int) -> float:
    context = multiprocessing.get_context("spawn")
    start, end = context.Barrier(workers + 1), context.Barrier(workers + 1)
    arguments = (sample, tokenizer)
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sample", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shared = (args.sample, args.tokenizer, args.workers)
    if args.job:
        run_job(args.job, *shared, args.out)
        return
    size = sum(len(text.encode()) for text in read_texts(args.sample)) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ("tokenizers", *JOBS)}
    peak = 0.0
    for _ in range(args.rounds):
        seconds["tokenizers"].append(time_bare(*shared))
        for name in JOBS:
            spent, memory = time_job(name, *shared)
            seconds[name].append(spent)
            peak = max(peak, memory) if name == "data_prep" else peak
    own = seconds["data_prep"]
    result: dict[str, Any] = {"peak_gb": round(peak, 3)}
    for name, values in seconds.items():
        rate = size / statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, own))
        result[name] = {"mb_per_s": rate, "data_prep is faster by": ratio}
        print(f"{name:14} {rate:6.2f} MB/s, data_prep is {ratio:.2f} times as fast")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

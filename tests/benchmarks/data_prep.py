"""Compare the speed of data preparation with the tokenizer alone, on the same text and cores.

    python -m tests.benchmarks.data_prep SAMPLE TOKENIZER [--copies 1]

SAMPLE is a folder in StarCoder's layout, TOKENIZER a folder with tokenizer.json. `tokenizers`
only encodes texts that are in memory. `data_prep` reads parquet, filters, decontaminates,
encodes, shuffles, packs, counts n-grams and writes; its time includes the start of processes.
Both take turns. --copies repeats the documents, each time with slightly changed text.
"""

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from conf.settings.compose import settings
from data_prep.config import DataPrepConfig
from data_prep.pipeline import prepare
from data_prep.sources import METADATA

BATCH = 256
WORKERS = 2
ROUNDS = 3
_tokenizer: Tokenizer


def load(tokenizer: Path) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    _tokenizer.encode_special_tokens = True


def encode(texts: list[str]) -> int:
    return sum(map(len, _tokenizer.encode_batch_fast(texts)))


def copy_sample(sample: Path, copies: int, out: Path) -> list[str]:
    """Write `copies` changed copies of the sample's documents with new ids; return their texts."""
    texts: list[str] = []
    for path in sorted(sample.glob("*/*.parquet")):
        folder = out / path.parent.name
        folder.mkdir(exist_ok=True)
        for copy in range(copies):
            columns = pq.read_table(path).to_pydict()
            content = [text.replace("e", f"e{copy}", 20) for text in columns["content"]]
            columns["content"] = content
            columns["id"] = [f"{id}-{copy}" for id in columns["id"]]
            pq.write_table(pa.table(columns), folder / f"{copy:03d}-{path.name}")
            texts += [METADATA.sub("", text, count=1) for text in content]
    return texts


def time_tokenizer(texts: list[str], tokenizer: Path) -> float:
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    with ProcessPoolExecutor(WORKERS, initializer=load, initargs=(tokenizer,)) as pool:
        list(pool.map(encode, [["warm"]] * WORKERS))
        begun = time.perf_counter()
        list(pool.map(encode, batches))
        return time.perf_counter() - begun


def time_data_prep(data: Path, tokenizer: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["experiment=starcoder", f"data.path={data}", f"out={folder}/out"]
        arguments += [f"tokenizer={tokenizer}", f"workers={WORKERS}"]
        begun = time.perf_counter()
        prepare(settings("data_prep", DataPrepConfig, arguments))
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sample", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        texts = copy_sample(args.sample, args.copies, Path(folder))
        size = sum(len(text.encode()) for text in texts) / 1e6
        for _ in range(ROUNDS):
            encoding = time_tokenizer(texts, args.tokenizer)
            preparing = time_data_prep(Path(folder), args.tokenizer)
            ratios.append(encoding / preparing)
            rates = size / encoding, size / preparing
            print(f"MB/s: tokenizers {rates[0]:.2f}, data_prep {rates[1]:.2f}")
    print(f"{size:.1f} MB, median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()

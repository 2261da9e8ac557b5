"""Compare tokens per second with llama.cpp on the same GGUF file, prompts and cores.

    python -m venv ../llama && ../llama/bin/pip install llama-cpp-python
    python -m tests.benchmarks.beside_llama_cpp GGUF --python ../llama/bin/python [--model smollm2]
        [--threads 2] [--prompts 6] [--new 96] [--rounds 3] [--dtypes float32 int8]
        [--methods plain ngrams hybrid] [--alpaca FILE]

`--model` is the directory that GGUF was converted to. Building llama-cpp-python takes some minutes.
If it then fails with an illegal instruction, build it with CMAKE_ARGS=-DGGML_NATIVE=OFF and flags
for the CPU's instructions. llama.cpp runs in separate processes: with the file's own type and
with Q8_0 (quantized by llama.cpp), each plain and with its n-gram lookup of 10 tokens. All
decoders take turns on each prompt and decode greedily from the same ids. Tokens per second count
from the first token on; the command prints medians of the rounds for each prompt set. The last
line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

LOOKUP = 10  # tokens that llama.cpp's n-gram lookup drafts
#: Takes a prompt's ids; returns the number of tokens after the first step, and their seconds.
Decoder = Callable[[Sequence[int]], tuple[int, float]]


def work(gguf: str, threads: int, new: int, lookup: bool) -> None:
    """Decode a prompt for each line of standard input, in the Python that has llama.cpp."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP) if lookup else None
    llm = Llama(
        gguf,
        n_ctx=2048,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=draft,
        verbose=False,
    )
    end = llm.token_eos()
    for line in sys.stdin:
        llm.reset()
        times = []
        for token in llm.generate(json.loads(line), temp=0.0):
            times.append(time.perf_counter())
            if token == end or len(times) == new:
                break
        print(json.dumps([len(times) - 1, times[-1] - times[0]]), flush=True)


def quantize(gguf: str, out: str) -> None:
    """Write a file's weights as Q8_0, in the Python that has llama.cpp."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(gguf.encode(), out.encode(), params):
        raise SystemExit(f"error: llama.cpp could not write {out}")


def peer(python: str, gguf: Path, args: argparse.Namespace, lookup: bool) -> Decoder:
    """Start a llama.cpp process on a file; return it as a decoder."""
    settings = [str(gguf), str(args.threads), str(args.new), str(int(lookup))]
    process = subprocess.Popen(
        [python, __file__, "--worker", *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def decode(ids: Sequence[int]) -> tuple[int, float]:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(list(ids)) + "\n")
        process.stdin.flush()
        tokens, seconds = json.loads(process.stdout.readline())
        return tokens, seconds

    return decode


def project_decoder(model: Any, method: str, new: int) -> Decoder:
    """Return this project's decoder for a method."""
    from infer import DecodeConfig, generate

    def decode(ids: Sequence[int]) -> tuple[int, float]:
        first = last = 0.0
        count = in_first = 0
        for step in generate(model, ids, DecodeConfig(method, max_new_tokens=new)):
            last = time.perf_counter()
            if not count:
                first, in_first = last, len(step.tokens)
            count += len(step.tokens)
        return count - in_first, last - first

    return decode


def prompt_sets(model: Any, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the ids of the prompts of each set."""
    from infer.bench.prompts import name_of, read_prompts

    return {
        name_of(source): [
            list(prompt.ids)
            for prompt in read_prompts(
                source,
                model.text,
                args.folder,
                count=args.prompts,
                max_tokens=256,
                seed=0,
            )
        ]
        for source in ["humaneval", *args.alpaca]
    }


def measure(
    decoders: dict[str, Decoder], prompts: Sequence[Sequence[int]], rounds: int
) -> dict[str, float]:
    """Return the median tokens per second of each decoder; the decoders take turns on each prompt."""
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for decode in decoders.values():
        decode(prompts[0])
    for _ in range(rounds):
        texts: dict[str, list[tuple[int, float]]] = {name: [] for name in decoders}
        for ids in prompts:
            for name, decode in decoders.items():
                texts[name].append(decode(ids))
        for name, each in texts.items():
            tokens, seconds = map(sum, zip(*each))
            rates[name].append(tokens / seconds)
    return {name: median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"])
    parser.add_argument("--methods", nargs="+", default=["plain", "ngrams", "hybrid"])
    parser.add_argument("--alpaca", nargs="*", default=[])
    args = parser.parse_args()

    import torch

    from conf.hub import find_folder
    from infer import load

    torch.set_num_threads(args.threads)
    args.folder = Path(find_folder(args.model))
    models = {dtype: load(args.folder, dtype, "cpu") for dtype in args.dtypes}
    with TemporaryDirectory() as folder:
        q8 = Path(folder) / "q8_0.gguf"
        command = [args.python, __file__, "--quantize", str(args.gguf), str(q8)]
        subprocess.run(command, check=True)
        decoders = {
            f"llama.cpp, {name}{', lookup' if lookup else ''}": peer(
                args.python, file, args, lookup
            )
            for name, file in (("own type", args.gguf), ("Q8_0", q8))
            for lookup in (False, True)
        }
        decoders |= {
            f"{dtype}, {method}": project_decoder(model, method, args.new)
            for dtype, model in models.items()
            for method in args.methods
        }
        sets = prompt_sets(next(iter(models.values())), args)
        rates = {
            name: measure(decoders, prompts, args.rounds)
            for name, prompts in sets.items()
        }
    for name in decoders:
        cells = "".join(f"{rates[each][name]:12.1f}" for each in sets)
        print(f"{name:28}{cells}")
    print(json.dumps(rates))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        file, threads, new, lookup = sys.argv[2:]
        work(file, int(threads), int(new), lookup == "1")
    elif sys.argv[1:2] == ["--quantize"]:
        quantize(*sys.argv[2:])
    else:
        main()

"""A model directory in a clean environment: token for token what the project decodes, and how fast.

    python -m tests.drills.portable MODEL_DIR HELD_OUT.jsonl [--count 100] [--new 128] [--venv DIR]

Makes an environment with torch and transformers of the versions here and nothing else (kept in DIR where
that is given), copies the model directory, writes custom_generate/ into it, and decodes prompts there: the
beginnings of held-out texts, of many lengths. Here `infer` decodes the same, greedy and by nucleus
sampling. In that process every prompt is decoded plainly too, right before: both clocks see the same
machine. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from infer import DecodeConfig, Model, generate, load
from train.export.bundle import write_custom_generate

WORKER = Path(__file__).parents[1] / "portable_worker.py"
BATCH = 4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


def clean_environment(folder: Path) -> Path:
    """Its Python. PyTorch first, or the newest would be taken for Transformers."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        for name in ("torch", "transformers"):
            wanted = f"{name}=={version(name).split('+')[0]}"
            subprocess.run([python, "-m", "pip", "install", "--quiet", wanted], check=True, capture_output=True)
    return python


def prompts_of(model: Model, held_out: Path, count: int, new: int) -> list[list[int]]:
    """Beginnings of 8 to 263 tokens."""
    texts = [json.loads(line)["content"] for line in held_out.read_text("utf-8").splitlines()]
    encoded = [ids for ids in map(model.text.encode, texts) if len(ids) > 8]
    cut = [8 + 37 * n % 256 for n in range(count)]
    return [encoded[n % len(encoded)][: min(size, model.context - new)] for n, size in enumerate(cut)]


def here(model: Model, prompts: list[list[int]], decode: DecodeConfig, seed: int) -> list[list[int]]:
    """By the project's own decoder."""
    texts = [list[int]() for _ in prompts]
    for step in generate(model, prompts, decode, seeds=[seed + b for b in range(len(prompts))]):
        texts[step.sequence] += step.tokens
    return texts


def runs_of(groups: list[list[list[int]]], decode: DecodeConfig, *, plainly: bool) -> list[dict[str, Any]]:
    """What to decode there: the first prompts once more than is counted, to warm up and to measure."""
    shape = {"temperature": decode.temperature, "top_k": decode.top_k, "top_p": decode.top_p}
    own = {"do_sample": True, **shape} if decode.temperature else {"do_sample": False}
    own |= {"max_new_tokens": decode.max_new_tokens}
    plain = {"plain": {"by": "library", **own}} if plainly else {}
    return [
        {"prompts": group, "ways": plain | {"custom": {"by": "loaded", "seed": 100 * max(0, n), **own}}}
        for n, group in enumerate([groups[0], *groups], -1)
    ]


def there(python: Path, model: Path, runs: list[dict[str, Any]], home: Path, threads: int) -> dict[str, Any]:
    """By the directory alone."""
    asked = json.dumps({"model": str(model), "threads": threads, "runs": runs})
    environment = {"PATH": os.environ["PATH"], "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = str(threads)
    command = [python, "-I", WORKER]
    done = subprocess.run(command, input=asked, env=environment, cwd=home, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def compare(found: list[dict], wanted: list[list[list[int]]], *, greedy: bool) -> dict[str, Any]:
    """Of one sampling: how many texts are those of `infer`, and, where nothing is drawn, those of the library's
    own decoding beside them; quartiles over prompts of the tokens per second, by that one's.
    """
    same, library, ratios = 0, 0, list[float]()
    for run, texts in zip(found, wanted):
        rows, seconds = run["custom"]
        same += sum(map(is_padded, rows, texts))
        if "plain" in run:
            (plain, plain_seconds), (text,) = run["plain"], texts
            library += plain == [text]
            ratios.append((len(text) / seconds) / (len(plain[0]) / plain_seconds))
    told: dict[str, Any] = {"prompts": sum(map(len, wanted)), "as infer": same}
    if ratios:
        speed = [round(quartile, 3) for quartile in statistics.quantiles(ratios, n=4)]
        told |= {"as the library": library, "speed": speed} if greedy else {"speed": speed}
    return told


def is_padded(row: list[int], text: list[int]) -> bool:
    """Whether a row is a text, filled up with one id."""
    return row[: len(text)] == text and len({*row[len(text) :]}) <= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        python = clean_environment(args.venv or root / "venv")
        shutil.copytree(args.model, root / "model", ignore=shutil.ignore_patterns("custom_generate"))
        write_custom_generate(root / "model")
        loaded = load(args.model, "float32", "cpu")
        prompts = prompts_of(loaded, args.held_out, args.count, args.new)
        batches = [prompts[n : n + BATCH] for n in range(0, len(prompts), BATCH)]
        parts, runs = dict[str, list[list[list[int]]]](), list[dict[str, Any]]()
        for name, sampling in SAMPLINGS.items():
            for kind, groups in (("alone", [[prompt] for prompt in prompts]), ("batches", batches)):
                decode = DecodeConfig(max_new_tokens=args.new, **sampling)
                wanted = [here(loaded, group, decode, 100 * n) for n, group in enumerate(groups)]
                parts[f"{name} {kind}"] = wanted
                runs += runs_of(groups, decode, plainly=kind == "alone")
        found = there(python, root / "model", runs, root, args.threads)
        report: dict[str, Any] = {"ours": found["ours"]}
        for name, wanted in parts.items():
            _, *counted = (found["runs"].pop(0) for _ in range(1 + len(wanted)))
            report[name] = compare(counted, wanted, greedy=name.startswith("greedy"))
            print(f"{name:24}", report[name], flush=True)
        freeze = [python, "-m", "pip", "list", "--format=freeze"]
        listed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.split()
        report["installed"] = [line for line in listed if line.startswith(("torch==", "transformers=="))]
        report["packages"] = len(listed)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

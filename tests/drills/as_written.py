"""Every command of README and docs as it is written, on small things that have the names that the pages use.

    python -m tests.drills.as_written DEMO FOLDER --shared SHARED_DATA [--page decoding.md ...]

In a fresh clone lie a demo's copy as runs/demo, a tiny model with CodeLlama's tokenizer as CodeLlama-7b-hf,
a sample of StarCoder as STARCODER, and what a page calls DIR, MODEL or DATA. The shell blocks of the pages are
run in their order, command by command, each as it stands with what makes it small behind it (SMALLER). Commands
that need what this machine has not are told with the reason (ELSEWHERE); the quick start has its own drill.

Each command is to end with code 0. FOLDER/told keeps what it said; the last line is JSON.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.drills.quick_start import environment
from tests.markdown import INDENTED, blocks, prose

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("codellama_7b", "export", "data", "training", "decoding", "evaluation")),
    *(f"docs/{name}.md" for name in ("troubleshooting", "serving")),
)
ELSEWHERE = {
    r"^hf download": "reads the hub",
    r"\bbash launch/(demo|small|test)\.sh": "run for themselves, in a fresh clone",
    r" push=": "writes to the hub",
    r"^sbatch": "wants a Slurm cluster",
    r"train_multinode": "wants four machines",
    r"^vllm serve": "wants vLLM: tests.drills.serve_vllm",
    r"sglang": "wants SGLang",
    r"compile=true": "wants a GPU",
}
STEPS = "steps=2 save_every=2 global_batch=2 micro_batch=1 validate_sequences=2 optimizer.warmup_steps=1"
TEXTS = "{0}prompts.humaneval.count=2 {0}prompts.infilling.count=2 {0}prompts.infilling.path=infilling.jsonl.gz"
SPEED = f"{TEXTS} {{0}}rounds=2 {{0}}max_new_tokens=8 {{0}}k=[1,3] {{0}}temperatures=[0] {{0}}threads=1"
PATHS = {"mbpp": "mbpp.json", "multipl_e": "FOLDER", "infilling": "infilling.jsonl.gz"}
FILES = " ".join(f"{{0}}benchmarks.{name}.path={path}" for name, path in PATHS.items())
COUNTS = " ".join(f"{{0}}benchmarks.{name}.count=2" for name in ("humaneval", "mbpp", "multipl_e", "infilling"))
QUALITY = f"{FILES} {COUNTS} {{0}}benchmarks.multipl_e.languages=[cpp] {{0}}max_new_tokens=8 {{0}}threads=1"
SMALLER = {  # what is set behind a command, by what it runs
    r"-m data_prep experiment": "held_out=0.05",
    r"launch/train\.sh": STEPS,
    r"launch/evaluate\.sh": f"{SPEED.format('speed.')} {QUALITY.format('quality.')}",
    r"-m infer\.speed": SPEED.format(""),
    r"-m infer\.quality": QUALITY.format(""),
    r"-m infer\.study": "rounds=1 max_new_tokens=8 prompts.held_out.count=2 prompts.humaneval.count=1",
    r"launch/gpu_check\.sh": "device=cpu shapes=[tiny] dtype=float32 context=64 rounds=3 prompts=2",
    r"-m infer ": "decode.max_new_tokens=32 threads=1",
    r"-m train\.export checkpoint=runs/7b": "verify_sequences=2",
    r"tests\.drills\.lossless": "--new 8 --dtypes float32",
}
# On as many cores as there are, on a model of three layers.
OTHERWISE = {"--nproc_per_node 8": "--nproc_per_node 2", "self:8": "self:1"}
# Two commands of a block that are two ways to one result: the second begins anew.
ANEW = {r"torchrun .*infer\.speed": "DIR", r"verify=false": "DIR2"}
DEMO = {"DIR": "runs/demo/model", "DIR2": "runs/demo/draft", "MODEL": "runs/demo/model"}
PLACES = {  # what a page's names are
    "export": {"DIR": "runs/demo/tuned", "DATA": "runs/demo/data"},
    "decoding": DEMO,
    "evaluation": {
        **DEMO,
        "BASE": "runs/demo/base/model_directory",
        "DIR": None,
        "A": "runs/demo/report",
        "B": "runs/demo/report",
    },
    "troubleshooting": {**DEMO, "HELD_OUT": "runs/demo/data/held_out.jsonl"},
    "training": {"DIR": None},
}


@dataclass
class Ran:
    """A command of a page: its exit code, or why it was left out."""

    page: str
    command: str
    code: int | None
    seconds: float = 0.0
    left_out: str = ""


def commands(page: str) -> Iterator[str]:
    """The lines of a page's shell blocks, continued ones as one, without their comments."""
    indented = [text for text in INDENTED.findall(prose(page)) if re.match(r"\s*(bash|python|\.venv)", text)]
    for block in (*blocks(page), *indented):
        for line in block.replace("\\\n", " ").splitlines():
            if told := re.sub(r"\s+#.*$", "", line).strip():
                yield re.sub(r"\s+", " ", told)


class Clone:
    """A fresh clone with what the pages speak of."""

    def __init__(self, folder: Path, demo: Path, shared: Path) -> None:
        self.place, self._told = folder / "adaptive-tokens", folder / "told"
        shutil.rmtree(folder, ignore_errors=True)
        self._told.mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.place)], check=True)
        (self.place / ".venv").symlink_to(ROOT / ".venv")
        shutil.copytree(demo, self.place / "runs" / "demo")
        inputs = {
            "STARCODER": "starcoder_sample",
            "languages.csv": "starcoderdata/languages.csv",
            "mbpp.jsonl": "mbpp/mbpp.jsonl",
            "mbpp.json": "mbpp/sanitized-mbpp.json",
            "FOLDER": "multipl_e",
            "infilling.jsonl.gz": "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz",
        }
        for name, path in inputs.items():
            (self.place / name).symlink_to((shared / path).resolve())
        self._codellama(shared / "tokenizers" / "codellama-7b")

    def _codellama(self, tokenizer: Path) -> None:
        """CodeLlama-7b-hf in small: its tokenizer, vocabulary, context and rotary base, random weights."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
        shape = LlamaConfig(
            vocab_size=32016,
            hidden_size=32,
            intermediate_size=64,
            max_position_embeddings=16384,
            rope_theta=1e6,
            rms_norm_eps=1e-5,
            **sizes,
        )
        place = self.place / "CodeLlama-7b-hf"
        LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(place)  # type: ignore[arg-type]
        for file in tokenizer.glob("*token*"):
            shutil.copy(file, place)

    def furnish(self, page: str) -> None:
        """The names of this page alone; a way from the start begins without the last one's results."""
        names = {name for places in PLACES.values() for name in places} - {"DATA"}
        for name in names:
            self._remove(name)
        for name, path in PLACES.get(page, {}).items():
            if path is not None:
                self._remove(name)
                (self.place / name).symlink_to(path)
        if page == "codellama_7b":
            self._remove("runs/7b")
        if page == "data":
            self._remove("DATA")

    def _remove(self, name: str) -> None:
        path = self.place / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def run(self, page: str, command: str, number: int) -> Ran:
        """In the clone's own environment, as a user has it after `launch/setup.sh`."""
        for pattern, reason in ELSEWHERE.items():
            if re.search(pattern, command):
                return Ran(page, command, None, left_out=reason)
        for pattern, name in ANEW.items():
            if re.search(pattern, command):
                self._remove(name)
        small = next((more for pattern, more in SMALLER.items() if re.search(pattern, command)), "")
        line = f"{command} {small}"
        for written, instead in OTHERWISE.items():
            line = line.replace(written, instead)
        variables = environment(os.environ) | {"OMP_NUM_THREADS": "1", "RANKS": "2", "HF_HUB_OFFLINE": "1"}
        if "evaluate" in line:
            del variables["RANKS"]
        began = time.perf_counter()
        with open(self._told / f"{page}-{number}.txt", "w", encoding="utf-8") as told:
            told.write(f"$ {line}\n")
            told.flush()
            shell = f"source .venv/bin/activate && {line}"
            ended = subprocess.run(
                ["bash", "-c", shell], cwd=self.place, env=variables, stdout=told, stderr=told, check=False
            )
        return Ran(page, command, ended.returncode, round(time.perf_counter() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drills.as_written")
    parser.add_argument("demo", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shared", type=Path, required=True, help="the project's shared data")
    parser.add_argument("--page", nargs="+", default=PAGES)
    given = parser.parse_args()
    clone, found = Clone(given.folder, given.demo, given.shared), list[Ran]()
    for path in given.page:
        page = Path(path).stem
        clone.furnish(page)
        for number, command in enumerate(commands((clone.place / path).read_text("utf-8"))):
            ran = clone.run(page, command, number)
            found.append(ran)
            told = ran.left_out or f"code {ran.code}, {ran.seconds:.0f} s"
            print(f"{page} {number}: {told}: {command}", flush=True)
    failed = [ran.command for ran in found if ran.code]
    left_out = [asdict(ran) for ran in found if ran.code is None]
    run = sum(ran.code is not None for ran in found)
    print(json.dumps({"run": run, "failed": failed, "left_out": left_out}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""Every ZeRO stage on one rank and on two, exported: `python -m tests.drills.round_trip DATA FOLDER`.

DATA is a finished folder of data_prep with small sequences. Each row is trained, in float32, in bfloat16 and
with tied embeddings, and exported in float32; LoRA is exported merged and kept. The table says by how much the
logits of the directory, as Transformers reads it, differ from those of the live model at the end of its
training, and how many weights differ from the optimizer's: 0 is equality to the last bit.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.train.export.live_worker import BFLOAT16, STAGES
from tests.train.export.runs import LORA, TIED, export, logits, train

KINDS = {"": [], "-bf16": [BFLOAT16], "-tied": [BFLOAT16, TIED]}
RUNS = {f"{stage}{kind}": [*STAGES[stage], *more] for kind, more in KINDS.items() for stage in STAGES}
ADAPTED = {f"{stage}-lora": [*STAGES[stage], *LORA] for stage in ("zero2", "zero3")}


def compare(run: Path, out: Path) -> list[object]:
    """Largest difference of the logits, and weights that differ, of how many."""
    live = torch.load(run.with_name(f"{run.name}.live"))
    export(run, out, "dtype=fp32", "verify=false")
    difference = float((logits(out, live["ids"]) - live["logits"].float()).abs().max())
    written = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    masters = {name: tensor for name, tensor in live["masters"].items() if name in written}
    differing = sum(not torch.equal(written[name], tensor) for name, tensor in masters.items())
    return [f"{difference:.1e}".replace("0.0e+00", "0"), differing, len(masters)]


def main() -> None:
    """Print the table row by row."""
    data, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    logging.disable_progress_bar()
    print("run             ranks   logits differ   weights differ   of", flush=True)
    for ranks in (1, 2):
        place = train(folder / f"ranks{ranks}", data, RUNS | ADAPTED, ranks=ranks)
        for name in RUNS | ADAPTED:
            row = compare(place / name, place / f"{name}.model")
            print("{:15} {:5} {:>15} {:>16} {:>4}".format(name, ranks, *row), flush=True)


if __name__ == "__main__":
    main()

"""A process that has Transformers and not this project: decodes what it is asked for, by a model directory.

    python -I tests/portable_worker.py < ASKED.json > FOUND.json

Asked: {"model", "threads", "runs": [{"prompts": [[ids]], "ways": {name: {"by", ...arguments of generate}}}]}.
By: "library", its own decoding; "custom_generate", its argument; "loaded", a model loaded with it.
Found: of every run and way the rows and the seconds; and the modules of ours, which must be none.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

OURS = ("infer", "train", "conf", "data_prep", "hydra", "deepspeed")


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    before = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[0] * n + prompt for n, prompt in zip(before, prompts)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in before]),
    }


def decoded(models: dict[bool, PreTrainedModel], model: str, prompts: list, way: dict[str, Any]) -> list:
    """The rows without their prompts, and the seconds."""
    asked = dict(way)
    by = asked.pop("by")
    if by == "custom_generate":
        asked |= {"custom_generate": model, "trust_remote_code": True}
    lm, inputs = models[by == "loaded"], left_padded(prompts)
    began = time.perf_counter()
    found: Any = lm.generate(**inputs, **asked)  # type: ignore[operator]
    seconds = time.perf_counter() - began
    return [found[:, inputs["input_ids"].shape[1] :].tolist(), seconds]


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    models = {
        trusting: AutoModelForCausalLM.from_pretrained(
            asked["model"], dtype=torch.float32, trust_remote_code=trusting
        ).eval()
        for trusting in (False, True)
    }
    runs = [
        {name: decoded(models, asked["model"], run["prompts"], way) for name, way in run["ways"].items()}
        for run in asked["runs"]
    ]
    foreign = sorted({name.split(".")[0] for name in sys.modules} & set(OURS))
    print(json.dumps({"runs": runs, "ours": foreign, "installed": torch.__version__}))


if __name__ == "__main__":
    main()

"""Decode with a model directory, in a process with Transformers and without this project.

    python -I tests/portable_worker.py < ARGS.json > RESULT.json

Args: {"model", "runs": [{"prompts": [[ids]], "ways": {name: {"by", ...arguments}}}]}.
"by" is "library" (its own decoding), "custom_generate" (the argument) or "loaded" (a
model loaded with it).
Result: the rows of every run and way; and imported modules of ours, which must be none.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

OURS = ("infer", "train", "conf", "data_prep", "hydra", "deepspeed")


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(rows)  # no id of a prompt is 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def decoded(
    models: dict[bool, PreTrainedModel], model: str, prompts: list, way: dict[str, Any]
) -> list:
    """Return the rows without their prompts."""
    args = dict(way)
    by = args.pop("by")
    if by == "custom_generate":
        args |= {"custom_generate": model, "trust_remote_code": True}
    lm, inputs = models[by == "loaded"], left_padded(prompts)
    rows: Any = lm.generate(**inputs, **args)  # type: ignore[operator]
    return rows[:, inputs["input_ids"].shape[1] :].tolist()


def main() -> None:
    args = json.load(sys.stdin)
    torch.set_num_threads(1)
    models = {
        trusting: AutoModelForCausalLM.from_pretrained(
            args["model"], dtype=torch.float32, trust_remote_code=trusting
        ).eval()
        for trusting in (False, True)
    }
    runs = [
        {
            name: decoded(models, args["model"], run["prompts"], way)
            for name, way in run["ways"].items()
        }
        for run in args["runs"]
    ]
    foreign = sorted({name.split(".")[0] for name in sys.modules} & set(OURS))
    print(json.dumps({"runs": runs, "ours": foreign}))


if __name__ == "__main__":
    main()

"""Decode with a model directory in a process that has Transformers but not this project.

    python -I tests/portable_worker.py < ARGS.json > RESULT.json

Args: {"model", "runs": [{"prompts": [[ids]], "variants": {name: {"by", ...arguments}}}]}.
"by" is "library" (Transformers' own decoding), "custom_generate" (this argument of generate)
or "loaded" (a model that was loaded with its custom_generate).
Result: "runs", the rows by variant of each run, and "imported", the modules of this project
that were imported (there must not be any).
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Modules that the decoder in a model directory must not import.
FORBIDDEN = ("infer", "train", "conf", "data_prep", "hydra", "deepspeed")


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(rows)  # no id of a prompt is 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def decoded(
    models: dict[bool, PreTrainedModel],
    model: str,
    prompts: list,
    variant: dict[str, Any],
) -> list:
    """Return the generated rows without their prompts."""
    args = dict(variant)
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
            name: decoded(models, args["model"], run["prompts"], variant)
            for name, variant in run["variants"].items()
        }
        for run in args["runs"]
    ]
    imported = sorted({name.split(".")[0] for name in sys.modules} & set(FORBIDDEN))
    print(json.dumps({"runs": runs, "imported": imported}))


if __name__ == "__main__":
    main()

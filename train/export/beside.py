"""What lies beside the weights of a model directory."""

from pathlib import Path
from typing import Any

from conf.stage import fingerprint
from data_prep.vocab import Vocab
from train.export.adapter import trained_lora


def adaptive_json(checkpoint: Path, manifest: dict[str, Any], *, step: int) -> dict[str, Any] | None:
    """What a decoder must know of the tokens: the adaptive ones, those of infilling, what opens a prompt,
    and which no text becomes. None where no adaptive tokens were trained.
    """
    if not manifest["adaptive"]:
        return None
    vocab = manifest["vocab"]
    return {
        "schema": 1,
        "adaptive_ids": manifest["adaptive"],
        "identical": len(manifest["adaptive"]) == 1,
        "L": manifest["L"],
        "gated": trained_lora(manifest).gated,
        "bos": vocab["bos"],
        "infilling": {name: vocab[name] for name in ("pre", "suf", "mid", "eot")},
        "control": sorted(Vocab.from_json(vocab).control),
        "provenance": {
            "checkpoint": fingerprint(checkpoint),
            "data": manifest["inputs"]["data.path"],
            "step": step,
            "objective": manifest["settings"]["objective"],
            "commit": manifest["commit"],
        },
    }

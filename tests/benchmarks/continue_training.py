"""Continue the training of an exported adapter, with new text and a schedule of its own.

    torchrun --nproc_per_node 2 -m tests.benchmarks.continue_training ADAPTER_DIR SETTING=VALUE ...

The settings are those of `python -m train`; lora.rank and lora.alpha must be the adapter's. (A
checkpoint of train continues with its own data and schedule alone.) The adapter in adapters/ was
trained so.
"""

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file

from data_prep.vocab import Vocab
from train import trainer
from train.config import TrainConfig
from train.head import FILE
from train.lora import ADAPTER, PEFT, adapter_weights
from train.model import AdaptiveLM, assemble


def main() -> None:
    folder = Path(sys.argv.pop(1))

    def from_adapter(config: TrainConfig, vocab: Vocab) -> tuple[AdaptiveLM, int]:
        module, parameters = assemble(config, vocab)
        names = adapter_weights(module.lm.state_dict())
        own = {name.replace(f".{ADAPTER}", ""): name for name in names}
        tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
        adapter = {own.pop(name.removeprefix(PEFT)): tensors[name] for name in tensors}
        assert not own, f"{folder} must have all of the adapter, got no {min(own)}"
        module.lm.load_state_dict(adapter, strict=False)
        if module.head is not None:
            module.head.load_state_dict(load_file(folder / FILE))
        return module, parameters

    with patch.object(trainer, "assemble", from_adapter):
        runpy.run_module("train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Random states as a function of what happens, so that none has to be saved."""

import random

import numpy as np
import torch


def reseed(*key: int) -> None:
    """Seed PyTorch on every device, NumPy and Python from the numbers of `key`, each from 0."""
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

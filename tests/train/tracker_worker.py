"""A tiny run tracked online, for test_tracker.py: `torchrun -m tests.train.tracker_worker OUT DATA`.

W&B has less time to answer, and ranks less patience with each other, than in a real run: the test ends sooner.
"""

import sys
from pathlib import Path

import conf.tracker
from conf import settings
from conf.stage import made_from, read_manifest
from tests.train.resume_worker import RECIPE
from train.__main__ import CHANGEABLE
from train.config import TrainConfig
from train.distributed import Pulse
from train.trainer import train

if __name__ == "__main__":
    out, data = sys.argv[1:]
    conf.tracker.ONLINE_SECONDS = 12.0
    Pulse.__init__.__kwdefaults__.update(interval=0.5, patience=3.0)
    overrides = [
        "steps=2",
        "save_every=2",
        "deepspeed=zero2",
        "tracker.mode=online",
        f"data.path={data}",
    ]
    config = settings("train", TrainConfig, [*RECIPE, *overrides, f"out={out}"])
    provenance = made_from(config, {"data.path": data}, CHANGEABLE)
    train(config, provenance, read_manifest(Path(data), "shards", "data.path"))

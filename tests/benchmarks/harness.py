"""The harness on the real clock: a model whose forwards take a known time, by a busy wait.

    python -m tests.benchmarks.harness [--k 1 3 7] [--new 600] [--rounds 3] [--ms 4 0.4] [--busy]

tests/infer/speed/test_speed_harness.py does the same on a clock that only waits move. Here the loop's own
time is in it: what it takes beside the forward makes a loop longer, and moves a speedup a little from the
closed form, the more the shorter the forward. On a machine that others use, `--busy` counts this process's
time alone.
The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from infer.measure.runs import Clock
from infer.measure.runs import clock as real
from infer.speed.aggregate import aggregate
from infer.speed.units import Group, run_turn
from tests.infer.paced import decoders, expected, prompts

GROUP, PROMPT = Group("float32", 0.0), 0.05
SHOWN = ("acceptance_rate", "tokens_per_forward", "ms_per_forward", "tokens_per_second", "speedup", "first_ms")


def waiting(clock: Clock) -> Callable[[float], None]:
    def wait(seconds: float) -> None:
        end = clock() + seconds
        while clock() < end:
            pass

    return wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--new", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, nargs=2, default=[4, 0.4], help="of a forward, and of each row")
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.busy else real
    torch.set_num_threads(1)

    def seconds(rows: int) -> float:
        return 1e-3 * (args.ms[0] + args.ms[1] * rows)

    ways = decoders(args.k, args.new, wait=waiting(clock), seconds=seconds, prompt=PROMPT, clock=clock)
    (prompt,) = prompts(1)
    for decoder in ways.values():
        decoder(prompt)
    units = {
        str(turn): {
            "prompt_set": "fake",
            "prompt": prompt.id,
            "round": turn,
            "groups": run_turn({GROUP: ways}, prompt, turn),
        }
        for turn in range(args.rounds)
    }
    header = {
        "settings": {"prompts": {"fake": {}}, "dtypes": ["float32"], "temperatures": [0.0]},
        "limits": [],
        "all": args.rounds,
    }
    worst = {}
    for row in aggregate(units, header)["rows"][1:]:
        wanted = expected(row["k"], seconds, PROMPT)
        for name in SHOWN:
            error = row[name] / wanted[name] - 1
            worst[name] = max(worst.get(name, 0.0), abs(error))
            print(f"k={row['k']} {name:20} {row[name]:10.4f} wanted {wanted[name]:10.4f} {error:+8.2%}")
    print(json.dumps(worst))


if __name__ == "__main__":
    main()

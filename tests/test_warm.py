import subprocess
import sys

from tests import warm


def test_ranks_are_reported_what_torchrun_tells() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    run = subprocess.run(
        [*command, "--no-python", "env"], capture_output=True, text=True, check=True
    )
    message = set(run.stdout.splitlines())
    for variables in warm._torchrun_variables(2):
        assert variables.keys() <= {line.partition("=")[0] for line in message}
        same = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
        assert {f"{name}={variables[name]}" for name in same} <= message

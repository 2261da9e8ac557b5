"""What an import of the library loads."""

import subprocess
import sys

LIBRARIES = ["hydra", "omegaconf", "deepspeed", "wandb"]


def test_the_library_loads_no_command_line() -> None:
    """`from infer import load` loaded Hydra for an exception class."""
    code = f"import sys; from infer import load; print({{*{LIBRARIES}}} & {{*sys.modules}})"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "set()"

"""Run the entry point of a package by a short name: adaptive-tokens COMMAND [SETTINGS]."""

import runpy
import sys

COMMANDS = {
    "data": "data_prep",
    "train": "train",
    "export": "train.export",
    "generate": "infer",
    "speed": "infer.speed",
    "quality": "infer.quality",
    "report": "infer.report",
}


def main() -> None:
    """Run the command that the first argument names, with the others as its settings."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        names = "\n".join(f"  {name:10} python -m {module}" for name, module in COMMANDS.items())
        is_help = sys.argv[1:] in ([], ["--help"], ["-h"])
        if not is_help:
            print(
                f"error: the command must be one of {', '.join(COMMANDS)}, got {sys.argv[1]}", file=sys.stderr
            )
            sys.exit(2)
        print(f"adaptive-tokens COMMAND [SETTINGS]; COMMAND --help lists the settings\n\n{names}")
        return
    module = COMMANDS[sys.argv.pop(1)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

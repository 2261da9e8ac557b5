"""Untrusted programs, confined and judged. Knows nothing of models and of benchmarks.

sandbox.py     settings, rooms and verdicts
players.py     what runs in the rooms of a Python solution and its tests
languages.py   how programs of other languages are run, and where their tests end
guard/         the process that builds a room, watches it and ends it
"""

from infer.sandbox.languages import missing_toolchain
from infer.sandbox.sandbox import Program, Sandbox, SandboxConfig, Verdict, open_sandbox

__all__ = ["Program", "Sandbox", "SandboxConfig", "Verdict", "missing_toolchain", "open_sandbox"]

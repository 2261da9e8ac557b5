"""Untrusted programs, confined and judged. Knows nothing of models and of benchmarks."""

from infer.sandbox.config import SandboxConfig
from infer.sandbox.languages import missing_toolchain
from infer.sandbox.program import Program, Verdict
from infer.sandbox.sandbox import Sandbox, open_sandbox

__all__ = ["Program", "Sandbox", "SandboxConfig", "Verdict", "missing_toolchain", "open_sandbox"]

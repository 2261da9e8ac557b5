"""What is judged, and the judgement."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """An untrusted program and the tests it is to pass."""

    language: str  # "python", "cpp", "js", ...: MultiPL-E's names but for Python
    source: str  # untrusted: what stands before the answer, and the answer
    tests: str  # the benchmark's own code that calls it; fails by an exception or a non-zero exit
    known: str = ""  # Python: trusted code with names that tests may use beside the program's


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the tests passed, and if not, why: "failed: AssertionError", "timed out after 20 s", ..."""

    passed: bool
    reason: str
    seconds: float = 0.0

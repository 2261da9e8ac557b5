"""What is judged, and what becomes of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """An answer with what stands before it, and the benchmark's own tests of it."""

    language: str  # "python", "cpp", "js", ...: MultiPL-E's names but for python
    source: str  # untrusted: what stands before the answer, and the answer
    tests: str  # the benchmark's own code that calls it; fails by an exception or a non-zero exit
    known: str = ""  # Python: trusted code with names that the tests may use beside the program's


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program passed its tests."""

    passed: bool
    reason: str  # "passed", "failed: AssertionError", "timed out after 10 s", "out of memory", ...
    seconds: float

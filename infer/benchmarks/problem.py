"""One problem of a benchmark: what the model is given, where its answer ends, and how that is judged."""

from dataclasses import dataclass

from infer.config import Infill
from infer.sandbox import Program


@dataclass(frozen=True, slots=True)
class Problem:
    """`prompt` is what the model is given, `answer` the authors' own: a solution, or the missing text."""

    id: str  # unique within benchmark and language
    prompt: str | Infill
    stop: tuple[str, ...] = ()  # texts that end the answer and are no part of it
    answer: str | None = None
    language: str = ""  # "python", "cpp", ...; of infilling too
    category: str = ""  # Spec-Bench's
    head: str | None = None  # what stands before the answer in the program; None: the prompt
    tests: str = ""  # that call the program; none where nothing is executed
    known: str = ""  # Python: names that the tests may use beside the program's

    def cut(self, completion: str) -> str:
        """Return the completion up to the first of the texts that end it."""
        places = [place for text in self.stop if (place := completion.find(text)) >= 0]
        return completion[: min(places, default=len(completion))]

    def program(self, completion: str) -> Program | None:
        """Return what is executed to judge a completion; None where nothing is."""
        if not self.tests:
            return None
        head = self.head if self.head is not None else self.prompt
        return Program(self.language, f"{head}{self.cut(completion)}\n", self.tests, self.known)

    def matches(self, completion: str) -> bool:
        """Return whether the completion is the authors' answer, but for white space at either end."""
        return self.answer is not None and self.cut(completion).strip() == self.answer.strip()

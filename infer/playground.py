"""python -m infer.playground: a page on this machine, two decoders side by side.

Their steps alternate in one thread, so that they do not disturb each other: the next
step is that of the decoder that has used less time so far.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conf import run
from conf.schema import check_settings, setting
from infer.config import DecodeConfig, check_directory

if TYPE_CHECKING:
    from infer.api import Model, TextStep


@dataclass
class PlaygroundConfig:
    """python -m infer.playground: a page to try a model on, on this machine."""

    #: a Transformers directory, best an export, a hub name, or smollm2
    model: str = setting(hub="model")
    #: a model that drafts, as that of python -m infer
    draft: str | None = setting(None, hub="model")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class Racer:
    """The text of one decoder so far, and the time of its own steps."""

    steps: Iterator["TextStep"]
    pieces: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    finished: bool = False

    def advance(self) -> None:
        """Take one step."""
        began = time.perf_counter()
        step = next(self.steps)
        self.seconds += time.perf_counter() - began
        kinds = (None if kind == "own" else kind for kind in step.kinds)
        self.pieces += zip(step.texts, kinds)
        self.tokens += len(step.tokens)
        self.forwards += 1
        self.finished = step.finished

    def __str__(self) -> str:
        """Format the figures in one line."""
        rate = self.tokens / max(self.seconds, 1e-6)
        per_forward = self.tokens / max(self.forwards, 1)
        return f"{rate:.0f} tokens/s, {per_forward:.2f} tokens per forward"


def race(
    model: "Model", prompt: str, decoders: list[DecodeConfig]
) -> Iterator[list[Racer]]:
    """Yield the states of all decoders of a prompt after each step."""
    from infer.api import generate

    racers = [Racer(generate(model, prompt, decode)) for decode in decoders]
    while running := [racer for racer in racers if not racer.finished]:
        min(running, key=lambda racer: racer.seconds).advance()
        yield racers


def build(model: "Model", name: str) -> Any:
    """Return Gradio's page for a loaded model."""
    import gradio

    from infer.view import KINDS

    methods = ["plain", "ngrams", "prompt_lookup"]
    methods += ["hybrid", "sdsat"] if model.adaptive else []
    methods += ["gsd"] if model.draft else []

    def show(prompt: str, first: str, second: str, temperature: float) -> Any:
        decoders = [
            DecodeConfig(method, temperature=temperature) for method in (first, second)
        ]
        for left, right in race(model, prompt, decoders):
            yield [left.pieces, str(left), right.pieces, str(right)]

    with gradio.Blocks(title=f"{name}: playground", analytics_enabled=False) as page:
        prompt = gradio.Textbox(label="Prompt", lines=6)
        temperature = gradio.Slider(0, 2, 0, label="Temperature (0: greedy)")
        start = gradio.Button("Continue", variant="primary")
        choices = []
        outputs = []
        with gradio.Row():
            for method in (methods[-1], "plain"):
                with gradio.Column():
                    choices.append(gradio.Dropdown(methods, value=method))
                    colours = {name: kind.strong for name, kind in KINDS.items()}
                    outputs.append(gradio.HighlightedText(color_map=colours))
                    outputs.append(gradio.Markdown())
        start.click(show, [prompt, *choices, temperature], outputs)
    return page


def main(config: PlaygroundConfig) -> None:
    """Serve the page until Ctrl-C."""
    check_directory(config.model)
    from infer.api import load

    model = load(config.model, draft=config.draft)
    build(model, config.model).launch(show_error=True)


if __name__ == "__main__":
    run("playground", PlaygroundConfig, main)

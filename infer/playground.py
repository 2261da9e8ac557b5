"""python -m infer.playground: a page on this machine, one decoder beside plain decoding of the same prompt.

Both would disturb each other if they ran at once. So their steps alternate in one thread: the next step is that
of the decoder that has used less time so far, and only a decoder's own steps count for it.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from conf import UserError, run
from conf.schema import check_settings, setting
from infer.config import DTYPES, DecodeConfig, check_directory

if TYPE_CHECKING:
    from infer.api import Model, TextStep

REFRESH = 0.05  # seconds between two refreshes of the page


@dataclass
class PlaygroundConfig:
    """python -m infer.playground: a page to try a model on, on this machine."""

    #: a Transformers directory, best an export, or a hub name
    model: str = setting(hub="model")
    #: a model that drafts, as that of python -m infer
    draft: str | None = setting(None, hub="model")
    #: of the weights; auto: bfloat16 where the device computes in it as fast as in float32
    dtype: str = setting("auto", choices=DTYPES)
    #: of the CPU; null: the library's choice
    threads: int | None = setting(None, least=1)
    #: the port to listen on, at 127.0.0.1
    port: int = setting(7860, least=0, most=65535)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class Racer:
    """One decoder's text as it comes: pieces with the source of each, its forwards and its own seconds."""

    steps: Iterator["TextStep"]
    pieces: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0
    finished: bool = False

    def advance(self) -> None:
        """Take one step."""
        began = time.perf_counter()
        step = next(self.steps, None)
        self.seconds += time.perf_counter() - began
        if step is None:
            self.finished = True
            return
        kinds = [None if kind == "own" else kind for kind in step.kinds]
        self.pieces += zip(step.texts, kinds, strict=True)
        self.tokens += step.tokens
        self.forwards += 1
        self.finished = step.finished

    def __str__(self) -> str:
        """Format its figures in one line."""
        rate = len(self.tokens) / max(self.seconds, 1e-9)
        per_forward = len(self.tokens) / max(self.forwards, 1)
        return f"{len(self.tokens)} tokens, {rate:.0f} tokens/s, {per_forward:.2f} tokens per forward"


def race(
    model: "Model", prompt: str, decode: DecodeConfig
) -> Iterator[tuple[Racer, Racer]]:
    """Yield the states of `decode` and of plain decoding of the same prompt and seed after each step."""
    from infer.api import generate

    shared = {
        name: getattr(decode, name)
        for name in ("max_new_tokens", "temperature", "top_p", "seed")
    }
    racers = [
        Racer(generate(model, prompt, each))
        for each in (decode, replace(DecodeConfig("plain"), **shared))
    ]
    while running := [racer for racer in racers if not racer.finished]:
        min(running, key=lambda racer: racer.seconds).advance()
        yield racers[0], racers[1]


def build(model: "Model", name: str) -> Any:
    """Return Gradio's page for a loaded model."""
    import gradio

    from infer.view import KINDS

    colours = {source: kind.strong for source, kind in KINDS.items()}
    methods = ["plain", "ngrams", "prompt_lookup"]
    if model.adaptive:
        methods.insert(0, "hybrid")
    if model.draft:
        methods.insert(0, "gsd")

    def show(
        prompt: str, method: str, tokens: float, temperature: float
    ) -> Iterator[tuple[Any, ...]]:
        decode = DecodeConfig(
            method, max_new_tokens=int(tokens), temperature=temperature
        )
        shown = 0.0
        racers = None
        try:
            for racers in race(model, prompt, decode):
                if time.perf_counter() - shown > REFRESH:
                    yield tuple(
                        value
                        for racer in racers
                        for value in (racer.pieces, str(racer))
                    )
                    shown = time.perf_counter()
        except (UserError, ValueError) as error:
            raise gradio.Error(str(error)) from error
        if racers:
            yield tuple(
                value for racer in racers for value in (racer.pieces, str(racer))
            )

    with gradio.Blocks(title=f"{name}: playground", analytics_enabled=False) as page:
        gradio.Markdown(
            f"# {name}\nOne decoder beside plain decoding; accepted drafts are coloured by source."
        )
        prompt = gradio.Textbox(label="Prompt", lines=6)
        with gradio.Row():
            method = gradio.Dropdown(methods, value=methods[0], label="Method")
            tokens = gradio.Slider(
                1, min(1024, model.context), 128, step=1, label="New tokens"
            )
            temperature = gradio.Slider(
                0, 2, 0, step=0.05, label="Temperature (0: greedy)"
            )
        start = gradio.Button("Continue", variant="primary")
        outputs = []
        with gradio.Row():
            for label in ("This method", "Plain decoding"):
                with gradio.Column():
                    text = gradio.HighlightedText(
                        label=label, color_map=colours, combine_adjacent=True
                    )
                    outputs += [text, gradio.Markdown()]
        start.click(
            show, [prompt, method, tokens, temperature], outputs, concurrency_limit=1
        )
    return page


def main(config: PlaygroundConfig) -> None:
    """Serve the page until Ctrl-C."""
    check_directory(config.model)
    if find_spec("gradio") is None:
        raise UserError(
            "gradio must be installed, got none. Run pip install 'gradio>=6.31'."
        )
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import torch  # late: a mistake in the settings is reported without waiting for PyTorch

    from infer.api import load

    if config.threads:
        torch.set_num_threads(config.threads)
    model = load(config.model, config.dtype, draft=config.draft)
    build(model, config.model).queue().launch(server_port=config.port, share=False)


if __name__ == "__main__":
    run("playground", PlaygroundConfig, main)

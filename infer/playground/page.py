"""The page, in Gradio: a prompt and settings on top, two texts below."""

import time
from collections.abc import Iterator
from typing import Any

import gradio

from conf import UserError
from infer.api import Model
from infer.playground.race import DECODERS, Racer, decode_of, race, verdict
from infer.requests import Infill
from infer.view import STYLE

REFRESH = 0.05  # seconds between two refreshes of the page
# In the head, since Gradio narrows its own `css` down and loses the colours of the dark scheme.
HEAD = f"""<style>
{STYLE}
.gradio-container pre {{ min-height: 12rem; max-height: 32rem; overflow: auto; }}
.gradio-container :is(pre, .legend) {{ color: var(--ink); background: var(--paper); padding: 0.5rem 1rem; }}
.gradio-container :is(pre, .legend) span {{ color: var(--ink); }}
.gradio-container :is(pre, .legend) .given {{ color: var(--faint); }}
.legend {{ font-size: 0.85rem; }}
</style>
"""


def build(model: Model, name: str) -> gradio.Blocks:
    """Return the page for a loaded model."""
    adaptive, drafting = model.adaptive is not None, model.draft is not None
    decoders = [
        decoder
        for decoder, settings in DECODERS.items()
        if (settings.method != "gsd" or drafting) and (settings.method != "sdsat" or adaptive)
    ]
    with gradio.Blocks(title=f"{name}: playground", analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown(f"# {name}\nIts decoding beside plain decoding of the same prompt, in turns.")
        with gradio.Row():
            prompt = gradio.Textbox(
                label="Prompt, or prefix", lines=6, max_lines=16, elem_id="prompt", min_width=300
            )
            suffix = gradio.Textbox(
                label="Suffix, to fill in between", lines=6, max_lines=16, elem_id="suffix", min_width=300
            )
        with gradio.Row():
            decoder = gradio.Dropdown(decoders, value=decoders[0], label="Decoder", elem_id="decoder")
            tokens = gradio.Slider(1, min(1024, model.context), 128, step=1, label="New tokens")
            k = gradio.Slider(0, 16, 0, step=1, label="k, drafts by adaptive tokens (0: chosen)")
        with gradio.Row():
            temperature = gradio.Slider(0, 2, 0, step=0.05, label="Temperature (0: greedy)")
            top_p = gradio.Slider(0.05, 1, 1, step=0.05, label="top_p")
            seed = gradio.Number(0, precision=0, minimum=0, label="Seed")
        with gradio.Row():
            start = gradio.Button("Continue", variant="primary", elem_id="continue")
            stop = gradio.Button("Stop", elem_id="stop")
        result = gradio.Markdown(elem_id="result")
        with gradio.Row():
            with gradio.Column(min_width=300):
                ours_figures = gradio.Markdown("**This decoder**", elem_id="drafting-figures")
                ours = gradio.HTML(elem_id="drafting")
            with gradio.Column(min_width=300):
                plain_figures = gradio.Markdown("**Plain decoding**", elem_id="plain-figures")
                plain = gradio.HTML(elem_id="plain")

        def complete(*values: Any) -> Iterator[tuple[str, ...]]:
            try:
                yield from _frames(model, *values)
            except (UserError, ValueError) as error:
                raise gradio.Error(str(error)) from error

        running = start.click(
            complete,
            [prompt, suffix, decoder, tokens, k, temperature, top_p, seed],
            [ours, ours_figures, plain, plain_figures, result],
            show_progress="hidden",
            concurrency_limit=1,
        )
        stop.click(None, cancels=running)
    return page


def _frames(
    model: Model,
    prompt: str,
    suffix: str,
    decoder: str,
    tokens: float,
    k: float,
    temperature: float,
    top_p: float,
    seed: float,
) -> Iterator[tuple[str, ...]]:
    if not prompt and not suffix:
        raise UserError("the prompt must be text, got none. Type one.")
    settings = {"max_new_tokens": int(tokens), "temperature": temperature, "top_p": top_p, "seed": int(seed)}
    decode = decode_of(decoder, k=int(k), **settings)
    refreshed, last = 0.0, None
    for last in race(model, Infill(prompt, suffix) if suffix else prompt, decode):
        if time.perf_counter() - refreshed > REFRESH:
            yield _frame(*last, "")
            refreshed = time.perf_counter()
    if last:
        yield _frame(*last, f"### {verdict(*last)}")


def _frame(drafting: Racer, plain: Racer, result: str) -> tuple[str, ...]:
    return (
        drafting.html,
        f"**This decoder**: {drafting.figures}",
        plain.html,
        f"**Plain decoding**: {plain.figures}",
        result,
    )

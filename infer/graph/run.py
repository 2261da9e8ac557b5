"""Decode a text, choose one of its drafts, and show it as a graph."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from conf import UserError
from conf.console import print_line
from conf.files import file_to_write
from infer.api import Model, generate, load
from infer.config import BY_DRAFT_MODEL, DecodeConfig, GraphConfig
from infer.drafters.outcome import Outcome
from infer.graph.picture import print_graph, title, write_picture
from infer.methods import NODES
from infer.models import parallel


@dataclass(frozen=True)
class Seen:
    """A draft, and the text that had been written when it was made."""

    outcome: Outcome
    before: str


def run(config: GraphConfig) -> None:
    """Decode, choose a draft, and show it."""
    out = file_to_write("out", config.out)
    if config.threads:
        torch.set_num_threads(config.threads)
    model = load(config.model, config.dtype, config.device, draft=config.draft)
    if model.adaptive is None and model.draft is None:
        raise UserError(
            "decode.method needs a draft model (draft=DIR or draft=self:N) or a model with adaptive tokens, "
            "got neither, and drafts that are no graphs"
        )
    seen = drafts_of(model, config.prompt, config.decode)
    chosen = choose([draft.outcome for draft in seen], config.step)
    outcome, before = seen[chosen].outcome, config.prompt + seen[chosen].before
    caption = f"draft {chosen + 1} of {len(seen)}: {title(outcome, model.text)}"
    if parallel.is_first():
        print_graph(Console(), outcome, model.text, before=before, caption=caption)
        if out:
            write_picture(out, outcome, model.text, caption=caption)
            print_line(f"wrote {out}", error=True)


def drafts_of(model: Model, prompt: str, decode: DecodeConfig) -> list[Seen]:
    """Return every draft of the text but the last step's. A draft model's graph is drawn to its end, and is the
    same on every machine; the part that pays would differ from machine to machine.
    """
    decode = model.methods.settled(decode)
    if decode.method in BY_DRAFT_MODEL and decode.nodes is None:
        decode = replace(decode, nodes=NODES)
    seen, texts = list[Seen](), list[str]()
    for step in generate(
        model, prompt, decode, watch=lambda outcome: seen.append(Seen(outcome, "".join(texts)))
    ):
        texts.append(step.text)
    return seen


def choose(drafts: Sequence[Outcome], step: int | None) -> int:
    """Return the index of the draft to show: of the first with merges, else of the one of most nodes.

    Raises UserError for a step beyond the drafts, and where there are none.
    """
    if not drafts:
        raise UserError("decode.max_new_tokens must give a text long enough for drafts, got none in it")
    if step is not None:
        if step > len(drafts):
            raise UserError(f"step must be one of the text's {len(drafts)} drafts, got {step}")
        return step - 1
    merged = [index for index, outcome in enumerate(drafts) if outcome.graph.merged]
    return merged[0] if merged else max(range(len(drafts)), key=lambda index: len(drafts[index].graph.tokens))

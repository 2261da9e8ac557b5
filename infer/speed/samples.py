"""Texts with who produced each part: the model itself, its drafts, or a draft behind a merged node."""

from collections.abc import Collection
from dataclasses import replace

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.reading import Request
from infer.loop import decode
from infer.measure.runs import seed_of
from infer.speed.bench import Own
from infer.speed.units import Way
from infer.text import Output, Text, in_pieces


def shown(ways: Collection[Way]) -> set[Way]:
    """Of the model's own ways all, but of sdsat that with the most drafts."""
    fixed = [way for way in ways if way.decoder == "sdsat"]
    others = {way for way in ways if way.decoder not in ("sdsat", "base")}
    return others | ({max(fixed, key=lambda way: way.k)} if fixed else set())


def sample(own: Own, prompt: TokenPrompt, text: Text, *, seed: int) -> list[list[str]]:
    """The text in pieces of [kind, text], as Step.kinds has them."""
    output = Output(text.stream(opens=not prompt.before), ends=prompt.ends)
    limits = replace(own.limits.of((), prompt.max_new_tokens), stop=lambda _: output)
    request = Request(prompt.ids, seed_of(prompt, seed))
    steps = (step for (step,) in decode(own.runner, [request], own.drafters, limits, own.sampling))
    return in_pieces(
        told for step in steps for told in zip(step.kinds, output.take(finished=step.finished), strict=True)
    )

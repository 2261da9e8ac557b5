"""Texts with who produced each part: the model itself, its drafts, or a draft behind a merged node."""

from collections.abc import Collection
from dataclasses import replace

from infer.benchmarks.prompts import TokenPrompt
from infer.engine.reading import Request
from infer.loop import Step, decode
from infer.measure.runs import seed_of
from infer.output import Output
from infer.speed.bench import Own
from infer.speed.units import Way
from infer.text import Text


def shown(ways: Collection[Way]) -> set[Way]:
    """Of the model's own ways all, but of sdsat that with the most drafts."""
    fixed = [way for way in ways if way.decoder == "sdsat"]
    others = {way for way in ways if way.decoder not in ("sdsat", "base")}
    return others | ({max(fixed, key=lambda way: way.k)} if fixed else set())


def sample(own: Own, prompt: TokenPrompt, text: Text, *, seed: int) -> list[list[str]]:
    """[kind, text] in turn; a kind is own, drafted or shared."""
    output = Output(text.stream(opens=not prompt.before), ends=prompt.ends)
    limits = replace(own.limits, stop=lambda _: output)
    request = Request(prompt.ids, seed_of(prompt, seed))
    found = list[list[str]]()
    for (step,) in decode(own.runner, [request], own.drafters, limits, own.sampling):
        for kind, piece in zip(_kinds(step), output.take(finished=step.finished), strict=True):
            if found and found[-1][0] == kind:
                found[-1][1] += piece
            elif piece:
                found.append([kind, piece])
    return found


def _kinds(step: Step) -> list[str]:
    drafted, own = step.accepted - step.shared, len(step.tokens) - step.accepted
    return ["drafted"] * drafted + ["shared"] * step.shared + ["own"] * own

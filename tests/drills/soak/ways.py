"""One case by all its ways, each text held against plain decoding of its prompt alone.

Where drafts are verified by ratio the text is another one of the same distribution, and what is promised is
that it does not depend on the texts beside it: it is held against the same decoder's text of the prompt alone.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel

from infer import DecodeConfig, Model, generate
from infer.engine.reading import Request
from infer.methods import library_processors
from tests.drills.lossless import gap
from tests.drills.soak.callers import Countdown, FailingProcessor, Stopped, Told, add, told
from tests.drills.soak.cases import Case, Way, ids_of, settings_of
from tests.drills.soak.house import House
from tests.drills.soak.library import by_custom_generate, by_itself

NEAR_TIE = 1e-4  # by float64: float32 logits of some tens, rounded a few times on their way, may be so far off


@dataclass
class Found:
    """Of one way: texts and tokens that were compared, and what was wrong. `gaps` are those of near-ties."""

    way: Way
    texts: int
    tokens: int
    wrong: list[str]
    gaps: list[float]


def run(case: Case, house: House, exact: PreTrainedModel, folder: str) -> Iterator[Found]:
    """Every way of a case; before them plain decoding beside the library's own, where that is greedy."""
    model = replace(house.model(case.slot), eos=house.model(case.slot).eos | case.ends)
    plain = _alone(model, case, case.plain)
    if case.slot == "library" and not case.plain.temperature:
        found = Found(Way("the library", {}, "whole", 0), 0, 0, [], [])
        theirs = by_itself(house.lm, case, model, ids_of(case.prompts[0], model.text))
        _compare(found, [Told(theirs, plain[0].text, whole=True)], plain, case, model, exact)
        yield found
    for way in case.ways:
        found = Found(way, 0, 0, [], [])
        try:
            ratio = way.settings.get("verify") == "ratio"
            wanted = _alone(model, case, settings_of(case, way)) if ratio else plain
            if case.slot == "library":
                heard = by_custom_generate(house.lm, case, way, model, plain, folder)
            else:
                heard = _by_infer(model, case, way)
            for texts in heard:
                _compare(found, texts, wanted, case, model, exact)
        except Exception:  # of any kind: it is the drill's find
            found.wrong.append(traceback.format_exc())
        yield found


def _alone(model: Model, case: Case, decode: DecodeConfig) -> list[Told]:
    pairs = zip(case.prompts, case.seeds)
    return [told(generate(model, prompt, decode, seeds=[seed]), 1)[0] for prompt, seed in pairs]


def _by_infer(model: Model, case: Case, way: Way) -> Iterator[list[Told]]:
    decode, n = settings_of(case, way), len(case.prompts)
    further: dict[str, Any] = {}
    if way.ending == "processor raises":
        further["processors"] = LogitsProcessorList([FailingProcessor(way.after)])
    if way.ending == "watch raises":
        further["watch"] = Countdown(way.after)
    start = partial(generate, model, case.prompts, decode, seeds=case.seeds, **further)
    steps = start()
    if way.ending == "beside":
        found, other = [Told([]) for _ in range(n)], [Told([]) for _ in range(n)]
        for mine, theirs in zip_longest(steps, start()):
            for texts, step in ((found, mine), (other, theirs)):
                if step:
                    add(texts, step)
        yield from (found, other)
        return
    if way.ending in ("abandoned", "closed", "thrown"):
        yield told(steps, n, way.after)
        _leave(steps, way.ending)
        return
    found = [Told([]) for _ in range(n)]
    try:
        for step in steps:
            add(found, step)
    except Stopped:
        assert further
        yield found
        return
    assert all(one.whole for one in found)
    yield found


def _leave(steps: Any, ending: str) -> None:
    """In the middle of a text, or behind its end."""
    if ending == "closed":
        steps.close()
    if ending == "thrown":
        try:
            steps.throw(Stopped())
        except Stopped:
            pass
        else:
            raise AssertionError("what was thrown into the generator did not come out")
    if ending != "abandoned":
        assert next(steps, None) is None


def _compare(
    found: Found, texts: list[Told], wanted: list[Told], case: Case, model: Model, exact: PreTrainedModel
) -> None:
    """Where a text parts from the wanted one: how near the two picks lie."""
    for prompt, seed, one, other in zip(case.prompts, case.seeds, texts, wanted):
        found.texts += 1
        found.tokens += len(one.tokens)
        if one.begins(other):
            continue
        ids = ids_of(prompt, model.text)
        apart = _apart(ids, seed, one.tokens, other.tokens, case.plain, model, exact)
        if found.way.settings.get("verify") != "ratio" and apart < NEAR_TIE:
            found.gaps.append(apart)
        else:
            told = f"prompt of {len(ids)} tokens: gap {apart:.1e}"
            found.wrong.append(
                f"{told}\n  wanted {other.tokens} {other.text!r}\n  found  {one.tokens} {one.text!r}"
            )


def _apart(
    ids: list[int],
    seed: int,
    tokens: list[int],
    wanted: list[int],
    decode: DecodeConfig,
    model: Model,
    exact: PreTrainedModel,
) -> float:
    if all(a == b for a, b in zip(tokens, wanted)):
        return float("inf")  # one ends where the other goes on, or the texts of the same tokens differ
    ends = model.eos | model.text.ends(ids)
    processors = library_processors(decode, prompt=len(ids), ends=ends, device=exact.device)
    return gap(exact, Request(ids, seed, processors), wanted, tokens, decode.sampling)

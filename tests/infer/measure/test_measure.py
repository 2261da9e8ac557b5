"""Runs of decoders: what is counted and when the clock is read."""

from infer.benchmarks.prompts import TokenPrompt
from infer.loop import Step
from infer.measure.runs import Measured, Run, measure, run_of, seed_of


def prompt(*ids: int) -> TokenPrompt:
    return TokenPrompt(f"fake/{ids[0]}", ids, frozenset(), "", "")


def test_measured_figures_are_those_of_all_rounds() -> None:
    """Outputs were the first round's alone: a policy that drafts otherwise in the second was never compared."""
    plain = Measured([[Run([1, 2, 3, 4], 4.0, 4, 0, 0)] * 2, [Run([1, 2, 3, 4], 2.0, 4, 0, 0)] * 2])
    right, wrong = Run([1, 2, 3, 4], 2.0, 3, 4, 1), Run([1, 2, 3, 5], 2.0, 1, 4, 3)
    drafted = Measured([[right, right], [right, wrong]])
    assert plain.tokens_per_second == [1.0, 2.0] and drafted.speedups(plain) == [2.0, 1.0]
    assert [ours == theirs for ours, theirs in zip(drafted.outputs, plain.outputs)] == [True, False]


def test_decoders_take_turns_after_a_warm_up() -> None:
    calls: list[tuple[str, int]] = []

    def decoder(name: str):
        def run(prompt: TokenPrompt) -> Run:
            calls.append((name, prompt.ids[0]))
            return Run([0], 1.0, 1, 0, 0)

        return run

    done, decoders = [], {name: decoder(name) for name in "ab"}
    result = measure(decoders, [prompt(1), prompt(2)], rounds=2, advance=lambda: done.append(1))
    assert calls[:2] == [("a", 1), ("b", 1)]  # warm-up, uncounted
    assert calls[2:] == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert len(done) == 4 and [len(r) for r in result["a"].rounds] == [2, 2]


def test_a_run_is_the_sum_of_its_steps() -> None:
    steps = [
        Step(0, [5], 0, 0, False, rows=4),
        Step(0, [6, 7, 8], 3, 2, False, depth=3, rows=4),
        Step(0, [9], 3, 1, True, depth=3, rows=4),  # an end within the draft: what lay behind was not judged
    ]
    run = run_of(steps, seconds=3.0, first_seconds=1.0)
    more = {"rows": 12, "verifications": 2, "levels": 6, "depths": (0, 3, 1), "accepts": (0, 2, 1)}
    assert run == Run([5, 6, 7, 8, 9], 3.0, 3, 6, 3, first_seconds=1.0, first_tokens=1, **more)


def test_accepted_drafts_are_counted_by_source_and_place() -> None:
    """A tree may propose more than a path has; an end within a draft accepts fewer than are proposed."""
    chain, tree = ("adaptive", "text", "ngrams"), ("adaptive", "text", "adaptive")
    steps = [
        Step(0, [5], 0, 0, False),
        Step(0, [6, 7, 8, 9], 3, 3, False, depth=3, sources=chain, proposed=chain),
        Step(0, [10, 11], 3, 1, False, depth=2, sources=("text",), proposed=tree),
    ]
    run = run_of(steps, seconds=3.0, first_seconds=1.0)
    assert run.proposed == {"adaptive": 3, "text": 2, "ngrams": 1}
    assert run.sources == {"adaptive": [1], "text": [1, 1], "ngrams": [0, 0, 1]}


def test_a_prompt_has_its_own_draws_and_the_same_in_every_round() -> None:
    assert seed_of(prompt(1), 7) == seed_of(prompt(1, 2), 7) != seed_of(prompt(2), 7)
    assert 0 <= seed_of(prompt(1), 2**63 - 1) < 2**63
    assert seed_of(prompt(1), 7) != seed_of(prompt(1), 8)

from infer.engine.runner import Runners
from tests.conftest import tiny_llama


def test_a_runner_with_graphs_is_kept_for_the_next_text_that_fits() -> None:
    """Every call captured its graphs anew."""
    runners = Runners(tiny_llama(), static=True)
    first = runners.take(batch=2, capacity=60, max_rows=9)
    other = runners.take(batch=1, capacity=10, max_rows=1)  # the first is in use
    assert other is not first
    runners.give(first)
    assert runners.take(batch=1, capacity=40, max_rows=9) is first
    runners.give(first)
    assert runners.take(batch=1, capacity=61, max_rows=9) is not first


def test_one_without_is_not_worth_its_memory() -> None:
    runners = Runners(tiny_llama())
    first = runners.take(batch=1, capacity=60, max_rows=9)
    runners.give(first)
    assert runners.take(batch=1, capacity=60, max_rows=9) is not first


def test_a_runner_of_other_weights_does_not_fit() -> None:
    """The graphs of `infer.generate` had the addresses of the weights before, and its cache their type."""
    lm = tiny_llama()
    runners = Runners(lm, static=True)
    runners.give(first := runners.take(batch=1, capacity=40, max_rows=9))
    lm.double()
    assert runners.take(batch=1, capacity=40, max_rows=9) is not first

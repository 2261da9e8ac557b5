"""The library's decoding beside ours: the same tokens, counted and timed in the same way."""

from collections.abc import Sequence

import pytest
from transformers import LlamaForCausalLM

from infer.benchmarks.prompts import TokenPrompt
from infer.config import DraftConfig
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY, Sampling
from infer.loop import Drafter, Drafters, Limits
from infer.measure.runs import Decoder, loop_decoder
from infer.models.draft import Draft, _narrow_head, load_draft
from infer.speed.peers import ASSISTED, GENERATE, LOOKUP, peer_decoders
from tests.conftest import tiny_llama

NEW, CAPACITY = 20, 64


def prompt(ids: Sequence[int], *ends: int, id: str = "a") -> TokenPrompt:
    return TokenPrompt(id, tuple(ids), frozenset(ends), "", "")


PROMPTS = [prompt([5, 17, 40, 3]), prompt([8, 9, 10] * 5), prompt([2]), prompt(range(20, 40))]


@pytest.fixture(scope="module")
def lm() -> LlamaForCausalLM:
    """A model of its own: the peers change it, and put it back."""
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(lm: LlamaForCausalLM) -> Decoder:
    return loop_decoder(Runner(lm, capacity=CAPACITY, max_rows=1), Drafters(Drafter), Limits(NEW, {1}))


@pytest.fixture
def another() -> Draft:
    """A model that has only some of the ids."""
    small = tiny_llama(vocab=60, seed=1)
    _narrow_head(small, 50)
    return Draft(small, 50, 512)


def own_layer(lm: LlamaForCausalLM, rows: int) -> Draft:
    return load_draft(DraftConfig("self:1"), lm, rows=rows, adaptive=None)


def peers(lm: LlamaForCausalLM, draft: Draft | None = None, sampling: Sampling = GREEDY) -> dict[str, Decoder]:
    return peer_decoders(lm, draft, sampling=sampling, max_new_tokens=NEW, capacity=CAPACITY)[0]


def test_greedy_peers_give_the_tokens_of_plain_decoding(
    lm: LlamaForCausalLM, plain: Decoder, another: Draft
) -> None:
    """Drafting with the model's first layer, whole and without the last ids; and with another model."""
    for draft in (own_layer(lm, 97), own_layer(lm, 80), another):
        for name, decoder in peers(lm, draft).items():
            for item in PROMPTS:
                expected = plain(item).tokens
                assert decoder(item).tokens == expected, name
                ended = prompt(item.ids, expected[len(expected) // 2], 96)
                assert decoder(ended).tokens == plain(ended).tokens
    assert lm.config._attn_implementation == "sdpa"


def test_what_peers_feed_and_accept_is_counted(lm: LlamaForCausalLM) -> None:
    accepted = dict.fromkeys((GENERATE, LOOKUP, ASSISTED), 0)
    for name, decoder in peers(lm, own_layer(lm, 80)).items():
        for item in PROMPTS:
            run = decoder(item)
            assert len(run.tokens) == run.forwards + run.accepted
            assert run.rows == run.forwards + run.drafted
            assert len(run.depths) == len(run.accepts) == run.forwards
            assert sum(run.depths) == run.drafted and sum(run.accepts) == run.accepted
            assert run.first_tokens == 1 + run.accepts[0] and 0 < run.first_seconds < run.seconds
            accepted[name] += run.accepted
    assert accepted[GENERATE] == 0 and accepted[LOOKUP] > 0 and accepted[ASSISTED] > 0
    run = peers(lm, Draft(tiny_llama(), 97, 512))[ASSISTED](PROMPTS[0])  # a draft that is always right
    assert run.drafted == run.accepted > 0 and run.rows == NEW


def test_generation_settings_of_a_directory_are_left_out_and_left_there(
    lm: LlamaForCausalLM, plain: Decoder, another: Draft
) -> None:
    expected, own = plain(PROMPTS[1]).tokens, lm.generation_config
    own.repetition_penalty = 5.0
    try:
        assert all(decoder(PROMPTS[1]).tokens == expected for decoder in peers(lm, another).values())
    finally:
        own.repetition_penalty = None
    assert lm.generation_config is own
    assert another.lm.config.vocab_size == 60 and not another.lm._forward_hooks and not lm._forward_pre_hooks


def test_sampled_peers_draw_by_the_prompt_and_its_seed(lm: LlamaForCausalLM, another: Draft) -> None:
    for name, decoder in peers(lm, another, Sampling(1.0, 0, 0.95)).items():
        texts = [decoder(prompt([5, 17], id=id)).tokens for id in ("a", "b", "a")]
        assert texts[0] == texts[2] != texts[1], name


@pytest.mark.parametrize("narrow", [Sampling(1.0, 1), Sampling(1.0, 0, 1e-6), Sampling(1e-4)])
def test_temperature_top_k_and_top_p_are_the_rows_own(
    lm: LlamaForCausalLM, plain: Decoder, another: Draft, narrow: Sampling
) -> None:
    tokens = {name: decoder(PROMPTS[0]).tokens for name, decoder in peers(lm, another, narrow).items()}
    assert tokens == dict.fromkeys((GENERATE, LOOKUP, ASSISTED), plain(PROMPTS[0]).tokens)


def test_no_token_is_cut_off_where_none_is_asked_to_be(lm: LlamaForCausalLM) -> None:
    """The library cuts all but the 50 likeliest by default."""
    decoder = peer_decoders(lm, None, sampling=Sampling(1e4), max_new_tokens=1, capacity=CAPACITY)[0][GENERATE]
    assert len({decoder(prompt([5], id=str(seed))).tokens[0] for seed in range(120)}) > 55


def test_a_peer_that_cannot_be_is_left_out_with_the_reason(lm: LlamaForCausalLM) -> None:
    short = Draft(tiny_llama(), 97, 40)
    for draft, why in ((None, ", got none"), (short, " of 64 positions, got 40")):
        result, reasons = peer_decoders(lm, draft, sampling=GREEDY, max_new_tokens=NEW, capacity=CAPACITY)
        assert result.keys() == {GENERATE, LOOKUP} and reasons == {ASSISTED: f"it needs a draft model{why}"}

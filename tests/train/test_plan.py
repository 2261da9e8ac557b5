from dataclasses import replace

import pytest

from conf import UserError, settings
from data_prep.vocab import Vocab
from train.config import TrainConfig
from train.model import load_model, model_config
from train.plan import count_parameters, estimate_memory, print_plan

VOCAB = Vocab(size=100, bos=3, eos=4, pre=None, suf=None, mid=None, eot=None, adaptive=(7,))


def test_the_7b_plan_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings("train", TrainConfig, ["experiment=sdsat_7b_l5"])
    assert count_parameters(model_config(config.model)) == 6_738_546_688  # CodeLlama-7b-hf
    print_plan(config)
    printed = capsys.readouterr().out
    for part in ("6.74B parameters", "dual, L=5", "2,000", "4.19M computed", "ZeRO stage 2", "GiB"):
        assert part in printed


def test_zero_stages_divide_what_they_should() -> None:
    architecture = model_config(settings("train", TrainConfig, []).model)
    common = {"parameters": 1000, "rows": 2, "seq_len": 16, "chunk": 8, "ranks": 4}
    common |= {"bytes_per_weight": 2, "checkpointing": True}
    found = [estimate_memory(architecture, stage=stage, **common) for stage in range(4)]
    assert [m.optimizer for m in found] == [12000, 3000, 3000, 3000]
    assert [m.gradients for m in found] == [2000, 2000, 500, 500]
    assert [m.weights for m in found] == [2000, 2000, 2000, 500]


def test_a_path_that_does_not_exist_is_told_at_once(tmp_path) -> None:
    """Transformers asked the hub and retried for half a minute."""
    config = settings("train", TrainConfig, [f"model.path={tmp_path / 'absent'}"])
    with pytest.raises(UserError, match=r"model\.path=.*found no config\.json"):
        model_config(config.model, vocab=VOCAB)
    config = settings("train", TrainConfig, [])
    with pytest.raises(UserError, match=r"'model\.path' is required"):
        model_config(config.model, vocab=VOCAB)


def test_too_small_an_embedding_is_refused(tmp_path) -> None:
    import torch

    random = ["model=demo", "model.shape.hidden_size=32", "model.shape.num_hidden_layers=1"]
    config = settings("train", TrainConfig, random)
    load_model(config.model, vocab=replace(VOCAB, size=64), dtype=torch.float32, seed=0).save_pretrained(
        tmp_path
    )
    config = settings("train", TrainConfig, [f"model.path={tmp_path}"])
    with pytest.raises(UserError, match="wanted at least 65 embedding rows.*found 64"):
        load_model(config.model, vocab=replace(VOCAB, size=65), dtype=torch.float32, seed=0)


def test_random_weights_take_the_datas_vocabulary() -> None:
    """The exported demo model ended its texts at CodeLlama's id 2, a control piece of another meaning."""
    found = model_config(settings("train", TrainConfig, ["model=demo"]).model, vocab=VOCAB)
    assert (found.vocab_size, found.bos_token_id, found.eos_token_id) == (100, 3, 4)

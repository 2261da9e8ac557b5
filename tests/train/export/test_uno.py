"""Test adapters in Uno's format: training on noise, export, and drafting like SGLang and vLLM."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from conf.errors import UserError
from conf.hub import ADAPTERS, SHIPPED
from conf.runs.files import read_json
from conf.runs.stage import ROOT
from data_prep.vocab import Vocab
from infer import DecodeConfig, load
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.loop import Drafters, Limits, decode
from infer.models.gated import gate_model
from infer.trees.mask_tokens import MaskTokens
from tests.conftest import make_once, tiny_llama
from tests.infer.library import by_tokens, tokens_of
from tests.markdown import commands as page_commands
from tests.test_docs import check
from tests.train.export.live_worker import BFLOAT16, STAGES
from tests.train.export.runs import GATED, TIED, export, refused, train
from tests.uno_server import UnoServer
from train.attention import register
from train.config import LoraSettings
from train.data import to_tensors
from train.export.uno import tree_flags, vllm_config
from train.lora import Gate, PlainWeights, adapt
from train.model import AdaptiveLM
from train.objective import branch, with_noise

#: Vocabulary size: the decoder's probabilities of candidates are over this many tokens.
V = 8
L = 4
NODES = 12
CANDIDATES = 4
PROMPTS = [
    [*map(int, row)] for row in np.random.default_rng(3).integers(V, size=(8, 7))
]
NEW = 48
ID = 17
FLOAT32 = "dtype=float32"
SHORT = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
#: Names of weights and settings that SGLang and vLLM check when they load a folder.
WEIGHT = re.compile(
    r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight"
)
UNSUPPORTED = {
    "trainable_token_indices",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model and an adapter that was trained on noise for a few steps."""
    folder = tmp_path_factory.mktemp("uno")
    lm = tiny_llama(vocab=V)
    lm.save_pretrained(folder / "base")
    lm.set_attn_implementation(register("sdpa"))
    config = LoraSettings(rank=4, gated=True)
    adapt(lm, config, adaptive=())
    module = AdaptiveLM(lm, chunk=256, L=L, gate=Gate(lm))
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    generator = np.random.default_rng(0)
    tokens = generator.integers(V, size=(4, 32))
    documents = np.zeros_like(tokens)
    starts = np.arange(3, 24, 3)
    windows = [(starts, np.full(len(starts), L))] * len(tokens)
    everywhere = np.ones_like(tokens, dtype=bool)
    layout = branch(tokens, documents, windows, everywhere, (0,))
    for _ in range(12):
        noise = generator.integers(V, size=layout.ids.shape)
        rows = to_tensors(with_noise(layout, noise), torch.device("cpu"))
        module.soft = 1.0
        optimizer.zero_grad()
        module(**rows)[0].backward()
        optimizer.step()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(lm.config)
    weights = PlainWeights(
        plain,
        config,
        lm.state_dict(),
        adaptive=(),
        merged=False,
        dtype=torch.float32,
    )
    weights.save_adapter(
        folder / "adapter", targets=weights.short_targets(), base="base"
    )
    return folder


def project_texts(
    folder: Path, planner: FixedPlanner | None
) -> list[tuple[list[int], list[int]]]:
    """Return each prompt's text and the accepted drafts of its verifications, by this project."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    runner = Runner(
        gate_model(base, folder / "adapter"), capacity=80, max_rows=1 + NODES + L
    )
    result = []
    for prompt in PROMPTS:
        new = by_tokens(MaskTokens(noise=V), planner) if planner else Drafters()
        steps = [
            step for (step,) in decode(runner, [Request(prompt)], new, Limits(NEW))
        ]
        text = [token for step in steps for token in step.tokens]
        result.append((text, [step.accepted for step in steps if step.drafted]))
    return result


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_servers_accept_as_many_drafts_as_this_project(
    served: Path, tree: bool
) -> None:
    """With the same noise, each step accepts the same number; texts equal plain decoding's."""
    base = AutoModelForCausalLM.from_pretrained(served / "base").eval()
    shape = {"candidates": CANDIDATES, "nodes": NODES} if tree else {}
    server = UnoServer.load(base, served / "adapter", rows=L + 1, **shape)
    planner = FixedPlanner(L, "root")
    if tree:
        planner = FixedPlanner(L, "root", nodes=NODES - 1, width=CANDIDATES)
    mask = MaskTokens(noise=V)

    def noise(length: int, count: int) -> tuple[int, ...]:
        return mask.row(count, length=length)

    lengths = []
    for prompt, (text, accepted), (plain, _) in zip(
        PROMPTS, project_texts(served, planner), project_texts(served, None)
    ):
        server_text, cycles = server.generate(prompt, noise, tokens=NEW)
        assert server_text[:NEW] == text == plain
        count = len(cycles) - 2  # the end of the text cuts off the last cycles
        assert accepted[:count] == cycles[:count]
        lengths += cycles[:count]
    assert len({*lengths}) > 2 and max(lengths) > 2


def test_drafts_do_not_depend_on_the_batch(served: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(served / "base").eval()
    lm = gate_model(base, served / "adapter")
    drafters = by_tokens(MaskTokens(noise=V), FixedPlanner(L, "all"))
    runner = Runner(lm, capacity=80, max_rows=drafters.max_rows, batch=4)

    def accepted(prompts: list[list[int]]) -> list[list[int]]:
        requests = [Request(prompt) for prompt in prompts]
        result: list[list[int]] = [[] for _ in prompts]
        for steps in decode(runner, requests, drafters, Limits(NEW)):
            for step in steps:
                result[step.sequence].append(step.accepted)
        return result

    together = accepted(PROMPTS[:4])
    assert together == [accepted([prompt])[0] for prompt in PROMPTS[:4]]


@pytest.fixture(scope="module")
def trained(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on noise and on an existing token, both with tied embeddings; return the folder."""
    gated = [*GATED, TIED, "objective.previous_token=true"]
    runs = {
        "noise": [*STAGES["zero2"], BFLOAT16, *gated, "objective.mask=noise"],
        "id": [*STAGES["zero3"], *gated, f"objective.mask={ID}"],
    }
    return make_once(
        tmp_path_factory, "uno", lambda out: train(out, data_folder, runs, ranks=2)
    )


def check_adapter(folder: Path, base: Path) -> None:
    """Check a folder like the servers' loaders, and load it with peft."""
    assert [file.name for file in folder.glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]
    config = read_json(folder / "adapter_config.json")
    assert not UNSUPPORTED & {name for name, value in config.items() if value}
    assert "trainable_token_indices" not in config
    assert config["peft_type"] == "LORA" and config["bias"] == "none"
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert config["target_modules"] == SHORT
    weights = load_file(folder / "adapter_model.safetensors")
    matches = {name: WEIGHT.fullmatch(name) for name in weights}
    assert {match[1] for match in matches.values() if match} == {*SHORT}
    assert all(matches.values())
    for name, weight in weights.items():
        assert weight.shape[0 if ".lora_A." in name else 1] == 4
    lm = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(lm, str(folder))
    loaded = {
        name.replace(".default", ""): weight
        for name, weight in adapted.state_dict().items()
        if "lora_" in name
    }
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def commands(card: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", card, re.DOTALL)


@pytest.mark.parametrize("name", ["noise", "id"])
def test_a_training_without_adaptive_rows_is_exported_and_decoded(
    trained: Path, tmp_path: Path, name: str
) -> None:
    """The base model does not change: no row is added, and embeddings stay tied."""
    out = export(trained / name, tmp_path / "model", FLOAT32)
    assert read_json(out / "manifest.json")["verified"]["logit_difference"] == 0
    config = read_json(out / "config.json")
    assert config["tie_word_embeddings"] is True
    adaptive = read_json(out / "adaptive.json")
    assert adaptive["mask"] == ("noise" if name == "noise" else ID)
    assert adaptive["adaptive_ids"] == ([] if name == "noise" else [ID])
    vocab = Vocab.from_json(read_json(trained / name / "manifest.json")["vocab"])
    assert not {*vocab.adaptive} & {*adaptive["control"]}
    assert ID not in adaptive["control"]
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in weight for weight in adapter)
    check_adapter(out / "uno", out)
    card = (out / "README.md").read_text()
    assert "uno/README.md" in card
    model = load(out, "float32", "cpu")
    assert model.adaptive and model.adaptive.noise == (name == "noise")
    texts = partial(tokens_of, model, [[20, 30, 40, 51], [77, 78], [99] * 7])
    plain = texts(DecodeConfig("plain", max_new_tokens=16))
    for method in ("sdsat", "hybrid"):
        assert texts(DecodeConfig(method, max_new_tokens=16)) == plain
    lm = AutoModelForCausalLM.from_pretrained(out)
    portable: Any = lm.generate(
        torch.tensor([[77, 78]]),
        max_new_tokens=16,
        do_sample=False,
        probes="root",
        custom_generate=str(out),
        trust_remote_code=True,
    )
    assert portable[0, 2:].tolist() == plain[1]


def flags_of(command: str) -> set[str]:
    return set(
        re.findall(r"(?<!\S)--[\w-]+(?: (?:openai|vllm|fa3|16|2048)(?!\S))?", command)
    )


def test_the_card_has_the_flags_of_the_documentation(
    trained: Path, tmp_path: Path
) -> None:
    """Bug: the card's servers sampled by the base model's generation_config.json."""
    folder = export(trained / "noise", tmp_path / "uno", FLOAT32, "lora=uno")
    servers = commands((folder / "README.md").read_text())[:3]
    page = commands((ROOT / "docs/serving.md").read_text())
    documented = [command for command in page if "UNO" in command]
    for command, other in zip(servers, documented, strict=True):
        assert flags_of(command) == flags_of(other)


def test_lora_uno_exports_only_the_adapter(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card has commands for SGLang, vLLM and this project, limits, and a figure to reach.

    Bug: the adapter alone was no artifact in W&B, unlike a model directory.
    """
    sent = list[Path]()
    monkeypatch.setattr(
        "train.export.__main__.track", lambda config, _: sent.append(Path(config.out))
    )
    folder = export(trained / "noise", tmp_path / "uno", FLOAT32, "lora=uno")
    assert sent == [folder]
    assert {file.name for file in folder.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "adaptive.json",
        "manifest.json",
    }
    base = export(trained / "noise", tmp_path / "model", FLOAT32, "verify=false")
    check_adapter(folder, base)
    vocabulary = read_json(base / "config.json")["vocab_size"]
    card = (folder / "README.md").read_text()
    chain, tree, vllm, project = commands(card)
    assert check(*page_commands(f"```bash\n{project}```")) is None
    assert "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in chain
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4" in tree
    assert "--max-lora-rank 8 " in vllm
    (speculative,) = re.findall(r"--speculative-config '(.*)'", vllm)
    assert json.loads(speculative) == {
        "method": "uno",
        "uno_lora_path": "DIR",
        "uno_mask_token_id": vocabulary,
        "num_speculative_tokens": 6,
    }
    assert "tokens per cycle" in card and "previous-token head" in card
    assert str(tmp_path) not in card


def test_the_shipped_adapter_is_in_the_servers_format() -> None:
    """It has pairs of lora_A and lora_B alone, and no empty setting."""
    folder = ADAPTERS / SHIPPED["smollm2-uno"].adapter / "adapter"
    config = read_json(folder / "adapter_config.json")
    assert (config["r"], config["target_modules"]) == (28, SHORT)
    assert not any(map(config.get, UNSUPPORTED)) and None not in config.values()
    (file,) = folder.glob("*.safetensors")
    names = load_file(file).keys()
    assert all(map(WEIGHT.fullmatch, names)) and len(names) == 30 * len(SHORT) * 2
    adaptive = read_json(folder.parent / "adaptive.json")
    assert (adaptive["mask"], adaptive["L"], adaptive["head"]) == ("noise", 5, False)


def test_vllms_settings_for_an_existing_token() -> None:
    """vLLM draws noise from [1, M), so token 1 needs M = 2; another token needs both bounds."""
    assert vllm_config(1, L=5, vocabulary=99)["uno_mask_token_id"] == 2
    assert "uno_noise_low" not in vllm_config(1, L=5, vocabulary=99)
    both = vllm_config(ID, L=5, vocabulary=99)
    assert (both["uno_noise_low"], both["uno_mask_token_id"]) == (ID, ID + 1)


@pytest.mark.parametrize("places", [1, 2, 5, 13, 127, 128])
def test_a_tree_fits_sglangs_limits(places: int) -> None:
    flags = tree_flags(places)
    if places == 128:
        assert flags is None
        return
    assert flags
    steps, candidates, nodes = (int(word) for word in re.findall(r" (\d+)", flags))
    rows = steps + 1
    assert rows == places + 1 <= nodes <= 128 and nodes * candidates <= 2048
    assert nodes - 1 <= candidates * max(rows - 2, 0) + 1


def test_lora_uno_refuses_a_training_with_adaptive_rows(
    trained: Path, tmp_path: Path
) -> None:
    manifest = trained / "noise" / "manifest.json"
    assert manifest.is_file()
    with pytest.raises(UserError, match=r"lora=uno needs .* objective.mask=noise"):
        from train.export import ExportConfig, check_uno

        with_rows = read_json(manifest) | {"mask": "adaptive"}
        check_uno(ExportConfig("c", "o", lora="uno"), with_rows)


def test_layers_that_share_their_names_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers identify layers by the last part of their names only."""
    monkeypatch.setattr(PlainWeights, "short_targets", lambda self: None)
    message = refused(trained / "id", tmp_path / "uno", "lora=uno")
    assert "lora=uno needs an adapter of all layers of a name" in message
    assert not (export(trained / "id", tmp_path / "model") / "uno").exists()


def test_short_targets_need_all_layers_of_a_name() -> None:
    config = LoraSettings(
        rank=2, gated=True, targets=["layers.0.mlp.up_proj", "q_proj"]
    )
    lm = tiny_llama()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(lm.config)
    whole = LoraSettings(rank=2, gated=True, targets=["q_proj", "v_proj"])
    weights = partial(PlainWeights, adaptive=(), merged=False, dtype=torch.float32)
    assert weights(plain, whole, {}).short_targets() == ["q_proj", "v_proj"]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(lm.config)
    assert weights(plain, config, {}).short_targets() is None
    assert isinstance(plain.lm_head, nn.Linear)

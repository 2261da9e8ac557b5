"""Test facts that two packages must agree on."""

import shutil
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.runs.files import read_json, write_json
from data_prep.chat import ChatTemplate
from data_prep.config import VocabConfig
from data_prep.document import Document
from data_prep.encode import Encoder, Mode
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from infer.chat import chat_ids
from infer.config import Infill
from infer.drafters.planner import FixedPlanner
from infer.engine.output import Request
from infer.engine.runner import Runner
from infer.engine.sampling import GREEDY
from infer.loop import Drafters, Limits, decode
from infer.models.checkpoint import ModelDirectory
from infer.text import Text
from infer.trees.tree import Tree
from tests.conftest import tiny_llama, training_manifest, vocab_of
from tests.data_prep.chat_fixture import ADAPTIVE, CHATML, chat_tokenizer, say
from tests.data_prep.conftest import document_ids
from tests.infer.engine.test_families import MIXED, MULTIPLIERS, tiny
from tests.infer.library import by_tokens
from train.attention import register
from train.config import LoraSettings
from train.data import to_tensors
from train.export.sidecars import adaptive_json
from train.export.weights import write_weights
from train.head import PreviousTokenHead, write_head
from train.lora import Gate, PlainWeights, adapt
from train.loss import CANDIDATES
from train.model import AdaptiveLM
from train.objective import branch
from train.validation import replay_loops

PROMPTS = [
    "def fib(n):\n    ",
    "  lead",
    "x",
    "é漢😀\n",
    "a <PRE> b </s>",
    "<PRE>",
    "a▁b ▁▁",
    "কো ਕਿ ো",
    "\t\n \n",
]


def model_directory(folder: Path, tokenizer: Path, vocab: Vocab) -> Path:
    """Write the files of an exported directory that prompts depend on."""
    folder.mkdir()
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    write_json(folder / "config.json", {"vocab_size": vocab.size})
    manifest = training_manifest(vocab)
    (folder / "manifest.json").write_text("{}")
    write_json(folder / "adaptive.json", adaptive_json(folder, manifest, step=1))
    return folder


def check_prompts(folder: Path, tokenizer: Path, config: VocabConfig) -> Text:
    vocab = find_vocab(load_tokenizer(tokenizer), config)
    encoder = Encoder(load_tokenizer(tokenizer), vocab)
    text = ModelDirectory(model_directory(folder, tokenizer, vocab)).text

    for prompt in PROMPTS:
        ids = text.encode(prompt)
        assert ids == document_ids(prompt, Mode.PLAIN, (0, 0), encoder), prompt
        assert text.decode(ids) == prompt
        assert vocab.control.isdisjoint(ids[1:])
        for suffix in PROMPTS:
            # With an empty middle the document is the prompt and EOT.
            for mode, order in {Mode.PSM: "psm", Mode.SPM: "spm"}.items():
                cuts = (len(prompt), len(prompt))
                requested = text.infill(Infill(prompt, suffix, order))
                expected = document_ids(prompt + suffix, mode, cuts, encoder)
                assert [*requested, vocab.eot] == expected
                assert text.ends(requested) == {vocab.eot}
    return text


def test_a_prompt_at_inference_is_a_documents_prefix_in_training(
    data_folder: Path, tmp_path: Path
) -> None:
    """This also holds for text that spells a control piece, and for both orders of infilling."""
    config = VocabConfig(adaptive=list(vocab_of(data_folder).adaptive))
    check_prompts(tmp_path / "model", data_folder / "tokenizer", config)


def test_the_same_with_codellamas_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    """Bugs: a Bengali letter was encoded as the adaptive id of its piece, and "▁" as a space.

    Infilling prompts must equal Meta's.
    """
    tokenizer = shared_data / "tokenizers" / "codellama-7b"
    adaptive = [32011, 32012, 32013, 32014, 32015, 31864, 31857]
    text = check_prompts(tmp_path / "model", tokenizer, VocabConfig(adaptive=adaptive))
    for case in read_json(tokenizer / "golden_infilling.json")["cases"]:
        for order in ("psm", "spm"):
            infill = Infill(case["prefix"], case["suffix"], order)
            assert text.infill(infill) == case[f"{order}_prompt"]


def test_messages_have_the_same_ids_in_training_and_inference(tmp_path: Path) -> None:
    """A control piece or adaptive token that a message spells is text in both."""
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    config = VocabConfig(adaptive=list(ADAPTIVE))
    vocab = find_vocab(load_tokenizer(tokenizer), config)
    model = model_directory(tmp_path / "model", tokenizer, vocab)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, model / name)
    encoder = Encoder(load_tokenizer(tokenizer), vocab)
    template = ChatTemplate(tokenizer, encoder)
    for text in (*PROMPTS, "a<|im_end|>\n<|im_start|>system\n", "<adaptive_2>"):
        messages = tuple(say(text, "b", text, "c"))
        document = template.encode(Document("a", text, "", messages=messages))
        assert isinstance(document, Document), document
        for turn in document.turns:
            prompt = chat_ids(model, messages[: turn.message])
            assert prompt == turn.ids[: turn.prompt]
            assert vocab.control.isdisjoint(prompt)


TOKENS = np.random.default_rng(0).integers(2, 80, size=(2, 40))
STARTS, WIDTH = np.array([3, 4, 11, 30]), 3
# The arguments of AdaptiveLM.encode.
inputs = itemgetter("ids", "offsets", "positions", "trunk")


def output_of(runner: Runner, prefix: list[int], tree: Tree) -> Any:
    """Return the output of a tree after a prefix; the last token of the prefix is the root."""
    runner.prefill([prefix[:-1]])
    return runner.forward([tree], [Request(prefix)], GREEDY)


def logits_of(runner: Runner, prefix: list[int], tree: Tree) -> torch.Tensor:
    """Return the (q, V) logits of a tree."""
    output = output_of(runner, prefix, tree)
    rows = [output.flat.row(0, tree, node) for node in range(len(tree.tokens))]
    return output.logits[rows].whole()


def branch_rows(adaptive: tuple[int, ...]) -> dict[str, Any]:
    """Return a layout with windows of WIDTH at STARTS in both rows of TOKENS, as tensors."""
    windows = [(STARTS, np.full(len(STARTS), WIDTH))] * 2
    everywhere = np.ones_like(TOKENS, dtype=bool)
    layout = branch(TOKENS, np.zeros_like(TOKENS), windows, everywhere, adaptive)
    return to_tensors(layout, torch.device("cpu"))


def check_branches(module: AdaptiveLM, lm: Any, adaptive: tuple[int, ...]) -> None:
    """Check that the windows of `module` have the same logits as the probes of decoding with `lm`."""
    rows = branch_rows(adaptive)
    logits = module.lm.get_output_embeddings()(module.encode(*inputs(rows)))
    runner = Runner(lm, capacity=64, max_rows=8)
    probes = (adaptive * WIDTH)[:WIDTH]
    for row, window in np.ndindex(2, len(STARTS)):
        start = STARTS[window]
        columns = slice(40 + window * WIDTH, 40 + (window + 1) * WIDTH)
        prefix = TOKENS[row, :start].tolist()
        decoded = logits_of(runner, prefix, Tree.chain(prefix[-1], probes=probes))[1:]
        torch.testing.assert_close(logits[row, columns], decoded, rtol=1e-5, atol=1e-5)
        labels = rows["labels"][row, columns].numpy()
        assert np.array_equal(labels, TOKENS[row, start + 1 : start + 1 + WIDTH])


#: Models with sliding windows, and with scaled logits and embeddings.
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "gemma3": ("gemma3_text", MIXED),
    "granite": ("granite", MULTIPLIERS),
    "cohere2": ("cohere2", MIXED | {"logit_scale": 0.3}),
}


def tiny_model(name: str) -> Any:
    kind, settings = MODELS[name]
    return tiny_llama() if kind == "llama" else tiny(kind, **settings)


@pytest.mark.parametrize(
    ("attention", "adaptive", "name"),
    [
        ("sdpa", (90,), "llama"),
        ("sdpa", (90, 91, 92), "llama"),
        *(("eager", (90,), name) for name in MODELS),
    ],
)
def test_every_window_of_branch_is_the_decoders_probes(
    attention: str, adaptive: tuple[int, ...], name: str
) -> None:
    lm = tiny_model(name)
    lm.set_attn_implementation(register(attention))
    check_branches(AdaptiveLM(lm, chunk=64, L=WIDTH), tiny_model(name), adaptive)


def check_head(module: AdaptiveLM, lm: Any, adaptive: tuple[int, ...]) -> None:
    """Check that the previous-token head gives the same logits in training and in decoding."""
    assert module.head is not None
    hidden = module.encode(*inputs(branch_rows(adaptive)))[:, 40:]
    embed = module.lm.get_input_embeddings()
    tree = partial(Tree.chain, probes=(adaptive * WIDTH)[:WIDTH])
    for static in (False, True):
        runner = Runner(lm, capacity=64, max_rows=8, static=static)
        for row, window, j in np.ndindex(2, len(STARTS), WIDTH):
            start = STARTS[window]
            previous = int(TOKENS[row, start + j])
            state = hidden[row, window * WIDTH + j]
            corrected = module.head(state, embed(torch.tensor(previous)))
            prefix = TOKENS[row, :start].tolist()
            drafts = output_of(runner, prefix, tree(prefix[-1])).drafts(0, 0, 1)
            decoding = torch.tensor(drafts.correct(j, previous, drafts.ids[j]))
            training = module.lm.get_output_embeddings()(corrected)[drafts.ids[j]]
            torch.testing.assert_close(decoding, training, rtol=1e-5, atol=1e-5)
            assert len(decoding) == CANDIDATES


def train_gated(
    folder: Path, adaptive: tuple[int, ...], tied: bool, name: str = "llama"
) -> AdaptiveLM:
    """Train a gated adapter for a few steps; write the base to folder/base, the export to folder/model."""
    config, lm = LoraSettings(rank=4, gated=True), tiny_model(name)
    if tied:
        lm.lm_head.weight = lm.model.embed_tokens.weight
        lm.config.tie_word_embeddings = True
    lm.save_pretrained(folder / "base")
    lm.set_attn_implementation(register("sdpa"))
    adapt(lm, config, adaptive=adaptive)
    head = PreviousTokenHead(lm.config.hidden_size, torch.float32)
    module = AdaptiveLM(lm, chunk=64, L=WIDTH, gate=Gate(lm), head=head)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        module(**branch_rows(adaptive))[0].backward()
        optimizer.step()
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(lm.config)
    weights = PlainWeights(
        plain,
        config,
        lm.state_dict(),
        adaptive=adaptive,
        merged=False,
        dtype=torch.float32,
    )
    out = folder / "model"
    out.mkdir()
    weights.save_adapter(out / "adapter")
    write_head(module.state_dict(), out / "adapter", torch.float32)
    write_weights(lm.config, weights, out, dtype=torch.float32, shard_size="5GB")
    lm.config.save_pretrained(out)
    content = {"adaptive_ids": adaptive, "L": WIDTH, "gated": True}
    write_json(out / "adaptive.json", content)
    return module


@pytest.mark.parametrize(
    ("adaptive", "tied", "name"),
    [
        ((90,), False, "llama"),
        ((90,), True, "llama"),
        ((90, 91, 92), False, "llama"),
        ((90,), False, "gemma3"),
        ((90,), False, "granite"),
    ],
    ids=["identical", "tied", "diverse", "windows", "scaled"],
)
def test_decoding_with_a_gated_adapter(
    adaptive: tuple[int, ...], tied: bool, name: str, tmp_path: Path
) -> None:
    """Probes must equal training's windows, and standard rows the base model's, bit for bit.

    That includes an adaptive id that the model itself has emitted. Texts are also equal: of plain
    decoding, and in float32 of drafting.

    Bug: Gemma scales its embedding rows, and the adapter's rows were not scaled.
    """
    module = train_gated(tmp_path, adaptive, tied, name)
    model = ModelDirectory(tmp_path / "model")
    check_branches(module, model.load(dtype="float32"), adaptive)
    check_head(module, model.load(dtype="float32"), adaptive)
    for dtype in ("float32", "bfloat16"):
        lms = [ModelDirectory(tmp_path / "base").load(dtype=dtype)]
        lms.append(model.load(dtype=dtype))
        base, gated = (Runner(lm, capacity=96, max_rows=16) for lm in lms)
        probes = (adaptive * WIDTH)[:WIDTH]
        for tree in (
            Tree.chain(7, probes=probes),
            Tree.chain(7, [8, adaptive[0], 9]),
            Tree.chain(7),
        ):
            prefix = [*TOKENS[0, :5].tolist(), 7]
            expected_logits, logits = (
                logits_of(runner, prefix, tree) for runner in (base, gated)
            )
            n = tree.probes_from
            assert torch.equal(logits[:n], expected_logits[:n])
            assert (logits[n:] != expected_logits[n:]).any(dim=-1).all()
        expected = decoded(base, Drafters)
        assert decoded(gated, Drafters) == expected
        if dtype == "float32":
            for planner in (FixedPlanner(WIDTH, "root"), FixedPlanner(WIDTH, "all")):
                assert decoded(gated, partial(by_tokens, adaptive, planner)) == (
                    expected
                )


def test_validation_replays_decoding(tmp_path: Path) -> None:
    """On the model's greedy text, tau_real must be the mean acceptance length of decoding."""
    module = train_gated(tmp_path, (90,), tied=False)
    lm = ModelDirectory(tmp_path / "model").load(dtype="float32")
    runner = Runner(lm, capacity=160, max_rows=16)
    drafters = by_tokens((90,), FixedPlanner(WIDTH, "root"))
    text = TOKENS[0, :9].tolist()
    accepted = []
    for (step,) in decode(runner, [Request(text)], drafters, Limits(120)):
        text = [*text, *step.tokens]
        accepted += [step.accepted] if step.drafted else []
    starts = np.arange(9, len(text))
    windows = [(starts, np.full(len(starts), WIDTH))]
    tokens = np.array([text])
    everywhere = np.ones_like(tokens, dtype=bool)
    layout = branch(tokens, np.zeros_like(tokens), windows, everywhere, (90,))
    with torch.no_grad():
        _, _, predicted = module(**to_tensors(layout, torch.device("cpu")))
    hits = predicted[0].numpy() == layout.labels[0]
    loops = replay_loops(layout.offsets[0], layout.positions[0], hits)
    replayed = [count for _, count in loops]
    steps = len(accepted) - 2  # the end of the text cuts off the last steps
    assert replayed[:steps] == accepted[:steps]
    assert len({*accepted}) > 1


def decoded(runner: Runner, new: Callable[[], Drafters]) -> list[int]:
    requests = [Request(TOKENS[0, :9].tolist())]
    steps = decode(runner, requests, new(), Limits(60))
    return [token for (step,) in steps for token in step.tokens]

"""Test Qwen2.5-Coder's tokenizer and weights against the rules that Qwen published.

The tests of the vocabulary use a tiny file with Qwen's rules. With QWEN=FILE in the environment they also use
qwen2.5-coder-0.5b-instruct-q4_k_m.gguf itself. The tests of Qwen's own numbers need this file.
"""

import json
import os
import shutil
import sysconfig
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from conf.runs.fingerprint import fingerprint_file
from conf.settings.compose import settings
from data_prep.config import DataPrepConfig, VocabConfig
from data_prep.encode import Encoder
from data_prep.pipeline import prepare
from data_prep.shards import Shards
from data_prep.vocab import find_vocab, load_tokenizer
from infer.chat import chat_ids
from infer.config import Infill
from infer.models.checkpoint import ModelDirectory
from tests import bpe
from tests.train.test_convert import tiny, write_gguf
from train.convert import ConvertConfig, main

regex = pytest.importorskip("regex")

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
# From Qwen2's tokenization_qwen2.py.
WORDS = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
]
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LINES = 10_000
# Texts besides the standard library's files: digits, accents, spaces, line ends, scripts.
TEXTS = [
    "x = 1234567  # 3.14e-10\r\n\r\n\tif  y:\n\n\n    z\t \n",
    "e\u0301\u212b 漢字 ﬁ 한국어 I'LL we've 'S\u00a0\u3000 ..\n",
    "   ",
    "",
]


@dataclass
class Published:
    """Qwen's tokenizer, written from its description: NFC, words, bytes, merges by rank."""

    ids: dict[str, int]
    ranks: dict[tuple[str, str], int]
    known: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        words = WORDS.findall(unicodedata.normalize("NFC", text))
        return [id for word in words for id in self.word(word)]

    def word(self, word: str) -> list[int]:
        if word not in self.known:
            parts = [bytes_to_text()[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = list(zip(parts, parts[1:]))
                best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
                if best not in self.ranks:
                    break
                at = pairs.index(best)
                parts[at : at + 2] = ["".join(best)]
            self.known[word] = [self.ids[part] for part in parts]
        return self.known[word]


@cache
def bytes_to_text() -> list[str]:
    """Return GPT-2's character for each byte; a printable byte is its own character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    remaining = [byte for byte in range(256) if byte not in printable]
    texts = {byte: chr(byte) for byte in printable}
    texts |= {byte: chr(256 + index) for index, byte in enumerate(remaining)}
    return [texts[byte] for byte in range(256)]


@dataclass
class Converted:
    """A GGUF file and the directory that it was converted to."""

    file: Path
    folder: Path

    @property
    def published(self) -> Published:
        fields = gguf.GGUFReader(self.file).fields
        pieces = fields["tokenizer.ggml.tokens"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        return Published({piece: id for id, piece in enumerate(pieces)}, ranks)  # type: ignore[arg-type]


def qwen_file() -> Path:
    """Return Qwen's file from the environment variable QWEN; skip the test without it."""
    name = os.environ.get("QWEN")
    if not name:
        pytest.skip("QWEN does not name qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    return Path(name)


def tiny_file(folder: Path) -> Path:
    """Write a GGUF file with a small vocabulary, Qwen's control pieces, and three fillers."""
    text = "\n".join(islice(code_files(), 3))
    trained = json.loads(bpe.train_bpe((), [text], 600).to_str())["model"]
    specials = {"<s>", "</s>", *bpe.PIECES}
    pieces = [piece for piece in trained["vocab"] if piece not in specials]
    pieces += CONTROL
    merges = [" ".join(merge) for merge in trained["merges"]]
    file = folder / "tiny.gguf"
    write_gguf(
        file,
        tiny(len(pieces) + 3),
        "qwen2",
        fillers=3,
        pieces=pieces,
        control=CONTROL,
        merges=merges,
        template=TEMPLATE,
    )
    return file


def code_files() -> Iterator[str]:
    """Yield the texts of the standard library's files, in order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converted]:
    """Convert Qwen's file, which takes a minute and 2.5 GB."""
    file = qwen_file()
    folder = tmp_path_factory.mktemp("qwen") / "model"
    main(ConvertConfig(gguf=str(file), out=str(folder)))
    yield Converted(file, folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["tiny", "Qwen's file"])
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    if request.param != "tiny":
        result: Converted = request.getfixturevalue("qwen")
        return result
    folder = tmp_path_factory.mktemp("tiny")
    file = tiny_file(folder)
    main(ConvertConfig(gguf=str(file), out=str(folder / "model")))
    return Converted(file, folder / "model")


def test_ids_follow_the_published_rule(converted: Converted) -> None:
    """Compare lines and files as encoded by Transformers, data preparation and decoding."""
    published = converted.published
    tokenizer = load_tokenizer(converted.folder)
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(converted.folder))
    encoder = Encoder(load_tokenizer(converted.folder), vocab)
    library = AutoTokenizer.from_pretrained(converted.folder)
    text = ModelDirectory(converted.folder).text
    real = converted.file.name != "tiny.gguf"
    files, count = [*TEXTS], 0
    for content in code_files():
        files.append(content)
        count += content.count("\n")
        if count >= (LINES if real else 500):
            break
    lines = [line for file in files for line in file.splitlines(keepends=True)]
    for sample in [*files, *lines]:
        expected = published.encode(sample)
        assert encoder.encode([sample])[0].tolist() == expected, sample
        assert text.encode(sample) == expected, sample
        assert text.decode(expected) == unicodedata.normalize("NFC", sample), sample
    for sample in files:
        assert library(sample).input_ids == expected_ids(published, sample), sample


def expected_ids(published: Published, text: str) -> list[int]:
    """Return Transformers' ids of a text: unlike this project, it encodes control pieces as such."""
    parts = regex.split("(" + "|".join(map(regex.escape, CONTROL)) + ")", text)
    return [
        id
        for part in parts
        for id in ([published.ids[part]] if part in CONTROL else published.encode(part))
    ]


def test_infilling_and_chats_have_the_published_layouts(converted: Converted) -> None:
    """Infilling is PSM as in Qwen's report, chats are ChatML with Qwen's system message; no BOS."""
    published = converted.published
    ids, encode = published.ids, published.encode
    text = ModelDirectory(converted.folder).text
    prefix, suffix = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    infilling = [
        *(ids["<|fim_prefix|>"], *encode(prefix)),
        *(ids["<|fim_suffix|>"], *encode(suffix), ids["<|fim_middle|>"]),
    ]
    assert text.infill(Infill(prefix, suffix)) == infilling
    stops = {*CONTROL} - {"<|fim_middle|>"}
    assert text.ends(infilling) >= {ids[piece] for piece in stops}

    def turn(role: str, content: str) -> list[int]:
        start, end = ids["<|im_start|>"], ids["<|im_end|>"]
        return [start, *encode(f"{role}\n{content}"), end, *encode("\n")]

    question = "Write a function.\n```\nadd\n```\n"
    answer = "Below:\n```python\n"
    opened = [ids["<|im_start|>"], *encode("assistant\n")]
    chat = [*turn("system", SYSTEM), *turn("user", question)]
    messages = [{"role": "user", "content": question}]
    assert chat_ids(converted.folder, messages) == [*chat, *opened]
    begun = chat_ids(converted.folder, messages, answer=answer)
    assert begun == [*chat, ids["<|im_start|>"], *encode(f"assistant\n{answer}")]


def test_the_vocabulary_has_spare_rows_for_adaptive_tokens(
    converted: Converted,
) -> None:
    """Spare rows have no piece. Documents end with <|endoftext|>, turns with <|im_end|>; no BOS."""
    ids = converted.published.ids
    tokenizer = load_tokenizer(converted.folder)
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(converted.folder))
    fillers = [id for piece, id in ids.items() if piece.startswith("[PAD")]
    assert vocab.adaptive == tuple(fillers[:7])
    assert vocab.size == len(ids) and vocab.bos is None
    assert vocab.eos == ids["<|endoftext|>"]
    assert vocab.ends == (ids["<|im_end|>"], ids["<|endoftext|>"])
    names = ("fim_prefix", "fim_suffix", "fim_middle")
    infilling = (vocab.pre, vocab.suf, vocab.mid)
    assert infilling == tuple(ids[f"<|{name}|>"] for name in names)
    assert vocab.eot is None and vocab.orders == ("psm",)


def test_documents_of_code_are_separated_by_endoftext(
    converted: Converted, tmp_path: Path
) -> None:
    source = tmp_path / "code"
    source.mkdir()
    texts = [f"def f{at}(x):\n    return x + {at}\n" * 6 for at in range(12)]
    for at, text in enumerate(texts):
        (source / f"{at}.py").write_text(text)
    arguments = [
        f"tokenizer={converted.folder}",
        f"data.path={source}",
        f"out={tmp_path / 'out'}",
        *("seq_len=4096", "held_out=0", "workers=1", "benchmarks=[]"),
        "ngrams.megabytes=0",
    ]
    prepare(settings("data_prep", DataPrepConfig, arguments))
    published, shards = converted.published, Shards(tmp_path / "out", "train")
    plain = infilled = 0
    for sequence in shards:
        for span, id in zip(sequence.spans, sequence.ids):
            tokens = sequence.tokens[span["start"] : span["stop"]].tolist()
            text = (source / id.removeprefix("code/")).read_text()
            end = published.ids["<|endoftext|>"]
            assert tokens[-1] == end and end not in tokens[:-1]
            if span["mode"] == 0:
                assert tokens[:-1] == published.encode(text)
                plain += 1
            else:
                pieces = [t for t in tokens if t >= published.ids["<|fim_prefix|>"]]
                names = ("prefix", "suffix", "middle")
                assert pieces == [published.ids[f"<|fim_{name}|>"] for name in names]
                infilled += 1
    assert plain and infilled and plain + infilled == len(texts)


def test_qwens_file_has_the_published_ids(qwen: Converted) -> None:
    """Compare with ids from Qwen2.5's own tokenizer."""
    assert fingerprint_file(qwen.file) == SHA256
    ids = qwen.published
    control = [ids.ids[piece] for piece in CONTROL]
    assert control == [*range(151643, 151646), *range(151659, 151665)]
    assert len(ids.ids) == 151936
    opening = [2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13]
    assert ids.encode("You are Qwen, created by Alibaba Cloud.") == opening
    assert ids.encode("def add(a, b):\n    return a + b\n") == [
        *(750, 912, 2877, 11, 293, 982, 262, 470, 264, 488, 293, 198),
    ]


def test_logits_equal_a_model_built_by_the_gguf_package(qwen: Converted) -> None:
    """The reference is a Qwen2 with tensors and settings from the gguf package; all bits are equal."""
    lm = AutoModelForCausalLM.from_pretrained(qwen.folder).eval()
    assert lm.config.vocab_size == 151936 and not lm.config.tie_word_embeddings
    reader = gguf.GGUFReader(qwen.file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = Qwen2Config(
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["qwen2.embedding_length"],
        intermediate_size=facts["qwen2.feed_forward_length"],
        num_hidden_layers=facts["qwen2.block_count"],
        num_attention_heads=facts["qwen2.attention.head_count"],
        num_key_value_heads=facts["qwen2.attention.head_count_kv"],
        rms_norm_eps=facts["qwen2.attention.layer_norm_rms_epsilon"],
        max_position_embeddings=facts["qwen2.context_length"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": facts["qwen2.rope.freq_base"],
        },
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        reference = Qwen2ForCausalLM(config)
    weights = {
        library_name(tensor.name): torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        )
        for tensor in reader.tensors
    }
    written = lm.state_dict()
    assert weights.keys() == written.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, written[name]), name
    reference.load_state_dict(weights, assign=True)
    reference.model.rotary_emb = type(lm.model.rotary_emb)(config)
    text = ModelDirectory(qwen.folder).text
    ids = torch.tensor([text.encode("def add(a, b):\n    return a + b\n")])
    with torch.no_grad():
        logits = lm(ids).logits
        assert torch.equal(reference.eval()(ids).logits, logits)
    # A wrongly converted model would predict few tokens of this text.
    assert (logits[0, :-1].argmax(-1) == ids[0, 1:]).float().mean() >= 0.5


def library_name(name: str) -> str:
    """Return Transformers' name of a tensor, given llama.cpp's."""
    for old, new in {
        "blk.": "model.layers.",
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }.items():
        name = name.replace(old, new)
    return name.replace("output.weight", "lm_head.weight")

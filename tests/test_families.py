"""Test the infilling layouts of code model families, in data_prep and in infer.

Each test builds a tokenizer with the family's pieces. The expected layouts are from the model
card or the report of the family.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from conf.errors import UserError
from conf.runs.files import write_json
from conf.settings.compose import settings
from data_prep.config import DataPrepConfig, VocabConfig
from data_prep.document import generator
from data_prep.encode import Encoder, Mode, choose_mode
from data_prep.vocab import Vocab, find_vocab, load_tokenizer
from infer.__main__ import main as infer
from infer.config import InferConfig, Infill
from infer.models.checkpoint import ModelDirectory
from infer.text import NoInfilling, Text
from tests.bpe import save, train_bpe
from tests.conftest import training_manifest
from tests.data_prep.conftest import document_ids
from train.export.sidecars import adaptive_json, served_generation

MIDDLE = "return x\n"
PREFIX, SUFFIX = "def f(x):\n    ", "\nclass A:\n    pass\n"
SPARE = 3  # rows of the embedding without a piece


@dataclass(frozen=True)
class Published:
    """A family's special and plain pieces, and its layouts.

    P, S and M in a layout stand for prefix, suffix and middle; PM is prefix and middle without
    a piece in between.
    """

    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|endoftext|>"
    ends: tuple[str, ...] = ()  # in generation_config.json, before EOS
    psm: str = ""
    spm: str = ""
    adds_bos: bool = True  # whether tokenizer.json adds it, not the tokenizer's class


FIM = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>"
FAMILIES = {
    "codellama": Published(
        ("<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
        bos="<s>",
        eos="</s>",
        psm="<s> ▁<PRE> P ▁<SUF> S ▁<MID> M ▁<EOT> </s>",
        spm="<s> ▁<PRE> ▁<SUF> S ▁<MID> PM ▁<EOT> </s>",
    ),
    "qwen2.5-coder": Published(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=(*FIM.split(), "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        ends=("<|im_end|>",),
        psm="<|fim_prefix|> P <|fim_suffix|> S <|fim_middle|> M <|endoftext|>",
    ),
    "granite-3": Published(
        ("<|end_of_text|>", *FIM.split(), "<|fim_pad|>"),
        eos="<|end_of_text|>",
        psm="<|fim_prefix|> P <|fim_suffix|> S <|fim_middle|> M <|end_of_text|>",
    ),
    "starcoder": Published(
        ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        psm="<fim_prefix> P <fim_suffix> S <fim_middle> M <|endoftext|>",
        spm="<fim_prefix> <fim_suffix> S <fim_middle> PM <|endoftext|>",
    ),
    "santacoder": Published(
        ("<|endoftext|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
        psm="<fim-prefix> P <fim-suffix> S <fim-middle> M <|endoftext|>",
        spm="<fim-prefix> <fim-suffix> S <fim-middle> PM <|endoftext|>",
    ),
    "deepseek-coder": Published(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        plain=("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<|EOT|>"),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        psm="<｜begin▁of▁sentence｜> <｜fim▁begin｜> P <｜fim▁hole｜> S <｜fim▁end｜> M "
        "<｜end▁of▁sentence｜>",
        adds_bos=False,
    ),
    "codegemma": Published(
        ("<bos>", "<eos>", *FIM.split(), "<|file_separator|>"),
        bos="<bos>",
        eos="<eos>",
        psm="<bos> <|fim_prefix|> P <|fim_suffix|> S <|fim_middle|> M "
        "<|file_separator|> <eos>",
    ),
    "codestral": Published(
        ("<s>", "</s>", "[SUFFIX]", "[PREFIX]"),
        bos="<s>",
        eos="</s>",
        spm="<s> [SUFFIX] S [PREFIX] PM </s>",
    ),
}


def make(published: Published, folder: Path) -> Tokenizer:
    """Write a base model's directory without weights; return its tokenizer."""
    plain = train_bpe(adaptive=()).to_str()
    for piece in ("<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"):
        plain = plain.replace(f'"{piece}"', f'"<unused {piece[-4:-1]}>"')
    tokenizer = Tokenizer.from_str(plain)
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(published.special))
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p in published.plain])
    bos = published.bos
    if bos and published.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    save(tokenizer, folder)
    ends = [tokenizer.token_to_id(p) for p in (*published.ends, published.eos)]
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": bos, "eos_token": published.eos, "add_bos_token": bool(bos)},
    )
    rows = tokenizer.get_vocab_size(with_added_tokens=True) + SPARE
    write_json(folder / "config.json", {"vocab_size": rows, "eos_token_id": ends[0]})
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def expected(layout: str, tokenizer: Tokenizer) -> list[int]:
    texts = {"P": PREFIX, "S": SUFFIX, "M": MIDDLE, "PM": PREFIX + MIDDLE}
    ids: list[int] = []
    for part in layout.split():
        if part in texts:
            ids += tokenizer.encode(texts[part], add_special_tokens=False).ids
        else:
            ids.append(tokenizer.token_to_id(part))
    assert None not in ids
    return ids


def exported(folder: Path, vocab: Vocab) -> Text:
    """Return the `Text` of the directory after an export's adaptive.json is added."""
    manifest = training_manifest(vocab)
    write_json(folder / "manifest.json", {})
    adaptive = adaptive_json(folder, manifest, step=1)
    write_json(folder / "adaptive.json", adaptive or {})
    return ModelDirectory(folder).text


@pytest.mark.parametrize("name", FAMILIES)
def test_infilling_is_as_published(name: str, tmp_path: Path) -> None:
    """Bug: only CodeLlama had infilling in training, and base models refused to infill."""
    published = FAMILIES[name]
    tokenizer = make(published, tmp_path)
    config = settings(
        "data_prep", DataPrepConfig, ["experiment=starcoder", "data.path=x", "out=y",
                                      f"tokenizer={tmp_path}"]
    )  # fmt: skip
    vocab = find_vocab(load_tokenizer(tmp_path), config.vocab, model=str(tmp_path))
    pieces = tokenizer.get_vocab_size(with_added_tokens=True)
    assert vocab.adaptive == tuple(range(pieces, pieces + SPARE))
    encoder = Encoder(load_tokenizer(tmp_path), vocab)
    encoder.check()
    layouts = {"psm": published.psm, "spm": published.spm}
    orders = {order: layout for order, layout in layouts.items() if layout}
    assert vocab.fim and vocab.fim.orders == tuple(orders)
    base = ModelDirectory(tmp_path).text
    cuts = (len(PREFIX), len(PREFIX + MIDDLE))
    for order, layout in orders.items():
        document = expected(layout, tokenizer)
        text = PREFIX + MIDDLE + SUFFIX
        mode = Mode[order.upper()]
        eos = [vocab.eos] if vocab.fim.eot is not None else []
        assert document_ids(text, mode, cuts, encoder) + eos == document
        head = layout.replace("PM", "P").partition(" M ")[0]
        prompt = expected(
            head.split(" P ")[0] + " P" if order == "spm" else head, tokenizer
        )
        assert base.infill(Infill(PREFIX, SUFFIX, order)) == prompt
        end = tokenizer.token_to_id(layout.split("M ")[-1].split()[0])
        assert end in {vocab.eos, *base.ends(prompt)}
    first, other = (*orders, *(set(layouts) - set(orders)))[:2]
    prompt_ids = base.infill(Infill(PREFIX, SUFFIX))
    assert prompt_ids == base.infill(Infill(PREFIX, SUFFIX, first))
    if len(orders) == 1:
        with pytest.raises(
            NoInfilling, match=f"infill.order must be {first}.*got {other}"
        ):
            base.infill(Infill(PREFIX, SUFFIX, other))
    assert exported(tmp_path, vocab).infill(Infill(PREFIX, SUFFIX)) == prompt_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_text_never_becomes_a_control_piece(name: str, tmp_path: Path) -> None:
    """Bug: text could become DeepSeek's and Qwen's infilling pieces, which are not marked special."""
    published = FAMILIES[name]
    tokenizer = make(published, tmp_path)
    vocab = find_vocab(load_tokenizer(tmp_path), VocabConfig(), model=str(tmp_path))
    encoder = Encoder(load_tokenizer(tmp_path), vocab)
    base = ModelDirectory(tmp_path).text
    spelled = [piece.lstrip("▁") for piece in (*published.special, *published.plain)]
    controls = {
        tokenizer.token_to_id(p) for p in (*published.special, *published.plain)
    }
    opening = 1 if published.bos else 0
    for text in ("".join(spelled), " ".join(spelled)):
        (ids,) = encoder.encode([text])
        assert base.encode(text)[opening:] == ids.tolist()
        assert controls.isdisjoint(ids.tolist()) and encoder.decode(ids) == text
        assert set(base.spelled_pieces(text)) == set(spelled)
    assert not base.spelled_pieces("a plain text")


def test_given_ids_must_be_ids_that_text_cannot_produce(tmp_path: Path) -> None:
    """Bug: experiment=starcoder used CodeLlama's ids for any tokenizer.

    Qwen's adaptive tokens were " arriving" and " Adventure", and BOS was an ordinary piece.
    """
    tokenizer = make(FAMILIES["qwen2.5-coder"], tmp_path)

    def find(**given: Any) -> Vocab:
        return find_vocab(tokenizer, VocabConfig(**given), model=str(tmp_path))

    ordinary = tokenizer.token_to_id("def")
    with pytest.raises(
        UserError, match=rf"no text produces, .* 'def' \(id {ordinary}\)"
    ):
        find(adaptive=[ordinary])
    with pytest.raises(UserError, match="vocab.bos=def must be a control piece"):
        find(bos="def")
    for missing in ({"bos": "<x>"}, {"pre": "<x>", "suf": "<y>", "mid": "<z>"}):
        with pytest.raises(UserError, match="=<x> must be a piece of the tokenizer"):
            find(**missing)
    with pytest.raises(UserError, match="vocab.bos=<s> must be a piece"):
        codellama = ["vocab=codellama", "data.path=x", "out=y", f"tokenizer={tmp_path}"]
        config = settings("data_prep", DataPrepConfig, codellama)
        find_vocab(tokenizer, config.vocab, model=str(tmp_path))
    pieces = tokenizer.get_vocab_size(with_added_tokens=True)
    pad = tokenizer.token_to_id("<|fim_pad|>")
    assert find(adaptive=["<|fim_pad|>", pieces]).adaptive == (pad, pieces)
    with pytest.raises(ValueError, match="must be given together, got only vocab.pre"):
        VocabConfig(pre="<|fim_prefix|>")


def test_documents_and_turns_end_with_different_pieces(tmp_path: Path) -> None:
    """Bug: documents of code ended with Qwen's EOS, which ends a turn of a chat."""
    tokenizer = make(FAMILIES["qwen2.5-coder"], tmp_path)
    vocab = find_vocab(tokenizer, VocabConfig(), model=str(tmp_path))
    end, turn = (tokenizer.token_to_id(p) for p in ("<|endoftext|>", "<|im_end|>"))
    assert (vocab.bos, vocab.eos, vocab.ends) == (None, end, (turn, end))
    assert {turn, end} <= vocab.control
    served = served_generation({"eos_token_id": turn}, bos=None, eos=end)
    assert served == {"eos_token_id": [turn, end]}
    assert Vocab.from_json(vocab.to_json()) == vocab


def test_a_family_with_one_order_uses_only_that_order() -> None:
    random = (generator(0, "mode", index) for index in range(200))
    draws = [
        choose_mode(r, fim_rate=0.5, spm_rate=0.5, orders=("spm",)) for r in random
    ]
    assert set(draws) == {Mode.PLAIN, Mode.SPM}
    random = (generator(0, "mode", index) for index in range(200))
    draws = [
        choose_mode(r, fim_rate=0.5, spm_rate=0.5, orders=("psm",)) for r in random
    ]
    assert set(draws) == {Mode.PLAIN, Mode.PSM}


def test_a_refusal_comes_before_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: a model that cannot infill was loaded first; spelled control pieces gave no warning."""
    make(Published(("<|endoftext|>",)), tmp_path)
    infill = Infill("a", "b")
    with pytest.raises(NoInfilling, match="infill needs a model trained for infilling"):
        infer(InferConfig(model=str(tmp_path), infill=infill))
    with pytest.raises(UserError, match="causal model with weights"):
        infer(InferConfig(model=str(tmp_path), prompt="x <|endoftext|>"))
    assert (
        "the prompt contains <|endoftext|>, encoded as text" in capsys.readouterr().err
    )

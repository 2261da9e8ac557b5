"""Train a byte-level BPE tokenizer with CodeLlama's control pieces, in milliseconds.

tests/tokenizer has 400 pieces and was trained on code of the standard library.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from conf.runs.files import write_json
from data_prep.vocab import INFILLING

PIECES = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
assert len(PIECES) == len(INFILLING)
TEXTS = ["def f(x):\n    return x\n", "class A:\n    pass\n"] * 50
FOLDER = Path(__file__).parent / "tokenizer"
ADAPTIVE = "vocab.adaptive=[6,7,8,9,10,11,12]"  # for tests/tokenizer


def train_bpe(
    adaptive: Iterable[str] = ("<adaptive_1>", "<adaptive_2>"),
    texts: Iterable[str] = TEXTS,
    size: int = 320,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>", *PIECES, *adaptive],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer files of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)

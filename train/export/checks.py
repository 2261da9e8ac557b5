"""What is refused before an export begins: a training folder that describes another model than was trained."""

from pathlib import Path

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conf import UserError
from conf.errors import in_one_line
from conf.files import read_json
from conf.fingerprint import fingerprint_file
from data_prep.ngrams import find_table
from data_prep.vocab import load_tokenizer
from train.export.trained import Trained
from train.lora import adapt
from train.pretrained import skeleton


def check_described(trained: Trained) -> None:
    """Raises UserError unless architecture and tokenizer are those that were trained."""
    place, described, size = f"checkpoint={trained.folder}", trained.described, trained.vocab.size
    config = described / "config.json"
    _check_links(described)
    if not config.is_file():
        raise UserError(f"{place}: wanted the model's config.json in {described}, found none")
    _check_class(config)
    try:
        rows = trained.config.vocab_size
    except Exception as error:  # whatever the library meets first
        raise UserError(
            f"{place}: wanted a model's config.json in {described}, found {in_one_line(error)}"
        ) from error
    if rows < size:
        raise UserError(f"{place}: wanted a model of at least {size} embedding rows, found {rows}")
    # Folders of earlier versions do not say what either file was.
    if trained.manifest.get("architecture") not in (None, fingerprint_file(config)):
        raise UserError(f"{config}: wanted the architecture that was trained, found the file changed since")
    _check_tokenizer(trained)
    _check_ngrams(trained)
    _check_weights(trained)


def _check_links(described: Path) -> None:
    """Raises UserError for a link, which may lead to any file of this machine: an export would publish it."""
    for path in (described, *sorted(described.glob("*"))):
        _check_link(path)


def _check_link(path: Path) -> None:
    if path.is_symlink():
        raise UserError(
            f"{path}: wanted a file of the training, found a link to {path.readlink()}. Copy the file here."
        )


def _check_class(config: Path) -> None:
    """Raises UserError where the model is none of the library's own: its code is never run.

    `auto_map` beside a model_type that the library has is a hub's word for others, and the library's class is
    the one that was trained.
    """
    described = read_json(config)
    found = described.get("model_type")
    if not isinstance(found, str) or found not in CONFIG_MAPPING:
        own = f", and code of its own (auto_map={described['auto_map']})" if "auto_map" in described else ""
        raise UserError(f"{config}: wanted a model_type that Transformers has, found {found}{own}")


def _check_tokenizer(trained: Trained) -> None:
    """Raises UserError unless it is the one that was trained with."""
    file, vocab = trained.described / "tokenizer.json", trained.vocab
    tokenizer = load_tokenizer(trained.described)
    pieces = tokenizer.get_vocab_size(with_added_tokens=False)
    if pieces > vocab.size or trained.manifest.get("tokenizer") not in (None, fingerprint_file(file)):
        raise UserError(
            f"{file}: wanted the tokenizer that was trained with, of at most {vocab.size} pieces, found "
            f"another of {pieces}"
        )
    for name, id in (("BOS", vocab.bos), ("EOS", vocab.eos)):
        if tokenizer.id_to_token(id) is None:
            raise UserError(
                f"{file}: wanted a piece for the {name} {id} of the training, found none: it is another model's"
            )


def _check_ngrams(trained: Trained) -> None:
    """Raises UserError unless the n-gram table, if any, is whole and of the tokenizer that was trained with."""
    if trained.table is not None:
        _check_link(trained.table)
        tokenizer = trained.described / "tokenizer.json"
        find_table(trained.folder, vocabulary=trained.vocab.text_size, tokenizer=tokenizer)


def _check_weights(trained: Trained) -> None:
    """Raises UserError unless the architecture has the checkpoint's weights, no others, and in their shapes.

    A layer less would else be left out in silence.
    """
    lm = skeleton(trained.config)
    if trained.lora.rank:
        adapt(lm, trained.lora, adaptive=trained.manifest["adaptive"])
    wanted = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
    found = trained.weights(torch.bfloat16).shapes  # the type that every checkpoint has
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{trained.described / 'config.json'}: wanted the architecture of the weights of "
                f"{trained.checkpoint.name}, found {name} of {_shape(wanted.get(name))} here and of "
                f"{_shape(found.get(name))} there"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no shape" if shape is None else " x ".join(map(str, shape))

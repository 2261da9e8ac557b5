"""The tokenizer's files of a model directory: control ids marked special, read by others as they stand; a chat
template.

No id changes and none is added: an id without a piece decodes to nothing as it is. Knows no
model.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from conf.errors import TOKENIZING, UserError, in_one_line
from conf.files import write_bytes, write_json
from data_prep.vocab import Vocab, load_tokenizer

CHAT = "chat_template.jinja"  # as Transformers names it
COMPLETION = Path(__file__).with_name("chat_template.j2")  # for a model that completes text
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def write_tokenizer(folder: Path, vocab: Vocab, adaptive: Collection[int]) -> None:
    """Rewrite tokenizer.json and tokenizer_config.json in place, for a model with these adaptive ids.

    Other ids that the data kept free of text for training are left as they are: the base model may write them.
    """
    tokenizer = load_tokenizer(folder)
    file, described = folder / "tokenizer.json", folder / "tokenizer_config.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    config = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
    ids = vocab.control - (set(vocab.adaptive) - set(adaptive))
    pieces = {id: piece for id in sorted(ids) if (piece := tokenizer.id_to_token(id)) is not None}
    write_json(described, tokenizer_config(config, vocab, pieces))
    value["added_tokens"] = marked(value["added_tokens"], pieces)
    with TOKENIZING:
        opening = tokenizer.encode("").ids
    if opening != [vocab.bos]:
        value["post_processor"] = _opening(tokenizer, vocab.bos)
    write_bytes(file, json.dumps(value, ensure_ascii=False).encode())  # one line: merges are many


def write_chat_template(folder: Path, given: str | None) -> None:
    """Write the chat template of the file `given`. Without it keep the tokenizer's own, else write the one of a
    model that completes text: servers refuse chats without any.

    Raises UserError for a file that is no template, or that fails on one message.
    """
    described = folder / "tokenizer_config.json"
    config = json.loads(described.read_text(encoding="utf-8"))
    if given is None and ((folder / CHAT).is_file() or "chat_template" in config):
        return
    write_json(described, {name: value for name, value in config.items() if name != "chat_template"})
    try:
        write_bytes(folder / CHAT, Path(given or COMPLETION).read_text(encoding="utf-8").encode())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        message = {"role": "user", "content": "x"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        if "x" not in text:
            raise ValueError(f"{text!r} for the message 'x'")
    except Exception as error:  # whatever the file system, Jinja or the template raises
        raise UserError(
            f"chat_template={given} must be a Jinja template of messages, got {in_one_line(error)}. Give "
            "a file like Transformers' chat_template.jinja, or leave it out."
        ) from error


def marked(added: Collection[dict[str, Any]], pieces: dict[int, str]) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json with these ids among them, special: decoders skip those."""
    found = {token["id"]: token for token in added}
    for id, piece in pieces.items():
        found[id] = {"id": id, "content": piece, **PLAIN, **found.get(id, {}), "special": True}
    return [found[id] for id in sorted(found)]


def tokenizer_config(described: dict[str, Any], vocab: Vocab, pieces: dict[int, str]) -> dict[str, Any]:
    """A tokenizer_config.json by which the library encodes as training did, and gives text back unchanged.

    The class is the one that takes tokenizer.json literally: those of architectures build a tokenizer of
    their own from its pieces, and Transformers 5's for CodeLlama drops one of the spaces that open a text. No
    space before a full stop is "cleaned up", and every text is opened by what opened the documents.
    """
    kept = {name: value for name, value in described.items() if name != "auto_map"}
    others = [pieces[id] for id in pieces if id not in (vocab.bos, vocab.eos)]
    listed = [_content(token) for token in kept.get("additional_special_tokens") or []]
    return {
        "eos_token": pieces[vocab.eos],
        **kept,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pieces[vocab.bos],
        "add_bos_token": True,
        "add_eos_token": False,
        "additional_special_tokens": list(dict.fromkeys([*listed, *others])),
        "clean_up_tokenization_spaces": False,
    }


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _opening(tokenizer: Tokenizer, bos: int) -> Any:
    """The post-processor that puts BOS before a text, as JSON."""
    piece = tokenizer.id_to_token(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[piece, "$A"], pair=[piece, "$A", piece, "$B"], special_tokens=[(piece, bos)]
    )
    return json.loads(tokenizer.to_str())["post_processor"]

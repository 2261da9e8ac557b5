"""The way through data preparation: documents -> segments -> ids -> sequences -> shards.

The only file of the package that knows all its steps; every step is in a file of its own.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from data_prep.config import DataPrepConfig
from data_prep.document import Document, generator, hash64, split, unit
from data_prep.fim import Mode, Segment, choose_cuts, choose_mode, lay_out
from data_prep.packing import Encoded, pack
from data_prep.shards import ShardWriter
from data_prep.sources import documents
from data_prep.vocab import Encoder, Vocab, find_vocab, load_tokenizer, save_tokenizer, train_bpe

BATCH = 512  # documents encoded at once
BPE_BYTES = 8_000_000  # of text that the demo's tokenizer learns from


def prepare(config: DataPrepConfig, out: Path) -> dict[str, Any]:
    """Write shards, tokenizer and held-out texts into `out`; returns the manifest's facts."""
    drops: Counter[str] = Counter()
    splits = _split_files(config, drops)
    if config.tokenizer is None:
        tokenizer = train_bpe(_sample(splits["train"], BPE_BYTES), config.vocab)
    else:
        tokenizer = load_tokenizer(config.tokenizer)
    vocab = find_vocab(tokenizer, config.vocab)
    encoder = Encoder(tokenizer, vocab)
    save_tokenizer(tokenizer, config.vocab, config.tokenizer, out / "tokenizer")
    languages = sorted({document.language for part in splits.values() for document in part})
    facts: dict[str, Any] = {"vocab": vocab.to_json(), "seq_len": config.seq_len, "languages": languages}
    for name, part in splits.items():
        facts[name] = _write_split(out, name, part, config, vocab, encoder, languages)
    _write_held_out(splits["held_out"], out / "held_out.jsonl")
    facts["drops"] = dict(drops)
    facts["texts_with_control_pieces"] = encoder.defused
    return facts


def _split_files(config: DataPrepConfig, drops: Counter[str]) -> dict[str, list[Document]]:
    """Held out by file, so that no part of a held-out file is ever trained on; pieces in hashed order."""
    parts: dict[str, list[Document]] = {"train": [], "held_out": []}
    for document in documents(config.data, drops):
        name = "held_out" if unit(config.seed, "held_out", document.id) < config.held_out else "train"
        limit = config.data.split_chars
        parts[name] += split(document, limit) if limit else [document]
    for part in parts.values():
        part.sort(key=lambda document: hash64(config.seed, "order", document.id))
    return parts


def _sample(part: list[Document], limit: int) -> Iterator[str]:
    """Texts from the start of the hashed order, up to `limit` characters."""
    size = 0
    for document in part:
        if size >= limit:
            return
        size += len(document.text)
        yield document.text


def _write_split(
    out: Path,
    name: str,
    part: list[Document],
    config: DataPrepConfig,
    vocab: Vocab,
    encoder: Encoder,
    languages: list[str],
) -> dict[str, Any]:
    writer = ShardWriter(out, name, seq_len=config.seq_len, vocab_size=vocab.size, padding=vocab.eos)
    modes: Counter[str] = Counter()

    def counted(found: Iterable[Encoded]) -> Iterator[Encoded]:
        for document in found:
            modes[document.mode.name] += 1
            yield document

    encoded = encode(track(part, description=f"{name:>9}", transient=True), config, vocab, encoder, languages)
    for packed in pack(counted(encoded), config.seq_len):
        writer.add(packed)
    writer.flush()
    sequences = sum(shard["sequences"] for shard in writer.shards)
    tokens = sum(shard["tokens"] for shard in writer.shards)
    return {
        "documents": len(part),
        "modes": dict(sorted(modes.items())),
        "sequences": sequences,
        "tokens": tokens,
        "filled": round(tokens / (sequences * config.seq_len), 4) if sequences else 0.0,
        "shards": writer.shards,
    }


def encode(
    part: Iterable[Document], config: DataPrepConfig, vocab: Vocab, encoder: Encoder, languages: list[str]
) -> Iterator[Encoded]:
    """Documents to ids, each in its mode; one that is too long for infilling stays plain."""
    rest = iter(part)
    while batch := list(islice(rest, BATCH)):
        modes = [_mode(document, config, vocab) for document in batch]
        laid_out = [_lay_out(document, mode, config, vocab, encoder) for document, mode in zip(batch, modes)]
        ids = _encode_segments(laid_out, encoder)
        for index, document in enumerate(batch):
            if modes[index] is not Mode.PLAIN and len(ids[index]) > config.seq_len:
                modes[index] = Mode.PLAIN
                plain = _lay_out(document, Mode.PLAIN, config, vocab, encoder)
                ids[index] = _encode_segments([plain], encoder)[0]
            language = languages.index(document.language)
            yield Encoded(hash64(document.id), language, modes[index], ids[index])


def _mode(document: Document, config: DataPrepConfig, vocab: Vocab) -> Mode:
    if not vocab.infilling:
        return Mode.PLAIN
    random = generator(config.seed, "mode", document.id)
    return choose_mode(random, fim_rate=config.fim_rate, spm_rate=config.spm_rate)


def _lay_out(
    document: Document, mode: Mode, config: DataPrepConfig, vocab: Vocab, encoder: Encoder
) -> list[Segment]:
    cuts = choose_cuts(generator(config.seed, "cuts", document.id), len(document.text))
    return lay_out(document.text, mode, cuts, vocab=vocab, lead=encoder.lead, ends=document.ends)


def _encode_segments(laid_out: list[list[Segment]], encoder: Encoder) -> list[np.ndarray]:
    """Encode the texts of many documents in one call and put the ids back between control ids."""
    texts = [segment for segments in laid_out for segment in segments if isinstance(segment, str)]
    found = iter(encoder.encode(texts))
    return [
        np.concatenate([next(found) if isinstance(s, str) else [s] for s in segments]).astype(np.int64)
        for segments in laid_out
    ]


def _write_held_out(part: list[Document], path: Path) -> None:
    """The held-out documents as text: prompts for whoever measures the model later."""
    with path.open("w", encoding="utf-8") as file:
        for document in part:
            row = {"id": document.id, "language": document.language, "content": document.text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

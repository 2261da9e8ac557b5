"""Documents to ids, each in its mode: plain, or laid out for infilling. Knows settings, but no files."""

from collections.abc import Iterable, Iterator

import numpy as np

from data_prep.config import DataPrepConfig
from data_prep.document import Document, batches, generator
from data_prep.encode.encoder import Encoder
from data_prep.encode.fim import Mode, Segment, choose_cuts, choose_mode, lay_out
from data_prep.vocab import Vocab


def encode(
    documents: Iterable[Document], config: DataPrepConfig, vocab: Vocab, encoder: Encoder
) -> Iterator[tuple[Document, Mode, np.ndarray]]:
    """Every document with its mode and (n,) ids; one that is too long for infilling stays plain."""
    for batch in batches(documents):
        modes = [_mode(document, config, vocab) for document in batch]
        laid_out = [_lay_out(document, mode, config, vocab, encoder) for document, mode in zip(batch, modes)]
        for document, mode, ids in zip(batch, modes, _encode_segments(laid_out, encoder)):
            if mode is not Mode.PLAIN and len(ids) > config.seq_len:
                plain = _lay_out(document, Mode.PLAIN, config, vocab, encoder)
                yield document, Mode.PLAIN, _encode_segments([plain], encoder)[0]
            else:
                yield document, mode, ids


def _mode(document: Document, config: DataPrepConfig, vocab: Vocab) -> Mode:
    if not vocab.infilling:
        return Mode.PLAIN
    random = generator(config.seed, "mode", document.id)
    return choose_mode(random, fim_rate=config.fim_rate, spm_rate=config.spm_rate)


def _lay_out(
    document: Document, mode: Mode, config: DataPrepConfig, vocab: Vocab, encoder: Encoder
) -> list[Segment]:
    cuts = (0, 0)
    if mode is not Mode.PLAIN:
        cuts = choose_cuts(generator(config.seed, "cuts", document.id), len(document.text))
    return lay_out(document.text, mode, cuts, vocab=vocab, lead=encoder.lead, ends=document.ends)


def _encode_segments(laid_out: list[list[Segment]], encoder: Encoder) -> list[np.ndarray]:
    """Encode the texts of many documents in one call and put the ids back between control ids."""
    texts = [segment for segments in laid_out for segment in segments if isinstance(segment, str)]
    encoded = iter(encoder.encode(texts))
    return [
        np.concatenate([next(encoded) if isinstance(s, str) else [s] for s in segments]).astype(np.int32)
        for segments in laid_out
    ]

"""What happens to every row before it is counted or encoded: filters, then decontamination. Counts nothing."""

from collections.abc import Iterable, Iterator

from data_prep.config import FilterConfig
from data_prep.document import Document, Drop, batches
from data_prep.encode.encoder import Encoder
from data_prep.select.decontaminate import Index
from data_prep.select.filters import reason_to_drop


def screen(
    rows: Iterable[Document | Drop], config: FilterConfig, encoder: Encoder, index: Index
) -> Iterator[Document | Drop]:
    """The same rows in the same order, with a Drop for each document that fails."""
    for batch in batches(rows):
        checked = [_filter(row, config, encoder) for row in batch]
        texts = [row.text for row in checked if isinstance(row, Document)]
        matches = iter(index.search(texts))
        for row in checked:
            if isinstance(row, Document) and (match := next(matches)):
                yield drop(row, "contaminated", f"{match.task}: {match.words}")
            else:
                yield row


def _filter(row: Document | Drop, config: FilterConfig, encoder: Encoder) -> Document | Drop:
    if isinstance(row, Drop):
        return row
    if reason := reason_to_drop(row, config):
        return drop(row, reason)
    if config.control == "drop" and encoder.spells_control(row.text):
        return drop(row, "control pieces")
    return row


def drop(row: Document, reason: str, detail: str = "") -> Drop:
    """The document, dropped for a reason."""
    return Drop(reason, row.file, row.row, row.id, detail)

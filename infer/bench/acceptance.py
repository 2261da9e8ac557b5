"""Write acceptance.csv: the acceptance rates of part=speed, in speculators' columns. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

#: speculators' columns, and our names for them. A draft of speculators is a verification here.
COUNTS = {
    "num_drafts": "verifications",
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "acceptance_length": "mean_acceptance_length",
}


def acceptance_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV text with a line for each prompt set, decoder and temperature with drafts.

    The columns `subset` to `acceptance_at_pos_N` are speculators', in its order.
    `acceptance_at_pos_N`, N from 0, is the share of verifications that accepted at least N + 1
    drafts. The columns `decoder` and `temperature` are added.
    """
    drafting = [row for row in rows if row["verifications"]]
    deepest = max((len(row["survival"]) for row in drafting), default=0)
    positions = [f"acceptance_at_pos_{at}" for at in range(deepest)]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["subset", *COUNTS, *positions, "decoder", "temperature"])
    for row in drafting:
        survival = [*row["survival"], *[0.0] * (deepest - len(row["survival"]))]
        counts = [row[name] for name in COUNTS.values()]
        key = [row["decoder"], row["temperature"]]
        writer.writerow([row["prompt_set"], *counts, *survival, *key])
    return file.getvalue()

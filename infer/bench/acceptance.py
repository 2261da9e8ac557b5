"""acceptance.csv: the acceptance of part=speed in the columns of speculators' evaluation. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

COUNTS = {  # speculators' columns; its draft is a verification here
    "num_drafts": "verifications",
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "acceptance_length": "mean_acceptance_length",
}


def acceptance_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each prompt set, decoder and temperature that drafted.

    `subset` to `acceptance_at_pos_N` are speculators' columns in its order: the acceptance at
    position N, from 0, is the share of verifications that accepted at least N + 1 drafts.
    `decoder` and `temperature` follow them.
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
        place = [row["decoder"], row["temperature"]]
        writer.writerow([row["prompt_set"], *counts, *survival, *place])
    return file.getvalue()

"""python -m infer.graph: one draft of a text as a graph, on the terminal and as a picture.

Which token was drafted behind which, what was merged, what the target was asked, and what it took.
"""

from conf import run
from infer.config import GraphConfig, check_directory


def main(config: GraphConfig) -> None:
    """Decode, choose a draft, and show it."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.graph.picture import draw_draft

    draw_draft(config)


if __name__ == "__main__":
    run("graph", GraphConfig, main)

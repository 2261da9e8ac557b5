"""python -m infer.regenerate: continue documents of the training data with the model's own text.

    python -m infer.regenerate model=DIR data.path=DATA out=OWN

Under torchrun the documents are divided over the ranks; the text does not depend on their number. What is done
stays: an interrupted run goes on.
"""

from conf import run
from infer.config import check_directory
from infer.regenerate import RegenerateConfig


def main(config: RegenerateConfig) -> None:
    """Continue the documents, unless the folder already holds the result."""
    check_directory(config.model)
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    from infer.regenerate.run import write_own_text

    write_own_text(config)


if __name__ == "__main__":
    run("regenerate", RegenerateConfig, main)

"""python -m infer.playground: a page on this machine to try a model on."""

import os
from importlib.util import find_spec
from pathlib import Path

from conf import UserError, run
from infer.config import check_directory
from infer.playground import PlaygroundConfig


def main(config: PlaygroundConfig) -> None:
    """Serve the page until Ctrl-C."""
    check_directory(config.model)
    if find_spec("gradio") is None:
        raise UserError(
            "gradio must be installed for the playground, got none. Run pip install 'gradio>=6.31' here."
        )
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # Imported late: a mistake in the settings is reported without waiting for PyTorch.
    import torch

    from infer.api import load
    from infer.playground.page import HEAD, build

    if config.threads:
        torch.set_num_threads(config.threads)
    model = load(config.model, config.dtype, config.device, draft=config.draft)
    page = build(model, Path(config.model).resolve().name)
    page.queue().launch(
        server_name=config.host, server_port=config.port, share=False, head=HEAD, footer_links=[]
    )


if __name__ == "__main__":
    run("playground", PlaygroundConfig, main)

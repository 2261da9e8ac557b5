"""python -m infer: continue one prompt, or write what lies between a prefix and a suffix."""

from conf import run
from conf.characters import print_line
from conf.files import file_to_write
from infer.config import InferConfig
from infer.models.directory import check_directory


def main(config: InferConfig) -> None:
    """Print the text as it comes, then one line of figures; off a terminal the text alone to stdout."""
    page = file_to_write("html", config.html)
    check_directory(config.model)
    # Imported late: a mistake in the settings is told without waiting for PyTorch.
    import torch
    from rich.console import Console

    from infer.api import generate, load
    from infer.models import parallel
    from infer.view.live import View
    from infer.view.page import write_page
    from infer.view.summary import Summary

    if config.threads:
        torch.set_num_threads(config.threads)
    model = load(config.model, config.dtype, config.device, draft=config.draft, compile=config.compile)
    before, after = config.prompt or config.infill.prefix, config.infill.suffix
    steps = generate(model, config.prompt or config.infill, config.decode)
    summary, shown, view = Summary(), [], View(Console(quiet=not parallel.is_first()), before, after)
    for step in steps:
        summary.add(step)
        shown.append(step)
        view.step(step)
    view.close(summary)
    if page and parallel.is_first():
        write_page(page, title=config.model, before=before, after=after, steps=shown, summary=summary)
        print_line(f"wrote {page}", error=True)


if __name__ == "__main__":
    run("infer", InferConfig, main)

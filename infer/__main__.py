"""python -m infer: continue a prompt, or infill the text between a prefix and a suffix."""

import sys
from pathlib import Path

from conf.console import print_once, torchrun_rank
from conf.errors import UserError
from conf.settings.cli import run
from infer.config import InferConfig, Infill, check_directory

# Printed on a terminal, because the first tokens may take long.
WARM_UP = "the first tokens warm up and measure what drafts cost"


def main(config: InferConfig) -> None:
    """Print the text as it is decoded, then one line of figures.

    If the output is not a terminal, stdout gets the text alone.
    """
    check_directory(config.model)
    infill = bool(config.infill.prefix or config.infill.suffix)
    prompt = "" if infill else read_prompt(config)
    if sys.stderr.isatty():
        print_once(f"loading {config.model} ...", error=True)
    # Imported here, so that a wrong setting is reported without waiting for PyTorch.
    import torch
    from rich.console import Console

    from infer.api import generate, load
    from infer.chat import chat_ids
    from infer.engine.packed import dtype_of
    from infer.models.checkpoint import ModelDirectory
    from infer.requests import check_length, ids_of
    from infer.view import show

    if config.threads:
        torch.set_num_threads(config.threads)
    before = prompt or config.infill.prefix
    after = config.infill.suffix
    directory = ModelDirectory(config.model)
    if infill:
        directory.text.order(
            config.infill
        )  # raises UserError before the weights are read
    if not config.chat:
        warn_of_control(directory.text.spelled_pieces(before, after))
    request: Infill | str | list[int] = config.infill if infill else prompt
    if config.chat:
        message = {"role": "user", "content": prompt}
        request = chat_ids(Path(config.model), [message])
    new, rows, context = config.decode.max_new_tokens, directory.rows, directory.context
    if rows and context:  # else the loaded model checks the prompt
        ids = ids_of(request, "prompt", text=directory.text, rows=rows)
        check_length(ids, "prompt", new=new, context=context)
        request = request if infill else ids
    model = load(
        directory,
        config.dtype,
        config.device,
        draft=config.draft,
        compile=config.compile,
    )
    if sys.stderr.isatty():
        weights = dtype_of(model.lm)
        print_once(f"{weights} on {model.lm.device}; {WARM_UP} ...", error=True)
    console = Console(quiet=torchrun_rank()[0] > 0)
    steps = generate(model, request, config.decode)
    summary = show(steps, console, before, after)
    if config.draft and summary.forwards > 1 and not summary.drafted:
        warn_of_no_drafts(config.draft)


def warn_of_no_drafts(draft: str) -> None:
    """Say on standard error why a draft model drafted nothing."""
    print_once(
        f"infer: draft={draft} drafted nothing: by the measured costs its drafts would slow "
        "this text down. Set decode.nodes=N for N drafts in every forward",
        error=True,
    )


def warn_of_control(pieces: list[str]) -> None:
    """Warn on standard error that a prompt spells control pieces."""
    if pieces:
        print_once(
            f"infer: the prompt contains {', '.join(pieces)}, encoded as text, not as "
            "control pieces. Use chat=true, or infill.prefix and infill.suffix",
            error=True,
        )


def read_prompt(config: InferConfig) -> str:
    """Return the text to continue: `prompt`, the content of a file, or standard input.

    Raises UserError for a missing file, for bytes that are not UTF-8, for an empty text, and for
    standard input with several processes.
    """
    if config.prompt not in ("", "-"):
        return config.prompt
    if not config.prompt_file and torchrun_rank()[1] > 1:
        raise UserError(
            "prompt must be a text or a file with several processes, because they share standard input. "
            "Give prompt=TEXT or prompt_file=FILE."
        )
    source = config.prompt_file or "standard input"
    try:
        file = Path(config.prompt_file) if config.prompt_file else None
        if file:
            content = file.read_bytes()
        elif sys.stdin:
            content = sys.stdin.buffer.read()
        else:  # closed by the shell: <&-
            content = b""
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"prompt_file must be a file, got {source}: {error.strerror}. Give its path."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"prompt must be text in UTF-8, got other bytes from {source}. Convert it."
        ) from error
    if not text:
        raise UserError(
            f"prompt must not be empty, got no text from {source}. Give prompt=TEXT or prompt_file=FILE."
        )
    return text


if __name__ == "__main__":
    run("infer", InferConfig, main)

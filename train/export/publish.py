"""A finished model directory: a card with a report's figures, the hub, Weights & Biases."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

from conf import UserError
from conf.console import print_line
from conf.stage import read_manifest
from conf.tracker import UPLOAD_SECONDS, run_file
from train.export import ExportConfig
from train.export.card import CARD, read_report, rename_card, render_card, write_card

T = TypeVar("T")
# Files of an export: readers would take an older one's that stays beside a newer for the newer's own.
OWN = re.compile(
    r"(adapter|custom_generate)/.*|(model(-.*-of-.*)?|ngrams)\.safetensors|model\.safetensors\.index\.json"
    r"|(adaptive|config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json"
    r"|chat_template\.jinja"
)


def check_publication(config: ExportConfig, *, finished: bool) -> None:
    """Raise UserError for an unusable report or place on the hub, before anything is written."""
    if config.report and not finished:
        raise UserError(
            f"report={config.report} must be of the finished directory out={config.out}, got none. "
            "Export without report= first."
        )
    if config.report:
        read_report(config.report, Path(config.out))
    if config.push:
        check_push(config.push, private=config.private)


def publish(config: ExportConfig, manifest: dict[str, Any]) -> None:
    """Write the card again for a report or another name on the hub, and push the directory if requested."""
    out = Path(config.out)
    if config.report:
        exported = read_manifest(out, "model", "out")
        step = exported.get(
            "step", manifest["step"]
        )  # earlier versions took the last step
        verified = exported.get("verified")
        report = config.report
        card = render_card(
            out, manifest, step=step, verified=verified, report=report, push=config.push
        )
        write_card(out, card)
        print_line(f"export: wrote {out / CARD} with the figures of {config.report}")
    elif config.push and rename_card(out, config.push):
        print_line(f"export: wrote {out / CARD} with the name {config.push}")
    if config.push:
        print_line(
            f"export: pushed to {push(out, config.push, private=config.private)}"
        )


def check_push(repo: str, *, private: bool) -> None:
    """Raise UserError if the hub cannot be reached, or `repo` cannot be written."""
    api = HfApi()
    user = _request(repo, api.whoami)
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise UserError(
            f"push={repo} must have a token with write access, got a read-only one. Use another."
        )
    owner = repo.partition("/")[0]
    names = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if owner.lower() not in map(str.lower, names):
        raise UserError(
            f"push={repo} must begin with one of {', '.join(names)}, got {owner}."
        )
    _check_visibility(api, repo, private=private)


def push(out: Path, repo: str, *, private: bool) -> str:
    """Upload a model directory in one commit, to a new or an existing repository; return its address.

    Files of an older export are deleted, others stay. Raise UserError.
    """
    for path in sorted(out.rglob("*")):
        if path.is_symlink():  # may lead to any file of this machine
            raise UserError(
                f"push={repo} must be a directory without links, got {path} -> {path.readlink()}. "
                "Replace it by its file."
            )
    api = HfApi()
    _request(repo, lambda: api.create_repo(repo, private=private, exist_ok=True))
    _check_visibility(api, repo, private=private)
    files = {
        path.relative_to(out).as_posix(): path
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    old = [
        name
        for name in _request(repo, lambda: api.list_repo_files(repo))
        if name not in files
    ]
    changes: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationDelete(name) for name in old if OWN.fullmatch(name)),
        *(
            CommitOperationAdd(name, path)
            for name, path in files.items()
            if not name.startswith(".")
        ),
    ]
    # Not upload_folder: it makes several commits of many or large files.
    message = f"{out.name}, by adaptive-tokens"
    _request(repo, lambda: api.create_commit(repo, changes, commit_message=message))
    return f"{api.endpoint}/{repo}"


def _check_visibility(api: HfApi, repo: str, *, private: bool) -> None:
    def is_private() -> bool | None:
        try:
            return api.model_info(repo).private
        except RepositoryNotFoundError:  # not there yet
            return None

    if private and _request(repo, is_private) is False:
        raise UserError(
            f"push={repo} must be a private repository, got a public one. Use private=false."
        )


def _request(repo: str, request: Callable[[], T]) -> T:
    """Return the hub's answer. Raise UserError for whatever the client raises."""
    try:
        return request()
    except LocalTokenNotFoundError as error:
        raise UserError(
            f"push={repo} must have a sign-in at the hub, got no token. Set HF_TOKEN, or use `hf auth login`."
        ) from error
    except Exception as error:  # the client's and its HTTP library's
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (
            f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
        )
        raise UserError(
            f"push={repo} must be accepted by the hub, got {reason}"
        ) from error


def track(config: ExportConfig) -> None:
    """Log the finished directory to W&B, in the group of its training; W&B's files lie beside the directory."""
    from train.metrics import Tracker  # imports W&B

    out = Path(config.out).resolve()
    tracker = Tracker(
        config.tracker,
        out=out.parent,
        name=f"{out.name}-export",
        settings=asdict(config),
        speaks=True,
        job_type="export",
        file=run_file(out.parent, out.name),
        linked=run_file(Path(config.checkpoint)),
        upload_seconds=0 if config.artifact else UPLOAD_SECONDS,
    )
    manifest = read_manifest(out, "model", "out")
    verified = manifest["verified"] or {}
    names = ("weights", "logit_difference", "agreement", "sequences")
    tracker.summarise(
        {
            "parameters": manifest["parameters"],
            "step": manifest["step"],
            **{
                f"verified/{name}": verified[name] for name in names if name in verified
            },
            **{
                f"verified/{name}": value
                for name, value in verified.get("measured", {}).items()
            },
            **{
                f"drafts/{name}": value
                for name, value in verified.get("drafts", {}).items()
            },
        }
    )
    if config.artifact:
        tracker.log_folder(out, out.name)
    tracker.finish()

"""A finished model directory to the hub, whole: its manifest says there, too, what made it.

Sign-in is the hub's own (HF_TOKEN, or `hf auth login`). What the hub would refuse can be asked before there is
anything to upload. Knows files, and nothing of models.
"""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from conf import UserError

T = TypeVar("T")

# Files of an export: an older one's must not stay beside a newer, where readers would take them for its own.
OWN = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter/*",
    "custom_generate/*",
    "adaptive.json",
    "ngrams.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def check_push(repo: str, *, private: bool) -> None:
    """Raises UserError where the hub is out of reach, knows no such user, or lets this one not write there."""
    api = HfApi()
    user = _ask(repo, api.whoami)
    access = (user.get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise UserError(f"push={repo}: wanted a token of the hub that may write, found one that only reads")
    owner, names = repo.partition("/")[0], [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if owner.lower() not in map(str.lower, names):
        raise UserError(f"push={repo}: wanted one of {', '.join(names)} before the /, found {owner}")
    _check_visibility(api, repo, private=private)


def push(out: Path, repo: str, *, private: bool) -> str:
    """Upload a model directory in one commit, to a new repository or over what it had; returns the address.

    Nobody sees a part of it, nor what an older export left. Other files that the repository has beside are left
    there. Raises UserError.
    """
    _check_links(repo, out)
    api = HfApi()
    _ask(repo, lambda: api.create_repo(repo, private=private, exist_ok=True))
    _check_visibility(api, repo, private=private)
    told = f"{out.name}, by adaptive-tokens"
    files = {path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()}
    # Not upload_folder, which makes several commits of many files or of large ones.
    there = _ask(repo, lambda: api.list_repo_files(repo))
    changes: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationDelete(name) for name in there if name not in files and _is_own(name)),
        *(CommitOperationAdd(name, path) for name, path in files.items() if not name.startswith(".")),
    ]
    _ask(repo, lambda: api.create_commit(repo, changes, commit_message=told))
    return f"{api.endpoint}/{repo}"


def _check_links(repo: str, out: Path) -> None:
    """Raises UserError for a link: who made the directory may have it lead to any file of this machine."""
    links = [path for path in sorted(out.rglob("*")) if path.is_symlink()]
    if links:
        raise UserError(
            f"push={repo}: must be a directory without links, got {links[0]} -> {links[0].readlink()}. "
            "Replace it by its file."
        )


def _is_own(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OWN)


def _check_visibility(api: HfApi, repo: str, *, private: bool) -> None:
    """Weights that were to be private must not go to a repository that everyone sees."""

    def found() -> bool | None:
        try:
            return api.model_info(repo).private
        except RepositoryNotFoundError:  # not there yet
            return None

    seen = _ask(repo, found)
    if private and seen is False:
        raise UserError(
            f"push={repo}: wanted a private repository, found a public one (private=false allows it)"
        )


def _ask(repo: str, question: Callable[[], T]) -> T:
    """An answer of the hub. Raises UserError for every way in which none comes."""
    try:
        return question()
    except LocalTokenNotFoundError as error:
        told, found = f"a sign-in at {constants.ENDPOINT}", "no token: set HF_TOKEN, or use `hf auth login`"
        raise UserError(f"push={repo}: wanted {told}, found {found}") from error
    except HFValidationError as error:
        raise UserError(f"push={repo}: wanted a name that the hub allows, found {_line(error)}") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"push={repo}: wanted the hub, found HF_HUB_OFFLINE=1") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        told = "a token that may write there" if status in (401, 403) else "the hub to take it"
        raise UserError(f"push={repo}: wanted {told}, found its answer {status}: {_line(error)}") from error
    except Exception as error:  # of the library or of its HTTP client: nothing came back
        told = f"an answer of {constants.ENDPOINT}"
        raise UserError(f"push={repo}: wanted {told}, found {type(error).__name__}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The last line of a library's message: that of the hub itself, where it sent one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

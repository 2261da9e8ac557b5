"""Datasets on the hub, as files to stream: pinned to a commit, read in ranges, never stored.

Sign-in is the hub's own (HF_TOKEN, or `hf auth login`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conf import UserError


def hub_files(name: str) -> tuple[list[tuple[str, int]], str]:
    """The dataset's files with their bytes, sorted, and the address of the commit they are of.

    Raises UserError when the hub does not answer, or does not let this user in.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    wanted = f"data.path={name}: wanted a folder or a dataset on the hub, found no such folder"
    try:
        commit = api.dataset_info(name).sha
        tree = api.list_repo_tree(name, repo_type="dataset", revision=commit, recursive=True)
        files = sorted((entry.path, entry.size) for entry in tree if isinstance(entry, RepoFile))
    except GatedRepoError as error:
        raise UserError(
            f"data.path={name}: wanted access to the dataset, found that the hub asks for sign-in: accept "
            "its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{wanted}, and the hub knows no such dataset (or asks for sign-in)") from error
    except Exception as error:  # of the library or of its HTTP client: nothing came back
        raise UserError(f"{wanted}, and the hub did not answer ({type(error).__name__})") from error
    return files, f"hf://datasets/{name}@{commit}"


@contextmanager
def hub_open(address: str, broken: tuple[type[Exception], ...]) -> Iterator[Any]:
    """A file of the hub, for reading in ranges.

    While it is read, errors of the kinds in `broken` are those of a broken file. Any other
    one is the hub's: raised as UserError, since the file must not be passed over for it.
    """
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with HfFileSystem().open(address.removeprefix("hf://"), "rb") as file:
            yield file
    except Exception as error:
        # Some errors of the hub call themselves ValueError.
        if isinstance(error, broken) and not isinstance(error, HfHubHTTPError):
            raise
        raise UserError(
            f"{address}: wanted to read it from the hub, found {type(error).__name__}: rerun the command to go "
            "on from there"
        ) from error

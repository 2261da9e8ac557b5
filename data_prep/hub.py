"""Datasets on the hub, as files to stream: pinned to a commit, read in ranges, never stored.

Sign-in is the hub's own (HF_TOKEN, or `hf auth login`). Knows no format of what it hands on.
"""

import io
from collections.abc import Callable
from typing import Any

from conf import UserError
from conf.pages import HUB


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
            "its terms on the hub and set HF_TOKEN",
            page=HUB,
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{wanted}, and the hub knows no such dataset (or asks for sign-in)", page=HUB
        ) from error
    except Exception as error:  # of the library or of its HTTP client: nothing came back
        raise UserError(f"{wanted}, and the hub did not answer ({type(error).__name__})", page=HUB) from error
    return files, f"hf://datasets/{name}@{commit}"


def hub_open(address: str) -> io.BufferedReader:
    """A file of the hub, for reading in ranges.

    Where the hub fails, reading raises UserError: the file must not be passed over for it,
    as a broken one is.
    """
    return io.BufferedReader(_HubFile(address), buffer_size=2**20)


class _HubFile(io.RawIOBase):
    """The library's file, with the hub's errors told apart from those of what is read."""

    def __init__(self, address: str) -> None:
        from huggingface_hub import HfFileSystem

        self._address = address
        self._file = self._ask(lambda: HfFileSystem().open(address.removeprefix("hf://"), "rb"))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:
            raise UserError(
                f"{self._address}: wanted to read it from the hub, found {type(error).__name__}: rerun the "
                "command to go on from there",
                page=HUB,
            ) from error

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always: a range is asked for."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Where the next read starts."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read up to the buffer's size."""
        data = self._ask(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

"""List the input files of a file, a folder or a dataset on the hub, and choose its split.

The list of parts depends only on the files.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from conf.errors import HUB, UserError, as_user_error, counted, visible
from conf.hub import hub_refusal
from conf.text.rows import ROW_FILES, form_of
from data_prep.config import DataConfig

REMOTE = "hf://"
CARD = "README.md"  # dataset card on the hub
PART_BYTES = 8_000_000  # small source files are grouped into parts of this size
SUFFIXES = {"source": ("",), "parquet": (".parquet",), "jsonl": ROW_FILES}
NAMES = 8  # largest number of names under which a linked folder is listed
# Files that describe data, in lower case: it needs no warning to leave them out.
ABOUT = re.compile(
    r"(.*/)?([._].*|(readme|licen[cs]e|notice|citation|changelog|dataset_info)[^/]*)"
    r"|.*\.(md|rst|html|pdf|png|jpe?g|svg|gif|py|sh|ya?ml|toml|bib|lock|md5|sha256)"
)
# Files beside the .arrow files of a dataset that `datasets` has saved.
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
# Words in a path that mark the test split, the same as in `datasets`.
TEST = ("test", "testing", "tests")


@dataclass(frozen=True)
class InputPart:
    """The files that one task reads, relative to `data.path`, and their total size in bytes.

    `special` are broken links and devices; each becomes a Drop.
    """

    files: tuple[str, ...]
    size: int
    special: tuple[str, ...] = ()


@dataclass
class Listing:
    """The files of data.path with their sizes in bytes, and the `special` files (see InputPart)."""

    sizes: dict[str, int]
    special: tuple[str, ...] = ()
    split: bool = False  # True if only the files of data.split are listed


def list_parts(data: DataConfig) -> tuple[list[InputPart], str]:
    """Return all parts in a fixed order, and the root (folder or address) of their files.

    Source files are grouped into parts of PART_BYTES. Raises UserError if no file matches.
    """
    from fsspec.utils import glob_translate

    with as_user_error("data.include must be globs below data.path, got"):
        included = [re.compile(glob_translate(glob)) for glob in data.include]
    unfit: Counter[str] = Counter()  # files of other formats, by suffix

    def accepts(name: str) -> bool:
        if not any(glob.match(name) for glob in included) or any(
            fnmatch(name, glob) for glob in data.exclude
        ):
            return False
        if data.kind == "source" or form_of(name) in SUFFIXES[data.kind]:
            return True
        if not ABOUT.fullmatch(name.lower()):
            unfit[form_of(name) or "no suffix"] += 1
        return False

    if data.config is not None and Path(data.path).exists():
        raise UserError(
            f"data.config must be null for files on this machine, got {data.config} with "
            f"data.path={data.path}. Use data.include=[{data.config}/**]"
        )
    if Path(data.path).is_file():
        root, listing = _single_file(data)
    elif Path(data.path).is_dir():
        root = os.path.abspath(data.path)
        listing = _local_files(root, accepts)
    else:
        root, listing = _hub_files(data, accepts)
    sizes = listing.sizes
    if unfit[".arrow"]:
        sizes = {name: sizes[name] for name in sizes if Path(name).name not in SAVED}
    sizes = sizes if listing.split else _of_split(sizes, data)
    _check_formats(data, sizes, unfit)
    _check_kind(data, sizes)
    _check_paths(root, sizes)
    return _parts(sizes, listing.special, data), root


def _parts(
    sizes: Mapping[str, int], special: tuple[str, ...], data: DataConfig
) -> list[InputPart]:
    limit = PART_BYTES if data.kind == "source" else 0
    parts: list[InputPart] = []
    group: list[str] = []
    size = 0
    for name in sorted(sizes, key=Path):
        group.append(name)
        size += sizes[name]
        if size >= limit:
            parts.append(InputPart(tuple(group), size, special))
            group, size, special = [], 0, ()
    if group:
        parts.append(InputPart(tuple(group), size, special))
    return parts


def _check_formats(
    data: DataConfig, sizes: Mapping[str, int], unfit: Counter[str]
) -> None:
    """Warn of files of other formats, `unfit` by suffix. Raises UserError if no file is left."""
    counts = ", ".join(f"{count} {name}" for name, count in unfit.most_common(5))
    forms = ", ".join(filter(None, SUFFIXES[data.kind])) or "text"
    if unfit[".arrow"]:
        forms += " (.arrow by load_from_disk(FOLDER).to_parquet(FILE) of datasets)"
    if not sizes:
        split = f" and data.split={data.split}" if data.split else ""
        raise UserError(
            f"data.path={data.path} must have {data.kind} files that match data.include="
            f"[{','.join(data.include)}]{split} but not data.exclude, got "
            f"{counts or 'no files'}. Correct these settings, or convert the files to {forms}"
        )
    if unfit:
        logging.getLogger(__name__).warning(
            "data.path: left out %s of other formats: %s. Convert them to %s, or name them in "
            "data.exclude",
            counted(unfit.total(), "file"),
            visible(counts),
            forms,
        )


def _single_file(data: DataConfig) -> tuple[str, Listing]:
    """Return the folder and the listing of a single file. Raises UserError for an unknown suffix."""
    path = Path(os.path.abspath(data.path))
    form = form_of(path.name)
    if data.kind != "source" and form not in SUFFIXES[data.kind]:
        raise UserError(
            f"data.path={data.path} must have the suffix {', '.join(SUFFIXES[data.kind])} "
            f"for data.kind={data.kind}, got {form or 'no suffix'}. Convert the file to "
            "JSON lines, or rename it"
        )
    # As in `datasets`, a single file is the train split, unless its name says test. Without data.split a
    # test split is read too.
    train = data.split == "train" and not split_words(path.name).intersection(TEST)
    sizes = {path.name: path.stat().st_size}
    return str(path.parent), Listing(sizes, split=train or data.split is None)


def _check_kind(data: DataConfig, sizes: Mapping[str, int]) -> None:
    """Raise UserError if data.kind is source, but all files are files of rows."""
    rows = [*ROW_FILES[:2], *ROW_FILES[3:]]  # a .json file may be source code
    if data.kind == "source" and all(form_of(name) in rows for name in sizes):
        first = min(sizes)
        raise UserError(
            f"data.path={data.path} must be source code, got files of rows such as "
            f"{first}. Add data=chat for conversations, or data=jsonl for documents"
        )


def _check_paths(root: str, sizes: Mapping[str, int]) -> None:
    """Raise UserError for a parquet file with :: in its path: `datasets` would read it as two addresses."""
    for name in sizes:
        if form_of(name) == ".parquet" and "::" in f"{root}/{name}":
            raise UserError(
                f"the path of a parquet file must not contain ::, got {root}/{name}. Rename "
                "the file or its folder, or leave it out by data.exclude"
            )


def split_words(name: str) -> set[str]:
    """Return the words of a path; data/train_sft-0.parquet has data, train, sft, train_sft and parquet."""
    patterns = (r"\w+", "[a-z_]+", "[a-z]+")
    return {word for pattern in patterns for word in re.findall(pattern, name.lower())}


def _of_split(sizes: dict[str, int], data: DataConfig) -> dict[str, int]:
    """Return the files of data.split, by default all files except a test split."""
    if data.kind == "source":
        return sizes
    if data.split:
        split = data.split.lower()
        return {
            name: size for name, size in sizes.items() if split in split_words(name)
        }
    chosen = {
        name: size
        for name, size in sizes.items()
        if not split_words(name).intersection(TEST)
    }
    if len(chosen) < len(sizes):
        logging.getLogger(__name__).warning(
            "data.path: left out %s of a test split, the first is %s. Set data.split to read them",
            counted(len(sizes) - len(chosen), "file"),
            visible(min(set(sizes) - set(chosen))),
        )
    return chosen


def _local_files(root: str, accepts: Callable[[str], bool]) -> Listing:
    """List the accepted files in a folder and its subfolders.

    Links to folders are followed. A file with several links is listed once. A folder with
    several links is visited under at most NAMES names, in case the globs accept only some of
    them; more could take forever, since a chain of n folders with two links each has 2^n names.
    """
    sizes: dict[str, int] = {}
    listed: set[str] = set()
    special: list[str] = []
    visits: Counter[str] = Counter()

    def visit(folder: str, below: str, real: str, parents: frozenset[str]) -> None:
        if real in parents or visits[real] == NAMES:  # a cycle of links, or many links
            return
        visits[real] += 1
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            name = below + entry.name
            target = os.path.join(real, entry.name)
            linked = entry.is_symlink()
            # entry.is_dir fails for a link to itself.
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                inner = os.path.realpath(target) if linked else target
                visit(entry.path, f"{name}/", inner, parents | {real})
                continue
            if linked:
                target = os.path.realpath(target)
            if target not in listed and accepts(name):
                listed.add(target)
                if os.path.isfile(entry.path):
                    sizes[name] = os.stat(entry.path).st_size
                else:
                    special.append(name)

    visit(root, "", os.path.realpath(root), frozenset())
    return Listing(sizes, tuple(special))


def _hub_files(data: DataConfig, accepts: Callable[[str], bool]) -> tuple[str, Listing]:
    """Return the address of the newest commit of a dataset on the hub, and its accepted files.

    Sign in by HF_TOKEN or `hf auth login`. Raises UserError if the dataset cannot be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    name = data.path
    try:
        commit = api.dataset_info(name).sha
        tree = api.list_repo_tree(
            name, repo_type="dataset", revision=commit, recursive=True
        )
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
        configs = {}
        if CARD in {file.path for file in files}:
            card = api.hf_hub_download(name, CARD, repo_type="dataset", revision=commit)
            configs = card_configs(Path(card))
    except Exception as error:  # of the library or of its HTTP client
        raise UserError(
            f"data.path={name} must be a file, a folder or a dataset on the hub: there is "
            f"no such path, and {hub_refusal(error, 'dataset')}",
            page=HUB,
        ) from error
    globs, split = config_globs(data, configs)
    sizes = {
        file.path: file.size
        for file in files
        if accepts(file.path)
        and (globs is None or any(glob.match(file.path) for glob in globs))
    }
    address = f"{REMOTE}datasets/{name}@{commit}"
    return address, Listing(sizes, split=split)


def card_configs(card: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the configurations of a dataset card, each as pairs (split, glob of its files).

    The split is "" if the card does not name it.
    """
    from huggingface_hub import DatasetCard

    listed = DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs")
    configs: dict[str, list[tuple[str, str]]] = {}
    for config in listed or []:
        files = config.get("data_files") or "**"
        folder = f"{config['data_dir']}/" if config.get("data_dir") else ""
        entries = []
        for entry in files if isinstance(files, list) else [files]:
            entry = entry if isinstance(entry, dict) else {"path": entry}
            paths = (
                entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
            )
            split = str(entry.get("split", ""))
            entries += [(split, f"{folder}{path}") for path in paths]
        configs[str(config.get("config_name"))] = entries
    return configs


def config_globs(
    data: DataConfig, configs: Mapping[str, list[tuple[str, str]]]
) -> tuple[list[re.Pattern[str]] | None, bool]:
    """Return globs of the files of data.config (None: all files), and whether they select data.split.

    Raises UserError if the card does not have the configuration, or has several and data.config is null.
    """
    from fsspec.utils import glob_translate

    if not configs:
        if data.config is None:
            return None, False
        configs = {data.config: [("", f"{data.config}/**")]}
    only = min(configs) if len(configs) == 1 else "default"
    config = data.config or only
    if config not in configs:
        if data.config is None and data.include != ["**/*"]:
            return None, False
        raise UserError(
            f"data.config must be one of {', '.join(sorted(configs))} for data.path="
            f"{data.path}, got {data.config or 'null'}. Set data.config"
        )
    globs = [
        re.compile(glob_translate(glob))
        for split, glob in configs[config]
        if not split or (split == data.split if data.split else split not in TEST)
    ]
    return globs, all(split for split, _ in configs[config])

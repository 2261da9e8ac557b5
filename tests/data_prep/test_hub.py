"""Read a dataset from a local server that imitates the hub."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conf.runs.stage import read_manifest
from data_prep.shards import Shards
from tests import bpe
from tests.messages import error

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/code"
FILE = "train-00000-of-00001.parquet"
Run = Callable[..., subprocess.CompletedProcess[str]]


class Hub(BaseHTTPRequestHandler):
    """Answers the requests for listing and for reading in ranges."""

    root: Path
    broken: str  # requests for paths that contain this text fail

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entries(self) -> list[dict[str, object]]:
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        return [
            {
                "type": "file",
                "path": str(f.relative_to(self.root)),
                "size": f.stat().st_size,
                "oid": "0" * 40,
            }
            for f in files
        ]

    def answer_json(self, content: object) -> None:
        self.answer(json.dumps(content).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        api = f"/api/datasets/{NAME}"
        if self.path.startswith(f"/datasets/{NAME}/resolve/"):
            self.answer_file(self.path.split("/", 6)[6])
        elif self.path.startswith(f"{api}/tree/"):
            self.answer_json(self.entries())
        elif self.path.startswith(api):
            self.answer_json({"id": NAME, "sha": COMMIT})
        else:
            self.answer(b"{}", 403, X_Error_Code="GatedRepo")

    def answer_file(self, name: str) -> None:
        if self.broken in name:
            self.answer(b"", 400)
            return
        data = (self.root / name).read_bytes()
        extra = {"ETag": '"1"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if requested := self.headers.get("Range"):
            first, last = map(int, requested.removeprefix("bytes=").split("-"))
            extra["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self.answer(data, 206 if requested else 200, **extra)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        requested = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer_json([e for e in self.entries() if str(e["path"]) in requested])


@pytest.fixture
def run_on_hub(data_folder: Path, tmp_path: Path) -> Iterator[Run]:
    """Yield a function that prepares the hub's dataset into tmp_path / "out"."""
    Hub.root, Hub.broken = tmp_path / "hub", "none"
    for language, count in {"python": 12, "go": 5}.items():
        (Hub.root / language).mkdir(parents=True)
        numbers = list(map(str, range(count)))
        rows = {"content": [f"<reponame>r\nname_{n} = {n}\n" for n in numbers]}
        for key in ("id", "max_stars_repo_name", "max_stars_repo_path"):
            rows[key] = numbers
        pq.write_table(pa.table(rows), Hub.root / language / FILE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }

    def run(name: str = NAME, *overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "data_prep", "experiment=starcoder"]
        command += [f"data.path={name}", f"tokenizer={data_folder / 'tokenizer'}"]
        command += [f"out={tmp_path / 'out'}", bpe.ADAPTIVE, "seq_len=64", "workers=1"]
        command += ["held_out=0", "filters.alphanumeric=null", *overrides]
        environment = os.environ | variables
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    yield run
    server.shutdown()


def test_a_refusal_of_the_hub_is_one_sentence(run_on_hub: Run) -> None:
    result = run_on_hub("someone/gated")
    assert result.returncode == 2
    sentence = error(result.stderr)
    assert "data.path=someone/gated" in sentence and "asks for sign-in" in sentence


def test_a_dataset_is_streamed_at_a_pinned_commit(
    run_on_hub: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the hub does not send ends the run; a damaged file is a drop.

    Errors of Arrow's codecs are OSErrors, and were taken for errors of the hub.
    """
    whole = (Hub.root / "go" / FILE).read_bytes()
    (Hub.root / "c").mkdir()
    (Hub.root / "c" / "a.parquet").write_bytes(whole[:8] + bytes(60) + whole[68:])
    Hub.broken = "python/"
    result = run_on_hub(NAME, "max_unreadable=0.9")
    assert result.returncode == 2 and "python/train-00000-of-" in error(result.stderr)
    assert not (tmp_path / "out").exists()
    Hub.broken = "none"
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    result = run_on_hub(NAME, "max_unreadable=0.9")
    assert result.returncode == 0, result.stderr
    # Bug: `datasets` imported PyTorch in each worker that read parquet: 180 MB of memory.
    assert re.search(r"\| +datasets$", result.stderr, re.M)
    assert not re.search(r"\| +torch$", result.stderr, re.M)
    manifest = read_manifest(tmp_path / "out", "shards", "out")
    languages = manifest["train"]["languages"]
    documents = {name: sums["documents"] for name, sums in languages.items()}
    assert documents == {"go": 5, "python": 12}
    assert manifest["drops"] == {"unreadable file": 1}
    assert manifest["inputs"]["commit"] == COMMIT
    assert not list((tmp_path / "home").rglob("*.parquet"))  # the files are not stored


def test_a_configuration_and_split_of_the_card(run_on_hub: Run, tmp_path: Path) -> None:
    """The card of the pinned commit is used, and its test split is not read."""
    shutil.rmtree(Hub.root)
    Hub.root.mkdir()
    for name in ("sft/a", "sft/b", "sft/eval", "math/c"):
        path = Hub.root / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"content": f"name = '{name}' + 'abc'\n"}) + "\n")
    files = [
        {"split": "train", "path": ["sft/a.jsonl", "sft/b.jsonl"]},
        {"split": "test", "path": "sft/eval.jsonl"},
    ]
    configs = [
        {"config_name": "sft", "data_files": files},
        {"config_name": "math", "data_dir": "math"},
    ]
    card = f"---\n{json.dumps({'configs': configs})}\n---\n"
    (Hub.root / "README.md").write_text(card)
    result = run_on_hub(NAME, "data.kind=jsonl", "data.id=[]", "data.config=sft")
    assert result.returncode == 0, result.stderr
    (sequence,) = Shards(tmp_path / "out", "train")
    assert set(sequence.ids) == {"sft/a.jsonl:0", "sft/b.jsonl:0"}

"""custom_generate/ of a model directory decodes, in a process without this project, as `infer` does."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infer import DecodeConfig, generate, load
from tests.infer.conftest import model_dir
from train.export.sidecars import write_custom_generate

WORKER = Path(__file__).with_name("portable_worker.py")
PROMPTS = [[20, 30, 40, 51], [77, 78], [99] * 7]
NUCLEUS = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def portable(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with its decoder; its name is no Python identifier."""
    folder = tmp_path_factory.mktemp("models") / "7b.exported-model"
    shutil.copytree(model_dir, folder)
    write_custom_generate(folder)
    return folder


def in_a_process(
    model: Path | str,
    runs: list[dict[str, Any]],
    cache: Path,
    endpoint: str | None = None,
) -> dict[str, Any]:
    args = json.dumps({"model": str(model), "runs": runs})
    hub = {"HF_ENDPOINT": endpoint} if endpoint else {"HF_HUB_OFFLINE": "1"}
    environment = os.environ | {"HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", **hub}
    command = [sys.executable, "-I", str(WORKER)]
    done = subprocess.run(
        command, input=args, env=environment, cwd=cache, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_infer(
    model: Path, prompts: list[list[int]], decode: DecodeConfig, seed: int
) -> list[list[int]]:
    texts = [list[int]() for _ in prompts]
    loaded, seeds = load(model, "float32", "cpu"), range(seed, seed + len(prompts))
    for step in generate(loaded, prompts, decode, seeds=seeds):
        texts[step.sequence] += step.tokens
    return texts


def test_in_a_process_without_this_project(portable: Path, tmp_path: Path) -> None:
    """Greedy and sampled, one prompt and several, by argument and by loading; and the library's own greedy."""
    greedy, sampled = (
        {"max_new_tokens": 40, "do_sample": False},
        {"do_sample": True, "seed": 11, **NUCLEUS},
    )
    sampled |= {"max_new_tokens": 40}
    ways = {
        "library": {"by": "library", **greedy},
        "auto": {"by": "custom_generate", **greedy},
        "root": {"by": "custom_generate", "probes": "root", "k": 2, **greedy},
        "loaded": {"by": "loaded", "probes": "all", **greedy},
        "sampled": {"by": "custom_generate", "probes": 2, "k": 4, **sampled},
        "sampled, loaded": {"by": "loaded", "probes": "root", **sampled},
    }
    result = in_a_process(
        portable,
        [{"prompts": PROMPTS[:1], "ways": ways}, {"prompts": PROMPTS, "ways": ways}],
        tmp_path,
    )
    assert result["ours"] == []
    for run, prompts in zip(result["runs"], (PROMPTS[:1], PROMPTS)):
        plain = DecodeConfig("plain", max_new_tokens=40)
        greedy_texts = by_infer(portable, prompts, plain, 11)
        sampled_texts = by_infer(
            portable, prompts, DecodeConfig("plain", max_new_tokens=40, **NUCLEUS), 11
        )
        for name, rows in run.items():
            expected = sampled_texts if "sampled" in name else greedy_texts
            assert [
                row[: len(text)] for row, text in zip(rows, expected)
            ] == expected, name


NAME = "someone/a-model"


class Hub(BaseHTTPRequestHandler):
    root: Path
    requested: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, prefix = self.path.partition("?")[0], f"/{NAME}/resolve/"
        file = self.root / path.removeprefix(prefix).partition("/")[2]
        exists = path.startswith(prefix) and file.is_file()
        body = file.read_bytes() if exists else b""
        self.send_response(200 if exists else 404)
        headers = {"X-Error-Code": "EntryNotFound"}
        if exists:
            headers = {
                "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
                "X-Repo-Commit": "0a" * 20,
            }
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.requested.append(file.name)
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def hub(portable: Path) -> Iterator[str]:
    Hub.root, Hub.requested = portable, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_from_a_hub(portable: Path, hub: str, tmp_path: Path) -> None:
    """Every file is downloaded by its name, as one imports the other."""
    greedy = {"max_new_tokens": 20, "do_sample": False}
    ways = {by: {"by": by, **greedy} for by in ("library", "custom_generate", "loaded")}
    result = in_a_process(NAME, [{"prompts": PROMPTS[:1], "ways": ways}], tmp_path, hub)
    goal = by_infer(portable, PROMPTS[:1], DecodeConfig("plain", max_new_tokens=20), 0)
    assert list(result["runs"][0].values()) == [goal] * 3
    assert {path.name for path in (portable / "custom_generate").glob("*.py")} <= set(
        Hub.requested
    )

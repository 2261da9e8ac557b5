"""Serve a model directory with `transformers serve`, and query it with the OpenAI client."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import openai

START_SECONDS = 300  # a busy machine needs this long, a quiet one 10 s


@contextmanager
def served(
    model: Path, folder: Path, *options: str, script: Path | None = None
) -> Iterator[openai.OpenAI]:
    """Serve on a free port within the block; log and caches are in `folder`.

    `script` is started in place of `transformers serve`, with the same arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    programs = Path(sys.executable).parent
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    program = ["bash", str(script)] if script else ["transformers", "serve"]
    host = ["--host", "127.0.0.1", "--port", str(port)]
    command = [*program, str(model), *host, *options]
    log = folder / "serve.log"
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        client = openai.DefaultHttpxClient(trust_env=False)  # use no proxy
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            http_client=client,
            max_retries=0,
        ) as api:
            yield api
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener, end = build_opener(ProxyHandler({})), time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            opener.open(url, timeout=5).close()
            return
        except URLError:
            time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not start: {log.read_text()}")


def stream(api: openai.OpenAI, model: Path, prompt: str, **arguments: Any) -> str:
    """Return the text of a streamed completion."""
    chunks = api.completions.create(
        model=str(model), prompt=prompt, stream=True, **arguments
    )
    return "".join(chunk.choices[0].text for chunk in chunks)

"""infer.regenerate endpoint=URL: a server that answers, one that fails at random, and a kill."""

import json
import os
import random
import shutil
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from conf.errors import UserError
from conf.runs.stage import read_manifest
from conf.settings.compose import settings
from infer import endpoint
from infer import regenerate as stage
from infer.bench.harness import Records
from infer.regenerate import KIND, answer_rows
from infer.regenerate_config import RegenerateConfig
from tests import warm
from tests.conftest import write_rows

PROMPTS = 200
KILLED_AFTER = 60  # answers
TURNS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
Reply = tuple[int, dict[str, Any]]


def answered(body: dict[str, Any]) -> Reply:
    """Return an answer that is a function of the request."""
    text = f"Answer {sum(map(ord, str(body['messages'])))} to {len(body)} settings."
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


class Stub(ThreadingHTTPServer):
    """An OpenAI server on a free port; a share `failing` of its responses is broken."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, reply: Callable[[dict[str, Any]], Reply], failing: float):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.failing = failing
        self.chance = random.Random(0)
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client of a killed run is gone."""


class Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send(404, b"not found")
            return
        self.server.bodies.append(body)
        fails = self.server.chance.random() < self.server.failing
        status, value = self.server.reply(body)
        content = json.dumps(value).encode()
        if not fails:
            self.send(status, content)
            return
        match self.server.chance.choice(("closed", "half", "cut", 429, 500, 503)):
            case "closed":
                self.close_connection = True
            case "half":  # a complete response with half of the JSON
                self.send(200, content[: len(content) // 2])
            case "cut":  # half a response
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            case code:
                self.send(int(code), b'{"error": {"message": "overloaded"}}')

    def do_GET(self) -> None:
        self.send(200, b'{"data": [{"id": "tiny"}, {"id": "large"}]}')

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(
    reply: Callable[[dict[str, Any]], Reply] = answered, failing: float = 0
) -> Iterator[Stub]:
    with Stub(reply, failing) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield stub
        stub.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between attempts, and use no proxy for this machine."""
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"def f{n}(x):"} for n in range(PROMPTS)]
    return write_rows(tmp_path / "prompts.jsonl", rows)


def config(url: str, prompts: Path, out: str, *overrides: str) -> RegenerateConfig:
    given = [f"endpoint={url}", f"prompts=[{prompts}]", f"out={prompts.parent / out}"]
    given += ["model=tiny", "batch=16", *overrides]
    return settings("regenerate", RegenerateConfig, given)


def text(config: RegenerateConfig) -> str:
    paths = sorted(Path(config.out).glob("*.jsonl"))
    return "".join(path.read_text("utf-8") for path in paths)


def rows(config: RegenerateConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(config).splitlines()]


def _killed(config: RegenerateConfig) -> None:
    """Run infer.regenerate and kill it after KILLED_AFTER saved answers."""
    endpoint.PAUSE = 0.001
    save = Records.save
    saved = []

    def kill(self: Records, name: str, value: Any) -> None:
        if len(saved) == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, name, value)
        saved.append(name)

    Records.save = kill  # type: ignore[method-assign]
    stage.main(config)


def test_a_failing_server_and_a_kill_lose_no_answer(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of 200 prompts is byte-identical to a run with a server that never fails."""
    with serving() as stub:
        steady = config(stub.url, prompts, "steady", "temperature=0.7")
        stage.main(steady)
        seeds = {body["seed"] for body in stub.bodies[1:]}
    assert len(rows(steady)) == PROMPTS == len(seeds)
    with serving(failing=0.3) as stub:
        broken = config(stub.url, prompts, "broken", "temperature=0.7")
        assert warm.call_ranks(_killed, broken) == -signal.SIGKILL
        assert not Path(broken.out).exists()
    with serving(failing=0.3) as stub:  # another address
        again = config(stub.url, prompts, "broken", "temperature=0.7", "batch=7")
        stage.main(again)
        distinct = {str(body["messages"]) for body in stub.bodies[1:]}
        assert PROMPTS - KILLED_AFTER <= len(distinct) <= PROMPTS - KILLED_AFTER + 1
    assert text(again) == text(steady)
    manifest = read_manifest(again.out, KIND, "out")
    assert manifest["documents"] == PROMPTS and manifest["finishes"] == {"stop": 200}
    assert sorted(os.listdir(again.out)) == ["manifest.json", "own-00000.jsonl"]
    stage.main(again)
    assert "is finished: nothing to do" in capsys.readouterr().out


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def refusing(status: int, words: str) -> Callable[[dict[str, Any]], Reply]:
    return lambda body: (status, {"error": {"message": words}})


def test_what_keeps_all_prompts_from_an_answer_is_one_sentence(prompts: Path) -> None:
    down = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(UserError, match=r"did not answer: .*\. Start the server, or"):
        stage.main(config(down, prompts, "out"))
    cases = [
        (404, "The model `tiny` does not exist.", r"model=tiny: HTTP 404: The model"),
        (400, "Server is pinned to 'm'", r"the server spells it \(tiny, large\)"),
        (422, "top_p must be below 1", "top_p must be below 1. Change what the server"),
        (401, "Unauthorized", r"HTTP 401: Unauthorized\. Set OPENAI_API_KEY"),
        (500, "out of memory", r"did not answer: HTTP 500: out of memory\. Read"),
    ]
    for status, words, message in cases:
        with (
            serving(refusing(status, words)) as stub,
            pytest.raises(UserError, match=message),
        ):
            stage.main(config(stub.url, prompts, "out"))
    with (
        serving() as stub,
        pytest.raises(UserError, match="HTTP 404: not found. Give the server's .* /v1"),
    ):
        stage.main(config(stub.url.removesuffix("/v1"), prompts, "out"))


def test_seeds_are_refused_though_the_first_request_has_none(prompts: Path) -> None:
    """Bug: every sampled prompt was left out as refused if the first request was greedy."""

    def reply(body: dict[str, Any]) -> Reply:
        return refusing(400, "no seed")(body) if "seed" in body else answered(body)

    with serving(reply) as stub:
        given = ["temperature=1", "sampled=0.5", "documents=20"]
        greedy = [
            config(stub.url, prompts, f"out{seed}", *given, f"seed={seed}")
            for seed in range(4)
        ]
        for run in greedy:
            stage.main(run)
            assert len(rows(run)) == 20


def test_proxies_and_hosts_that_do_not_exist(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each ended in a traceback."""
    with pytest.raises(UserError, match="did not answer: .*correct the address"):
        stage.main(config("http://ex☃.test/v1", prompts, "out"))
    monkeypatch.setenv("ALL_PROXY", "foo://x")
    with pytest.raises(UserError, match="proxies in HTTP_PROXY, .*Unset or correct"):
        stage.main(config("http://localhost:1", prompts, "out"))


def test_a_key_that_no_header_can_have(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: it ended in a traceback."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-é")
    with pytest.raises(UserError, match="OPENAI_API_KEY must have printable ASCII"):
        stage.main(config("http://localhost:1", prompts, "out"))


def test_a_server_without_seeds_and_prompts_without_answers(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        content = body["messages"][0]["content"]
        if "seed" in body:
            return refusing(400, "per-request seeds are not supported")(body)
        if content == "def f0(x):":
            return refusing(400, "the prompt exceeds the context")(body)
        status, value = answered(body)
        choice = value["choices"][0]
        if content == "def f1(x):":
            return refusing(500, "this prompt breaks the server")(body)
        if content == "def f2(x):":
            choice["message"]["content"] = "return " * 50
            choice["finish_reason"] = "length"
        if content == "def f3(x):":
            choice["message"]["content"] = None
        return status, value

    with serving(reply) as stub:
        run = config(stub.url, prompts, "out", "temperature=1", "max_new_tokens=50")
        stage.main(run)
        assert all("seed" not in body for body in stub.bodies[1:])
    answers = {row["id"].rpartition(":")[2]: row for row in rows(run)}
    assert sorted(map(int, answers)) == [2, *range(4, PROMPTS)]
    # A word includes the space before it, so the loop begins with the second word.
    assert answers["2"]["messages"][-1]["content"] == "return return"
    assert not answers["2"]["ends"] and answers["4"]["ends"]
    stderr = capsys.readouterr().err
    assert "takes no seed" in stderr
    assert "prompts.jsonl:0 is left out: HTTP 400: the prompt exceeds" in stderr
    assert "prompts.jsonl:1 is left out: HTTP 500: this prompt breaks" in stderr
    assert "no answer to 3 of 200 prompts" in stderr
    assert "max_new_tokens=50 cut off 1 of 200 answers. Raise it" in stderr


def test_an_answer_keeps_its_calls_and_its_spaces() -> None:
    prompt = stage.ChatPrompt("p", ({"role": "user", "content": "x"},))
    given = "def f(n):\n    return  n\n"
    (row,) = answer_rows(prompt, endpoint.Answer({"content": given}, "stop"))
    assert row["messages"][-1]["content"] == given and row["ends"]
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    message = {"content": None, "tool_calls": calls}
    (row,) = answer_rows(prompt, endpoint.Answer(message, "tool_calls"))
    assert row["messages"][-1]["tool_calls"] == calls


def test_an_aborted_answer_has_no_end_and_parts_are_joined(prompts: Path) -> None:
    """Bug: an answer that the server aborted ended; content in parts was a traceback."""

    def reply(body: dict[str, Any]) -> Reply:
        status, value = answered(body)
        choice = value["choices"][0]
        if body["messages"][0]["content"] == "def f0(x):":
            choice["finish_reason"] = "abort"
        parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "A "}]
        choice["message"]["content"] = [*parts, {"type": "text", "text": "heap."}]
        return status, value

    with serving(reply) as stub:
        run = config(stub.url, prompts, "out")
        stage.main(run)
    answers = {row["id"].rpartition(":")[2]: row for row in rows(run)}
    assert answers["1"]["messages"][-1]["content"] == "A heap."
    assert answers["1"]["ends"] and not answers["0"]["ends"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["endpoint=localhost:8000"], "endpoint must be an address such as http://"),
        (["own_prompts=3"], "endpoint answers prompts, got .* own_prompts=3"),
        (["timeout=0"], "timeout must be above 0, got 0"),
        (["prompts=[a,b,a]"], "prompts must not repeat a source, got a, b, a"),
    ],
)
def test_mistakes(prompts: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config("http://h/v1", prompts, "out", *overrides)


@pytest.mark.skipif(
    not is_serve_available(), reason="transformers[serving] is not installed"
)
def test_200_prompts_through_transformers_serve(base_dir: Path, prompts: Path) -> None:
    """A proxy that breaks three of ten responses changes no answer."""
    from tests.served_openai import served

    folder = prompts.parent / "chat"
    shutil.copytree(base_dir, folder)
    (folder / "chat_template.jinja").write_text(TURNS)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    turn = threading.Lock()  # the server decodes one request at a time

    with served(folder, prompts.parent / "server", "--dtype", "float32") as api:
        url = str(api.base_url).rstrip("/")

        def forward(body: dict[str, Any]) -> Reply:
            request = urllib.request.Request(
                f"{url}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with turn, opener.open(request) as response:
                return response.status, json.load(response)

        overrides = [f"model={folder}", "max_new_tokens=6"]
        direct = config(url, prompts, "direct", *overrides)
        stage.main(direct)
        with serving(forward, failing=0.3) as stub:
            broken = config(stub.url, prompts, "broken", *overrides)
            stage.main(broken)
        with pytest.raises(UserError, match="refused .*model=other: HTTP 400: Server"):
            stage.main(config(url, prompts, "other", "model=other"))
    assert len(rows(direct)) == PROMPTS and text(direct) == text(broken)

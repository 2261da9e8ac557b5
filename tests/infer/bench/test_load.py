"""Test part=load: vLLM's figures from chosen times, batches in this process, a local server."""

import csv
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.runs.files import read_json
from conf.settings.compose import settings
from infer.api import Model
from infer.bench.acceptance import acceptance_csv
from infer.bench.config import BenchConfig, GsdConfig, LoadConfig
from infer.bench.load import batches, decoders_of, figures, send_all, text_of
from infer.bench.prompts import Prompt
from infer.bench.report import header
from infer.bench.run import bench
from tests.conftest import write_rows

LAG = 0.03  # seconds between two chunks of the stub server


class Stub(BaseHTTPRequestHandler):
    """A server that streams three chunks of two tokens each, as OpenAI's completions do."""

    seen: list[dict[str, Any]] = []
    failures = 0  # the number of first requests that are answered by 503
    lag = LAG
    pieces = 3
    at_once = most_at_once = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "stub"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        cls = type(self)
        size = int(self.headers["Content-Length"])
        request = json.loads(self.rfile.read(size))
        with cls.lock:
            cls.seen.append(request)
            failed = cls.failures > 0
            cls.failures -= failed
            cls.at_once += 1
            cls.most_at_once = max(cls.most_at_once, cls.at_once)
        self.send_response(503 if failed else 200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if not failed:
            for _ in range(cls.pieces):
                time.sleep(cls.lag)
                self.event({"choices": [{"index": 0, "text": "a b"}]})
            end = {"index": 0, "text": "", "finish_reason": "stop"}
            self.event({"choices": [end]})
            usage = {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        with cls.lock:
            cls.at_once -= 1

    def event(self, chunk: dict[str, Any]) -> None:
        try:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Stub]]]:
    stub = type("FreshStub", (Stub,), {"seen": [], "lock": threading.Lock()})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), stub)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", stub
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"id": n, "prompt": f"def f{n}(x):\n"} for n in range(1, 4)]
    return write_rows(tmp_path_factory.mktemp("load") / "texts.jsonl", rows)


def configured(model: Path, prompts: Path, out: Path, *overrides: str) -> BenchConfig:
    arguments = [f"model={model}", f"out={out}", f"prompts=[{prompts}]"]
    arguments += ["part=load", "dtype=float32", "count=3", "tracker.mode=disabled"]
    return settings("bench", BenchConfig, [*arguments, *overrides])


def test_figures_of_chosen_times_are_vllms() -> None:
    """Two tokens of a step arrive together: one ITL, but two tokens of TPOT."""
    requests = [
        {"input_tokens": 5, "output_tokens": 5, "arrivals": [1.0, 1.2, 1.8]},
        {"input_tokens": 7, "output_tokens": 1, "arrivals": [3.0]},
    ]
    row = figures(requests, 4.0)
    assert row["request_throughput"] == 0.5 and row["output_throughput"] == 1.5
    assert row["total_token_throughput"] == 18 / 4
    assert row["median_ttft_ms"] == pytest.approx(2000)
    assert row["p99_ttft_ms"] == pytest.approx(1000 + 0.99 * 2000)
    assert row["median_tpot_ms"] == pytest.approx(800 / 4)
    assert row["median_itl_ms"] == pytest.approx(400)
    assert row["p99_itl_ms"] == pytest.approx(200 + 0.99 * 400)
    assert row["median_e2el_ms"] == pytest.approx(2400)


def test_the_first_prompts_fill_the_last_batch() -> None:
    names = [Prompt(name, (1,)) for name in "abc"]
    chunks = [[p.id for p in chunk] for chunk in batches(names, 2)]
    assert chunks == [["a", "b"], ["c", "a"]]


def test_batches_in_this_process(
    model_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["load.concurrency=[1,2]", "load.max_new_tokens=6"]
    config = configured(model_dir, prompts, tmp_path / "out", *overrides)
    bench(config)
    rows = read_json(tmp_path / "out" / "report.json")["load"]["rows"]
    places = [(row["concurrency"], row["decoder"], row["completed"]) for row in rows]
    assert places == [
        (1, "plain", 3),
        (1, "hybrid", 3),
        (2, "plain", 4),
        (2, "hybrid", 4),
    ]
    for row in rows:
        assert row["same"] == row["compared"] == row["completed"]
        assert row["request_throughput"] * row["duration"] == pytest.approx(
            row["completed"]
        )
    assert "TTFT" in capsys.readouterr().out
    assert "TPOT" in (tmp_path / "out" / "index.html").read_text()
    bench(config)
    assert "is finished: nothing to do" in capsys.readouterr().out


def test_prompts_of_one_name_are_compared_with_their_own_texts(
    model_dir: Path, tmp_path: Path
) -> None:
    """Regression: a text was compared with another prompt's, so the command called it lossy."""
    texts = ("def add(x):\n", "class A:\n    def", "import os\n")
    rows = ({"name": "mbpp", "prompt": text} for text in texts)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    overrides = ["load.concurrency=[1]", "load.max_new_tokens=6"]
    bench(configured(model_dir, file, tmp_path / "out", *overrides))
    rows = read_json(tmp_path / "out" / "report.json")["load"]["rows"]
    assert [(row["same"], row["compared"]) for row in rows] == [(3, 3), (3, 3)]


def test_an_endpoint_is_asked_by_concurrent_clients(
    model_dir: Path, prompts: Path, tmp_path: Path, server: tuple[str, type[Stub]]
) -> None:
    """A busy server's first 503 is retried."""
    url, stub = server
    stub.failures = 1
    overrides = [f"load.endpoint={url}", "load.concurrency=[2]"]
    bench(configured(model_dir, prompts, tmp_path / "out", *overrides))
    (row,) = read_json(tmp_path / "out" / "report.json")["load"]["rows"]
    assert row["decoder"] == "endpoint" and row["completed"] == 4
    assert row["total_output_tokens"] == 4 * 6 and row["compared"] == 0
    assert row["median_ttft_ms"] >= 0.9e3 * LAG and row["median_itl_ms"] > 0
    assert stub.most_at_once == 2
    assert {request["prompt"] for request in stub.seen} == {
        f"def f{n}(x):\n" for n in range(1, 4)
    }
    assert all(r["stream"] and r["model"] == "stub" for r in stub.seen)


FUNCTION = {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        ({"role": "assistant", "content": ""}, ""),
        ({"content": "4"}, "4"),
        ({"reasoning_content": "2 + 2", "reasoning": "2 + 2"}, "2 + 2"),
        ({"reasoning": "2 + 2"}, "2 + 2"),
        ({"tool_calls": [{"index": 0, "function": FUNCTION}]}, 'add{"a": 2}'),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "}"),
        ({"tool_calls": [{"index": 0}]}, ""),
        ({"function_call": FUNCTION}, 'add{"a": 2}'),
    ],
)
def test_reasoning_and_calls_of_a_chunk_are_output(
    delta: dict[str, Any], text: str
) -> None:
    """Regression: an answer of calls or of vLLM's reasoning was "a text without tokens"."""
    types = pytest.importorskip("openai.types.chat")
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    shared = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    chunk = types.ChatCompletionChunk.model_validate({**shared, "choices": [choice]})
    assert text_of(chunk, chat=True) == text


def test_a_text_that_ends_at_once_is_an_answer(
    model_dir: Path, prompts: Path, tmp_path: Path, server: tuple[str, type[Stub]]
) -> None:
    """Bug: it ended the measurement, as a server that does not answer.

    Bug: the report named this machine, its dtype and load.decoders, which a server does not use.
    """
    url, stub = server
    stub.pieces = 0
    overrides = [f"load.endpoint={url}", "load.concurrency=[1]"]
    bench(configured(model_dir, prompts, tmp_path / "out", *overrides))
    report = read_json(tmp_path / "out" / "report.json")["load"]
    assert report["rows"][0]["completed"] == 3
    line = header(report)
    assert line.startswith(f"server {url}, prompts by the tokenizer of ")
    assert "float32" not in line and "decoders" not in line


def test_a_draft_model_has_the_settings_of_gsd(model: Model) -> None:
    """Bug: they had no effect with part=load, and a change of them gave the old result."""
    drafting = replace(model, draft=object())
    load = LoadConfig(decoders=["gsd"])
    (decode,) = decoders_of(load, GsdConfig(nodes=7), drafting).values()
    assert decode.nodes == 7
    given = ["draft=self:1", "load.decoders=[gsd]", "part=load"]
    config = configured(Path("m"), Path("p"), Path("o"), *given)
    assert config.groups("load") == ("load", "gsd")


def test_no_request_is_sent_after_one_that_failed() -> None:
    """Bug: with a slow first request the second client sent all further ones, though each failed."""
    sent = []

    def serve(prompt: Prompt) -> dict[str, Any]:
        sent.append(prompt.id)
        if prompt.id == "0":
            time.sleep(0.5)
            return {}
        time.sleep(0.03)
        raise UserError("broken")

    prompts = [Prompt(str(n), (1,)) for n in range(50)]
    with pytest.raises(UserError, match="broken"):
        send_all(serve, prompts, 2)
    assert len(sent) < 15


def test_an_endpoint_that_fails_is_one_sentence(
    model_dir: Path, prompts: Path, tmp_path: Path, server: tuple[str, type[Stub]]
) -> None:
    url, stub = server
    stub.lag = 0.4
    slow = [f"load.endpoint={url}", "load.timeout=0.5"]
    with pytest.raises(UserError, match=r"load.endpoint=.* within load.timeout=0.5 s"):
        bench(configured(model_dir, prompts, tmp_path / "slow", *slow))
    absent = ["load.endpoint=http://127.0.0.1:9/v1", "load.model=m"]
    with pytest.raises(UserError, match="load.endpoint=.*:9/v1 must answer .* got Con"):
        bench(configured(model_dir, prompts, tmp_path / "absent", *absent))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("load.endpoint=localhost:8000", "load.endpoint must be a URL such as"),
        ("load.concurrency=[]", "load.concurrency must not be empty"),
        ("load.concurrency=[2,2]", "load.concurrency must not repeat a value"),
        ("load.concurrency=[0]", "load.concurrency must be 1 to 1024, got 0"),
        ("load.decoders=[vllm]", "load.decoders must be plain, hybrid"),
    ],
)
def test_mistakes_are_one_sentence(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        configured(tmp_path, tmp_path, tmp_path, override)


def test_acceptance_csv_has_the_columns_of_speculators() -> None:
    row = {
        "prompt_set": "mt_bench",
        "decoder": "hybrid",
        "temperature": 0.0,
        "verifications": 4,
        "drafted": 8,
        "accepted": 5,
        "mean_acceptance_length": 2.25,
        "survival": [0.75, 0.5],
    }
    plain = {**row, "decoder": "plain", "verifications": 0, "survival": []}
    (line,) = csv.DictReader(acceptance_csv([plain, row]).splitlines())
    assert line == {
        "subset": "mt_bench",
        "num_drafts": "4",
        "num_draft_tokens": "8",
        "num_accepted_tokens": "5",
        "acceptance_length": "2.25",
        "acceptance_at_pos_0": "0.75",
        "acceptance_at_pos_1": "0.5",
        "decoder": "hybrid",
        "temperature": "0.0",
    }

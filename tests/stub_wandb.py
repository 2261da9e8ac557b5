"""A stand-in for the server of Weights & Biases on 127.0.0.1, which accepts runs, refuses them, or is slow."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {
    "id": "project",
    "name": "tests",
    "entity": {"id": "entity", "name": "someone"},
}


@dataclass
class StubServer:
    """The server's address, what it answers, and what it received."""

    url: str = ""
    status: int = 200  # of every answer
    delay: float = 0.0  # seconds before every answer
    runs: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # the variables of UpsertBucket by run
    history: dict[str, list[dict[str, Any]]] = field(
        default_factory=dict
    )  # rows by run

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL answer."""
        if "upsertBucket" in query:
            name = variables["name"]
            known = {k: v for k, v in variables.items() if v is not None}
            self.runs[name] = self.runs.get(name, {}) | known
            bucket = {"id": name, "name": name, "project": PROJECT}
            bucket["displayName"] = variables.get("displayName") or name
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "RunResumeStatus" in query:
            return {"model": PROJECT | {"bucket": None}}
        if "createRunFiles" in query:
            upload = f"{self.url}/upload/"
            names = variables["files"]
            files = [{"name": name, "uploadUrl": upload + name} for name in names]
            created = {"runID": variables["run"], "uploadHeaders": [], "files": files}
            return {"createRunFiles": created}
        if "createArtifact(" in query:  # as if the server had its files already
            sequence = {"latestArtifact": {"id": "1"}}
            artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": artifact}}
        if "viewer" in query:
            user = {"id": "1", "entity": "someone", "username": "someone"}
            return {"viewer": user | {"flags": "{}"}}
        if "serverInfo" in query:
            return {"serverInfo": {"features": []}}
        return {"project": None}

    def stream(self, run: str, files: dict[str, Any]) -> None:
        """Keep the rows of a request to the file stream."""
        for line in files.get("wandb-history.jsonl", {}).get("content", ()):
            self.history.setdefault(run, []).append(json.loads(line))


@contextmanager
def stub_server(*, status: int = 200, delay: float = 0.0) -> Iterator[StubServer]:
    """Serve until the block ends."""
    stub = StubServer(status=status, delay=delay)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(stub.delay)
            content: dict[str, Any] = {}
            if stub.status != 200:
                content = {"error": "refused"}
            elif self.path == "/graphql":
                request = json.loads(body)
                content = {
                    "data": stub.answer(
                        request["query"], request.get("variables") or {}
                    )
                }
            elif self.path.endswith("/file_stream"):
                stub.stream(
                    self.path.split("/")[-2], json.loads(body).get("files") or {}
                )
            self._reply(content)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply({})

        do_GET = do_POST

        def _reply(self, content: dict[str, Any]) -> None:
            answer = json.dumps(content).encode()
            self.send_response(stub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # W&B's process was killed, or gave up
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()

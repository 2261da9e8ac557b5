"""A server on this machine that answers the hub's client as the hub does."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The few answers that signing in, making a repository and a commit need."""

    role = "write"
    repos: dict[str, bool]  # whether private, by name
    files: dict[str, bytes]  # of the last commit, and of large files by their SHA-256
    commits = 0
    refused: tuple[str, int] = ("", 0)  # requests with this in their path get this status

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        told = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        for name, text in told.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def asked(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def is_refused(self) -> bool:
        part, status = self.refused
        known = self.headers.get("Authorization") == "Bearer hf_good" or self.path.startswith("/put/")
        if part and part in self.path:
            self.answer({"error": "storage quota exceeded"}, status)
        elif not known and self.path != "/api/agent-harnesses":
            self.answer({"error": "Invalid username or password."}, 401)
        else:
            return False
        return True

    def do_GET(self) -> None:
        if self.is_refused():
            return
        name = self.path.removeprefix("/api/models/")
        tree = re.match(r"(.*)/tree/main\?", name)
        if self.path == "/api/whoami-v2":
            self.answer(
                {"name": "someone", "orgs": [{"name": "Org"}], "auth": {"accessToken": {"role": self.role}}}
            )
        elif tree and tree[1] in self.repos:
            names = [name for name in self.files if not re.fullmatch("[0-9a-f]{64}", name)]
            self.answer([{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in names])
        elif name in self.repos:
            self.answer({"id": name, "private": self.repos[name], "sha": COMMIT, "siblings": [], "tags": []})
        else:
            self.answer({}, 404, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        body = self.asked()
        if self.is_refused():
            return
        address = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            value = json.loads(body)
            name = f"{value['organization']}/{value['name']}"
            known = name in self.repos
            self.repos.setdefault(name, value["visibility"] == "private")
            self.answer({"url": f"{address}/{name}", "name": name}, 409 if known else 200)
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            kinds = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            files = [{"path": p, "uploadMode": kinds[p], "shouldIgnore": False} for p in paths]
            self.answer({"files": files})
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{address}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            Hub.commits += 1
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.files[value["oid"]]
                elif line["key"] == "deletedFile":
                    del self.files[value["path"]]
            name = "/".join(self.path.split("/")[3:5])
            self.answer({"commitUrl": f"{address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:  # of the card's front matter, which is checked on its own
            self.answer({"errors": [], "warnings": []})

    def do_PUT(self) -> None:
        body = self.asked()
        self.files[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

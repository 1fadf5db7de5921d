"""A local stand-in of the Hugging Face Hub: tokens, repositories, and commits with large files apart.

It answers the requests that huggingface_hub makes for an upload, and keeps what it is sent.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WRITES, READS = "hf_writes0123456789", "hf_reads0123456789"
LARGE = ".safetensors"


class Hub(ThreadingHTTPServer):
    """repositories: files by repository. private: those that were made so. refused: paths that are answered with a
    status and a message, by their ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.refused: dict[str, tuple[int, str]] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.commits = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.begin()
        name = path.removeprefix("/api/models/").removesuffix("/auth-check/write")
        if not path.endswith("/auth-check/write") or name not in self.server.repositories:
            return self.answer(404, {"error": "Not found"})
        if self.token != WRITES:
            return self.answer(403, {"error": f"You have no write access, Bearer {self.token}"})
        self.answer(200, {})

    def do_POST(self) -> None:
        path, body = self.begin(), self.rfile.read(int(self.headers["Content-Length"]))
        for end, (status, message) in self.server.refused.items():
            if path.endswith(end):
                return self.answer(status, {"error": message})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.token != WRITES:
            return self.answer(403, {"error": "Forbidden"})
        name, _, what = path.removeprefix("/api/models/").removeprefix("/").partition(".git/")
        if what == "info/lfs/objects/batch":
            return self.answer(200, self.places_of_large(json.loads(body)))
        organisation, name, what, _ = name.split("/")
        files = self.server.repositories[f"{organisation}/{name}"]
        if what == "preupload":
            named = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in named}
            entries = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.answer(200, {"files": entries})
        assert what == "commit", path
        self.commit(files, [json.loads(line) for line in body.splitlines()])
        url = f"{self.server.url}/{organisation}/{name}/commit/0"
        self.answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        path, body = self.begin(), self.rfile.read(int(self.headers["Content-Length"]))
        assert "Authorization" not in self.headers  # storage is another's
        assert hashlib.sha256(body).hexdigest() == path.removeprefix("/storage/")
        self.server.large[path.removeprefix("/storage/")] = body
        self.answer(200, {})

    def begin(self) -> str:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return path

    def create(self, body: dict) -> None:
        name = f"{body['organization'] or 'me'}/{body['name']}"
        there = name in self.server.repositories
        if not there and self.token != WRITES:
            return self.answer(403, {"error": "You don't have the rights to create a model"})
        self.server.repositories.setdefault(name, {})
        if body.get("visibility") == "private" or body.get("private"):
            self.server.private.add(name)
        answer = {"url": f"{self.server.url}/{name}", "name": name, "id": name}
        self.answer(409 if there else 200, answer | ({"error": "You already created this model repo"} if there else {}))

    def places_of_large(self, body: dict) -> dict:
        return {
            "transfer": "basic",
            "objects": [
                asked | {"actions": {"upload": {"href": f"{self.server.url}/storage/{asked['oid']}"}}}
                for asked in body["objects"]
            ],
        }

    def commit(self, files: dict[str, bytes], lines: list[dict]) -> None:
        self.server.commits += 1
        for line in lines[1:]:
            value = line["value"]
            large = line["key"] == "lfsFile"
            files[value["path"]] = self.server.large[value["oid"]] if large else base64.b64decode(value["content"])

    def answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if "error" in content:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

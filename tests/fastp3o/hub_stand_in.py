"""A local stand-in of the Hugging Face Hub: it answers the requests that huggingface_hub makes for an upload, and keeps
what it is sent.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.fastp3o.local_server import running

WRITES, READS = "hf_writes0123456789", "hf_reads0123456789"


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
        self.requests: list[str] = []
        self.commits = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        path, sent = self.path.partition("?")[0], self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(path)
        status, content = self.answer(path, [json.loads(line) for line in sent.splitlines()])
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Error-Message", content.get("error", ""))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.do_POST()

    def answer(self, path: str, lines: list[dict]) -> tuple[int, dict]:
        """lines: of the body, which has several in a commit."""
        hub, token = self.server, self.headers.get("Authorization", "").removeprefix("Bearer ")
        for end, (status, message) in hub.refused.items():
            if path.endswith(end):
                return status, {"error": message}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            name = f"{lines[0]['organization'] or 'me'}/{lines[0]['name']}"
            if token == WRITES:
                hub.repositories.setdefault(name, {})
            if lines[0].get("visibility") == "private" or lines[0].get("private"):
                hub.private.add(name)
            known = name in hub.repositories
            return 200 if known else 403, {"url": f"{hub.url}/{name}", "name": name, "id": name}
        if token != WRITES:
            return 403, {"error": f"You have no write access, Bearer {token}"}
        owner, name, what = path.removeprefix("/api/models/").split("/")[:3]
        if what == "preupload":
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file["path"]} | plain for file in lines[0]["files"]]}
        if what == "commit":
            hub.commits += 1
            sent = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines[1:]}
            hub.repositories[f"{owner}/{name}"] |= sent
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/{owner}/{name}/commit/0"}

    def log_message(self, *_) -> None:
        pass


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    with running(server):
        yield server

"""A stand-in of the Hugging Face Hub: it answers what huggingface_hub asks for an upload, and keeps what it is sent."""

import base64
import json

from tests.fastp3o.local_server import LocalHandler, LocalServer

WRITES, READS = "hf_writes0123456789", "hf_reads0123456789"


class Hub(LocalServer):
    """repositories: files by repository. private: those made so. refused: statuses and messages, by ends of paths."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.refused: dict[str, tuple[int, str]] = {}
        self.commits = 0


class Handler(LocalHandler):
    server: Hub

    def respond(self, sent: bytes) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        status, content = self.answer_to(path, [json.loads(line) for line in sent.splitlines()])
        about = {"Content-Type": "application/json", "X-Error-Message": content.get("error", "")}
        self.answer(status, content, **about)

    def answer_to(self, path: str, lines: list[dict]) -> tuple[int, dict]:
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

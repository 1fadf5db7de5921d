"""Servers on this machine, and one that answers well, badly, slowly, or not at all."""

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

import anyio


class LocalServer(ThreadingHTTPServer):
    """Answers from a thread of its own while its block runs, through a handler that keeps
    `requests`.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.url, self.lock = f"http://127.0.0.1:{self.server_port}", threading.Lock()
        self.requests: list[Any] = []
        self.thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()

    def handle_error(self, request, client_address) -> None:
        """Clients that have gone are what some tests are about; what else fails is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Subclasses have `respond`, which takes the body of a request."""

    def do_POST(self) -> None:
        self.respond(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def do_GET(self) -> None:
        self.do_POST()

    def answer(self, status: int, content: object, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


class Reply(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012
    delay: float = 0.0  # seconds before it is sent
    drop: float = 0.0  # seconds before each byte of the body
    head_drop: float = 0.0  # seconds before each of a hundred headers
    lacks: int = 0  # bytes that are announced and not sent


def time_limit(reply: Reply) -> float:
    """Seconds for an attempt: few only if the reply is late, since a busy machine is slow to send
    any other.
    """
    return 0.4 if reply.delay or reply.drop or reply.head_drop else 5.0


class Server(LocalServer):
    """Answers requests to its path with `reply(question(body, number))`: a question of a body and
    its number from 1.
    """

    def __init__(
        self, path: str, reply: Callable[[Any], Reply], question: Callable[[dict, int], Any]
    ):
        # httpx would load it with the first request, within that request's time limit
        anyio.run(anyio.sleep, 0)
        super().__init__(Handler)
        self.path, self.reply, self.question = path, reply, question
        self.url += path
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []


class Handler(LocalHandler):
    server: Server

    def respond(self, sent: bytes) -> None:
        body = None if self.command == "GET" else json.loads(sent)
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.monotonic())
            number = len(self.server.requests)
        reply = self.server.reply(self.server.question(body, number))
        if self.path != self.server.path:
            reply = Reply(404, b'{"detail": "no such path"}')
        time.sleep(reply.delay)
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(reply.body) + reply.lacks))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        for number in range(100 if reply.head_drop else 0):
            time.sleep(reply.head_drop)
            self.send_header(f"X-{number}", "slow")
            self.flush_headers()
        self.end_headers()
        for part in (
            [reply.body[i : i + 1] for i in range(len(reply.body))] if reply.drop else [reply.body]
        ):
            time.sleep(reply.drop)
            self.wfile.write(part)
            self.wfile.flush()


def always(**reply) -> Callable[[Any], Reply]:
    return lambda question: Reply(**reply)

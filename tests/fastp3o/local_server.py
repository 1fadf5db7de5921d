"""A local server that answers well, badly, slowly, or not at all."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import anyio


class Reply(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012
    delay: float = 0.0  # seconds before it is sent
    drop: float = 0.0  # seconds before each byte of the body
    head_drop: float = 0.0  # seconds before each of a hundred headers
    lacks: int = 0  # bytes that are announced and not sent


def time_limit(reply: Reply) -> float:
    """Seconds for an attempt: few only if the reply is late, since a busy machine is slow to send any other."""
    return 0.4 if reply.delay or reply.drop or reply.head_drop else 5.0


class Server(ThreadingHTTPServer):
    """Answers requests to its path with `reply(question(body, number))` and keeps them."""

    daemon_threads = True

    def __init__(self, path: str, reply: Callable[[Any], Reply], question: Callable[[dict, int], Any]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.path, self.reply, self.question = path, reply, question
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.path}"

    def handle_error(self, request, client_address) -> None:
        """Clients that have gone are what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
        for part in [reply.body[i : i + 1] for i in range(len(reply.body))] if reply.drop else [reply.body]:
            time.sleep(reply.drop)
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *_) -> None:
        pass


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """The server answers from a thread of its own until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(path: str, reply: Callable[[Any], Reply], question: Callable[[dict, int], Any]) -> Iterator[Server]:
    """question: makes of a request's body, and of its number from 1, what `reply` is called with."""
    anyio.run(anyio.sleep, 0)  # httpx would load it with the first request, within that request's time limit
    server = Server(path, reply, question)
    with running(server):
        yield server


def always(**reply) -> Callable[[Any], Reply]:
    return lambda question: Reply(**reply)

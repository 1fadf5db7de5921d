"""Single questions to an OpenAI-compatible chat-completions endpoint, with retries while it is busy or unreachable."""

import json
import os
import random
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

SHORTEST_SECRET = 8  # characters; what servers without keys take for one ("EMPTY", "x") may stand in answers
LONGEST_BODY = 2**24  # bytes; no answer to a question comes near it
EXCERPT = 300  # characters


class EndpointError(RuntimeError):
    """The endpoint refuses the request, or fails after all retries. The message names URL, status and answer."""


class StoppedError(Exception):
    """The caller no longer wants the answer."""


class Answer(NamedTuple):
    """text: empty where the model returned none. finished: False where a length limit cut the text off."""

    text: str
    finished: bool


class AttemptError(Exception):
    """An attempt that failed but may succeed when repeated. wait: seconds that the endpoint asks to wait."""

    def __init__(self, what: str, wait: float = 0.0):
        super().__init__(what)
        self.wait = wait


class ChatEndpoint:
    """One model behind an endpoint, with the time limits and retries of requests to it.

    Args:
        url: without /chat/completions, as for OpenAI's clients: http://localhost:8000/v1.
        model: its name at the endpoint.
        timeout: seconds that one attempt may take, from its connection to its last byte.
        retries: attempts after the first, where the endpoint is busy (408, 429), broken (5xx, no chat completion),
            too slow or unreachable. Any other status but 200 stops at once.
        backoff: seconds before the first retry, doubled for each further one, and up to half as much again at random.
        longest_wait: seconds; an endpoint whose Retry-After asks for more counts as unavailable.

    The key in the environment variable OPENAI_API_KEY, if set, is sent in the Authorization header and nowhere else: no
    redirect is followed, only https goes through a proxy of the environment, which cannot read it then, and where an
    answer repeats it, stars stand in its place.

    Raises ValueError on a URL or a key that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout: float = 120.0,
        retries: int = 6,
        backoff: float = 1.0,
        longest_wait: float = 120.0,
    ):
        self.url = check_url(url).rstrip("/") + "/chat/completions"
        self.model = model
        self.timeout, self.retries, self.backoff, self.longest_wait = timeout, retries, backoff, longest_wait
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            # http.client would complain too, but quote the key.
            raise ValueError("the environment variable OPENAI_API_KEY holds characters that no HTTP header can")

    def ask(self, question: str, stopped: threading.Event) -> Answer:
        """The model's answer at temperature 0.

        Raises EndpointError where the endpoint refuses or all attempts fail; StoppedError in place of a retry once
        `stopped` is set.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.attempt(question)
            except AttemptError as failure:
                if attempt > self.retries or failure.wait > self.longest_wait:
                    asked = f", and asks to wait {failure.wait:.0f} s" if failure.wait else ""
                    raise EndpointError(f"{self.url} {failure} (attempts: {attempt}{asked})") from failure
                wait = max(self.backoff * 2 ** (attempt - 1) * random.uniform(1, 1.5), failure.wait)
            if stopped.wait(wait):
                raise StoppedError

    def attempt(self, question: str) -> Answer:
        try:
            connection = connect(self.url, self.timeout)
            with cut_off_after(self.timeout, connection):
                connection.request("POST", urlsplit(self.url).path, *self.request(question))
                response = connection.getresponse()
                status, retry_after = response.status, response.headers.get("Retry-After")
                body = read(response)
        except (OSError, HTTPException) as error:
            raise AttemptError(f"does not answer: {type(error).__name__}: {error}") from error
        what = f"answered with status {status}: {self.excerpt(body)}"
        if status in (408, 429) or status >= 500:
            raise AttemptError(what, retry_after_seconds(retry_after))
        if status != 200:
            raise EndpointError(f"{self.url} {what}")
        try:
            choice = json.loads(body)["choices"][0]
            text, finished = choice["message"].get("content"), choice.get("finish_reason") != "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise AttemptError(f"{what} — which is not a chat completion") from error
        return Answer(self.without_key(text) if isinstance(text, str) else "", finished)

    def request(self, question: str) -> tuple[bytes, dict[str, str]]:
        """Body and headers."""
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return json.dumps(body).encode(), {"Content-Type": "application/json", "Connection": "close", **authorization}

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if len(self.key) >= SHORTEST_SECRET else text

    def excerpt(self, body: bytearray) -> str:
        """The beginning of an answer on one line, without control characters and without the key."""
        text = self.without_key(body.decode(errors="replace"))
        text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * EXCERPT]).split())
        return (text[:EXCERPT] + "…" if len(text) > EXCERPT else text) or "(nothing)"


def check_url(url: str) -> str:
    """The URL as it is. Raises ValueError where it is not one of an endpoint."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        usable = usable and "@" not in parts.netloc and not parts.query and not parts.fragment
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        shown = url.rpartition("@")[2]  # without a password
        raise ValueError(f"the endpoint must be a URL such as http://localhost:8000/v1, without user, got {shown!r}")
    return url


def connect(url: str, timeout: float) -> HTTPConnection:
    """A connection that is not open yet. https goes through the environment's proxy for it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port or 80, timeout=timeout)
    proxy = getproxies().get("https")
    if not proxy or proxy_bypass(host):
        return HTTPSConnection(host, parts.port or 443, timeout=timeout)
    through = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    connection = HTTPSConnection(through.hostname or "", through.port or 80, timeout=timeout)
    user = f"{unquote(through.username or '')}:{unquote(through.password or '')}".encode()
    authorization = {"Proxy-Authorization": f"Basic {b64encode(user).decode()}"} if through.username else {}
    connection.set_tunnel(host, parts.port or 443, authorization)
    return connection


@contextmanager
def cut_off_after(seconds: float, connection: HTTPConnection) -> Iterator[None]:
    """Closes the connection at the end, and after so many seconds at the latest, with a TimeoutError: a socket's own
    time-out begins anew with every byte.
    """
    expired = threading.Event()

    def cut_off() -> None:
        expired.set()
        with suppress(OSError, AttributeError):  # it may not be open yet, or not any more
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        if not expired.is_set():
            raise
        raise TimeoutError(f"timed out, no end of the answer within {seconds:g} s") from error
    else:
        if expired.is_set():
            raise TimeoutError(f"timed out, no end of the answer within {seconds:g} s")
    finally:
        timer.cancel()
        connection.close()


def read(response: HTTPResponse) -> bytearray:
    """The whole body."""
    body = bytearray()
    while part := response.read1(2**16):
        body += part
        if len(body) > LONGEST_BODY:
            raise HTTPException(f"the answer is longer than {LONGEST_BODY} bytes")
    if response.length:
        raise IncompleteRead(bytes(body), response.length)
    return body


def retry_after_seconds(header: str | None) -> float:
    """Of a Retry-After header, seconds or a date (RFC 9110, 10.2.3); 0 where there is none or it cannot be read."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())

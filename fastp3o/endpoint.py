"""Requests of JSON to a URL: time limits, retries while it is busy or unreachable, many at once."""

import json
import os
import random
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

Question = TypeVar("Question")
Answer = TypeVar("Answer")

SHORTEST_SECRET = 8  # characters; what servers without keys take for one ("EMPTY", "x") may stand in answers
LONGEST_BODY = 2**24  # bytes; no answer comes near it
EXCERPT = 300  # characters


class EndpointError(RuntimeError):
    """The endpoint refuses the request, or fails after all retries. The message names URL, status and answer."""


class StoppedError(Exception):
    """The caller no longer wants the answer."""


class AttemptError(Exception):
    """An attempt that failed but may succeed when repeated. wait: seconds that the endpoint asks to wait."""

    def __init__(self, what: str, wait: float = 0.0):
        super().__init__(what)
        self.wait = wait


class AnswerError(ValueError):
    """An answer that is not what was asked for, and would not be if it were asked again."""


class Endpoint:
    """A URL that takes JSON, with the time limits and retries of requests to it.

    Args:
        url: http or https, without a user.
        key_variable: environment variable of the key, if there is one. The key is sent in the Authorization header and
            nowhere else: no redirect is followed, only https goes through a proxy of the environment, which cannot read
            it then, and where an answer repeats it, stars stand in its place.
        timeout: seconds that one attempt may take, from its connection to its last byte.
        retries: attempts after the first, where the endpoint is busy (408, 429), broken (5xx, an answer that cannot be
            read), too slow or unreachable. Any other status but 200 stops at once.
        backoff: seconds before the first retry, doubled for each further one, and up to half as much again at random.
        longest_wait: seconds; an endpoint whose Retry-After asks for more counts as unavailable.

    Raises ValueError on a URL, a key or a proxy that cannot be used.
    """

    def __init__(
        self,
        url: str,
        key_variable: str,
        *,
        timeout: float = 120.0,
        retries: int = 6,
        backoff: float = 1.0,
        longest_wait: float = 120.0,
    ):
        self.url = check_url(url)
        self.timeout, self.retries, self.backoff, self.longest_wait = timeout, retries, backoff, longest_wait
        self.key = os.environ.get(key_variable, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            # http.client would complain too, but quote the key.
            raise ValueError(f"the environment variable {key_variable} holds characters that no HTTP header can")
        connect(self.url, timeout)  # what is wrong with a proxy is told before the first request

    def post(self, body: object, read_answer: Callable[[bytes], Answer], stopped: threading.Event) -> Answer:
        """What `read_answer` makes of the answer to a body of JSON. It raises AnswerError, or ValueError where another
        attempt may help, with what is wrong.

        Raises EndpointError where the endpoint refuses or all attempts fail; StoppedError in place of a retry once
        `stopped` is set.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.attempt(json.dumps(body).encode(), read_answer)
            except AttemptError as failure:
                if attempt > self.retries or failure.wait > self.longest_wait:
                    asked = f", and asks to wait {failure.wait:.0f} s" if failure.wait else ""
                    raise EndpointError(f"{self.url} {failure} (attempts: {attempt}{asked})") from failure
                wait = max(self.backoff * 2 ** (attempt - 1) * random.uniform(1, 1.5), failure.wait)
            if stopped.wait(wait):
                raise StoppedError

    def attempt(self, body: bytes, read_answer: Callable[[bytes], Answer]) -> Answer:
        try:
            connection = connect(self.url, self.timeout)
            with cut_off_after(self.timeout, connection):
                connection.request("POST", urlsplit(self.url).path or "/", body, self.headers())
                response = connection.getresponse()
                status, retry_after = response.status, response.headers.get("Retry-After")
                answer = read(response)
        except (OSError, HTTPException) as error:
            raise AttemptError(f"does not answer: {type(error).__name__}: {error}") from error
        what = f"answered with status {status}: {self.excerpt(answer)}"
        if status in (408, 429) or status >= 500:
            raise AttemptError(what, retry_after_seconds(retry_after))
        if status != 200:
            raise EndpointError(f"{self.url} {what}")
        try:
            return read_answer(answer)
        except AnswerError as error:
            raise EndpointError(f"{self.url} {what} — {error}") from error
        except ValueError as error:
            raise AttemptError(f"{what} — {error}") from error

    def headers(self) -> dict[str, str]:
        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", "Connection": "close", **authorization}

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if len(self.key) >= SHORTEST_SECRET else text

    def excerpt(self, body: bytes) -> str:
        """The beginning of an answer on one line, without control characters and without the key."""
        text = self.without_key(body.decode(errors="replace"))
        text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * EXCERPT]).split())
        return (text[:EXCERPT] + "…" if len(text) > EXCERPT else text) or "(nothing)"


def at_once(
    ask: Callable[[Question, threading.Event], Answer], questions: Iterable[Question], requests: int
) -> Iterator[Answer]:
    """The answers as they come, of so many requests at a time. `ask` gets an event that is set once no more are wanted.

    After an error or an interrupt too, pending answers are waited for, and no more requests are sent.
    """
    stopped = threading.Event()
    pool = ThreadPoolExecutor(requests)
    try:
        for asked in as_completed([pool.submit(ask, question, stopped) for question in questions]):
            yield asked.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def check_url(url: str) -> str:
    """The URL as it is. Raises ValueError where it is not one of an endpoint."""
    parts = split(url)
    usable = (
        parts is not None
        and parts.scheme in ("http", "https")
        and not ("@" in parts.netloc or parts.query or parts.fragment)
    )
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        shown = url.rpartition("@")[2]  # without a password
        raise ValueError(f"the endpoint must be a URL such as http://localhost:8000/v1, without user, got {shown!r}")
    return url


def split(url: str) -> SplitResult | None:
    """The parts of a URL; None where a socket could not take its host or port."""
    try:
        parts = urlsplit(url)
        usable = parts.hostname and parts.hostname.encode("idna") and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    return parts if usable else None


def connect(url: str, timeout: float) -> HTTPConnection:
    """A connection that is not open yet. https goes through the environment's proxy for it.

    Raises ValueError where that proxy cannot be one.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port or 80, timeout=timeout)
    proxy = getproxies().get("https")
    if not proxy or proxy_bypass(host):
        return HTTPSConnection(host, parts.port or 443, timeout=timeout)
    through = split(proxy if "://" in proxy else f"//{proxy}")
    if through is None:
        shown = proxy.rpartition("@")[2]  # without a password
        raise ValueError(f"the environment's proxy for https must be a URL such as http://proxy:3128, got {shown!r}")
    connection = HTTPSConnection(through.hostname or "", through.port or 80, timeout=timeout)
    user = f"{unquote(through.username or '')}:{unquote(through.password or '')}".encode()
    authorization = {"Proxy-Authorization": f"Basic {b64encode(user).decode()}"} if through.username else {}
    connection.set_tunnel(host, parts.port or 443, authorization)
    return connection


@contextmanager
def cut_off_after(seconds: float, connection: HTTPConnection) -> Iterator[None]:
    """Opens the connection, and closes it at the end and after so many seconds at the latest, with a TimeoutError: a
    socket's own time-out begins anew with every byte.
    """
    expired = threading.Event()
    opened: list[socket.socket] = []

    def cut_off() -> None:
        expired.set()
        for each in (connection.sock, *opened):
            with suppress(OSError, TypeError):  # it may not be open yet, or not any more
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        # The connection forgets its socket once the headers are there, before the body is.
        opened.append(connection.sock)
        if expired.is_set():  # when there was nothing yet to shut down
            raise TimeoutError
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


def read(response: HTTPResponse) -> bytes:
    """The whole body."""
    body = bytearray()
    while part := response.read1(2**16):
        body += part
        if len(body) > LONGEST_BODY:
            raise HTTPException(f"the answer is longer than {LONGEST_BODY} bytes")
    if response.length:
        raise IncompleteRead(bytes(body), response.length)
    return bytes(body)


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

"""JSON posted to a URL: time limits, retries while the server is busy or unreachable, concurrent requests."""

import asyncio
import base64
import html
import json
import os
import random
import re
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx

from fastp3o.errors import UserError

Question = TypeVar("Question")
Answer = TypeVar("Answer")

STARS = "***"
PART = 16  # characters of a key that are not shown either
SHORTEST_SECRET = 8  # characters; a placeholder for servers without keys ("EMPTY", "x") may occur in answers
LONGEST_BODY = 2**24  # bytes; no answer comes near it
EXCERPT = 300  # characters


class EndpointError(UserError):
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
        key_variable: environment variable of the key, if there is one. The key is only sent in the Authorization
            header. No redirect is followed. Only https goes through the environment's proxy, which cannot read the key
            then. Stars replace a key that an answer repeats, also encoded, or most of it.
        timeout: seconds that one attempt may take, from its connection to its last byte.
        retries: attempts after the first, if the endpoint is busy (408, 429), broken (5xx, an answer that cannot be
            read), too slow or unreachable. Any other status except 200 stops at once.
        backoff: seconds before the first retry, doubled for each further one, and up to half as much again at random.
        longest_wait: seconds; an endpoint whose Retry-After asks for more counts as unavailable.
        longest_body: bytes of an answer; a longer one is not read.
        abandons: whether a request under way is given up once its answer is no longer wanted, rather than waited for.

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
        longest_body: int = LONGEST_BODY,
        abandons: bool = False,
    ):
        self.url, self.proxy = check_url(url), environment_proxy(url)
        self.timeout, self.retries, self.backoff, self.longest_wait = timeout, retries, backoff, longest_wait
        self.longest_body, self.abandons = longest_body, abandons
        self.key = os.environ.get(key_variable, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            # httpx would complain too, but quote the key.
            raise UserError(f"the environment variable {key_variable} holds characters that no HTTP header can")
        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **authorization}
        self.certificates = ssl.create_default_context()

    def post(self, body: object, read_answer: Callable[[bytes], Answer], stopped: threading.Event) -> Answer:
        """Posts a JSON body and returns `read_answer` of the answer's bytes. On a wrong answer `read_answer` raises
        AnswerError, or ValueError if another attempt may help.

        Raises EndpointError if the endpoint refuses or all attempts fail, and StoppedError in place of a retry once
        `stopped` is set.
        """
        return self.send("POST", json.dumps(body).encode(), read_answer, stopped)

    def get(self, read_answer: Callable[[bytes], Answer]) -> Answer:
        """As `post`, without a body."""
        return self.send("GET", b"", read_answer, threading.Event())

    def send(
        self, method: str, body: bytes, read_answer: Callable[[bytes], Answer], stopped: threading.Event
    ) -> Answer:
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.attempt(method, body, read_answer, stopped)
            except AttemptError as failure:
                if attempt > self.retries or failure.wait > self.longest_wait:
                    asked = f", and asks to wait {failure.wait:.0f} s" if failure.wait else ""
                    raise EndpointError(f"{self.url} {failure} (attempts: {attempt}{asked})") from failure
                wait = max(self.backoff * 2 ** (attempt - 1) * random.uniform(1, 1.5), failure.wait)
            if stopped.wait(wait):
                raise StoppedError

    def attempt(
        self, method: str, body: bytes, read_answer: Callable[[bytes], Answer], stopped: threading.Event
    ) -> Answer:
        request = self.request(method, body)
        try:
            status, retry_after, answer = asyncio.run(unless(stopped, request) if self.abandons else request)
        except TimeoutError as error:
            late = f"timed out, no end of the answer within {self.timeout:g} s"
            raise AttemptError(f"does not answer: TimeoutError: {late}") from error
        except (httpx.HTTPError, OSError) as error:
            cause = first_cause(error)
            # An answer that is no HTTP is quoted.
            said = self.without_key(str(cause))
            raise AttemptError(f"does not answer: {type(cause).__name__}: {said}") from error
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

    async def request(self, method: str, body: bytes) -> tuple[int, str | None, bytes]:
        """The status, the Retry-After header and the body of the answer. Raises TimeoutError; httpx's own time limits
        begin anew with every byte.
        """
        async with (
            asyncio.timeout(self.timeout),
            httpx.AsyncClient(verify=self.certificates, proxy=self.proxy, trust_env=False, timeout=None) as client,
            client.stream(method, self.url, content=body, headers=self.headers) as response,
        ):
            answer = bytearray()
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > self.longest_body:
                    raise AttemptError(f"sends an answer that is longer than {self.longest_body} bytes")
            return response.status_code, response.headers.get("Retry-After"), bytes(answer)

    def without_key(self, text: str) -> str:
        """The text with stars in the place of the key, or of a part of it that is long enough to be a secret."""
        return without_secrets(text, key_shapes(self.key)) if len(self.key) >= SHORTEST_SECRET else text

    def excerpt(self, body: bytes) -> str:
        """The beginning of an answer on one line, without control characters and without the key."""
        text = self.without_key(body[: 2**16].decode(errors="replace"))
        text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * EXCERPT]).split())
        return (text[:EXCERPT] + "…" if len(text) > EXCERPT else text) or "(nothing)"


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text with stars in the place of every run of PART characters of a secret, or of a whole one that has fewer.
    Upper and lower case are the same, unless the text has letters that become several.
    """
    same = len(text.lower()) == len(text)
    folded = text.lower() if same else text
    hidden = [False] * len(text)
    for secret in secrets:
        size, secret = min(PART, len(secret)), secret.lower() if same else secret
        parts = {secret[start : start + size] for start in range(len(secret) - size + 1)}
        if any(part in folded for part in parts):
            for start in range(len(text) - size + 1):
                if folded[start : start + size] in parts:
                    hidden[start : start + size] = [True] * size
    runs = groupby(zip(text, hidden, strict=True), key=itemgetter(1))
    return "".join(STARS if is_hidden else "".join(letter for letter, _ in run) for is_hidden, run in runs)


def key_shapes(key: str) -> Iterator[str]:
    """The key as it is, as it stands in a URL, in JSON, in HTML and in hexadecimal digits, and in base64, which depends
    on the number of bytes before it.
    """
    yield from dict.fromkeys([key, quote(key, safe=""), json.dumps(key)[1:-1], html.escape(key), key.encode().hex()])
    for before in range(3):
        content = bytes(before) + key.encode()
        for encoded in (base64.b64encode(content), base64.urlsafe_b64encode(content)):
            # The first characters hold bits of what stands before the key, the last one of what follows.
            yield encoded.decode()[(0, 2, 3)[before] : 8 * len(content) // 6]


async def unless(stopped: threading.Event, request: Coroutine[None, None, Answer]) -> Answer:
    """Raises StoppedError in place of the request's answer, soon after `stopped` is set."""
    task = asyncio.create_task(request)
    while not (await asyncio.wait([task], timeout=0.2))[0]:
        if stopped.is_set():
            task.cancel()
            raise StoppedError
    return task.result()


class Answers(Generic[Answer]):
    """Answers to questions that are asked in the background, with this many requests at a time. `ask` gets an event
    that is set once no more answers are wanted.

    Iterating yields answers as they come. After an error or an interrupt no more requests are sent, and pending answers
    are waited for.
    """

    def __init__(
        self, ask: Callable[[Question, threading.Event], Answer], questions: Iterable[Question], requests: int
    ):
        self.stopped = threading.Event()
        self.pool = ThreadPoolExecutor(requests)
        self.futures = [self.pool.submit(ask, question, self.stopped) for question in questions]

    def __iter__(self) -> Iterator[Answer]:
        try:
            for answered in as_completed(self.futures):
                yield answered.result()
        finally:
            self.stop()
            self.pool.shutdown()

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Waits for all answers, whatever they are."""
        wait(self.futures)

    def stop(self) -> None:
        """Sends no more requests, and does not wait for those under way."""
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)


def at_once(
    ask: Callable[[Question, threading.Event], Answer], questions: Iterable[Question], requests: int
) -> Iterator[Answer]:
    """Yields answers as they come (`Answers`)."""
    return iter(Answers(ask, questions, requests))


def check_url(url: str) -> str:
    """Returns the URL. Raises ValueError if it cannot be an endpoint's."""
    if not names_server(url) or set(url) & set("@?# ") or not url.isascii() or not url.isprintable():
        shown = re.split("[?#]", url.rpartition("@")[2])[0]  # without a password, or a key in a query
        raise UserError(f"the endpoint must be a URL such as http://localhost:8000/v1, without user, got {shown!r}")
    return url


def environment_proxy(url: str) -> str | None:
    """The environment's proxy for https. Raises ValueError if it cannot be one."""
    parts, proxy = httpx.URL(url), getproxies().get("https")
    if parts.scheme == "http" or not proxy or proxy_bypass(parts.host):
        return None
    proxy_url = proxy if "://" in proxy else f"http://{proxy}"
    if not names_server(proxy_url):
        shown = proxy.rpartition("@")[2]  # without a password
        raise UserError(f"the environment's proxy for https must be a URL such as http://proxy:3128, got {shown!r}")
    return proxy_url


def names_server(url: str) -> bool:
    """Whether a URL is of http or https, with a host and a port that a socket can take."""
    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")  # refuses empty and overlong labels
    except (httpx.InvalidURL, UnicodeError):
        return False
    host_fits = parts.host and "%" not in parts.host  # httpx quotes what no host can hold
    return bool(parts.scheme in ("http", "https") and host_fits and (parts.port is None or 0 < parts.port < 2**16))


def first_cause(error: BaseException) -> BaseException:
    """The system's error, which says more than httpx's: "connection refused" rather than "all attempts failed"."""
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    cause = group[0] if group else error.__cause__ or error.__context__
    return error if cause is None else first_cause(cause)


def retry_after_seconds(header: str | None) -> float:
    """Seconds to wait by a Retry-After header of seconds or a date (RFC 9110, 10.2.3); 0 if it cannot be read."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())

"""JSON posted to a URL: time limits, retries while the server is busy or unreachable, concurrent
requests.
"""

import asyncio
import json
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, wait
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import count

import httpx

from fastp3o.calls.answers import Answer
from fastp3o.calls.event_loop import event_loop
from fastp3o.errors import UserError

STARS = "***"
# Characters; a placeholder for servers without keys ("EMPTY", "x") may occur in answers.
SHORTEST_SECRET = 8
EXCERPT = 300  # characters
KEEPALIVE = 2.0  # seconds; servers close what is idle for 5 or more, and one of the two must be sure to be first


# --- errors ---------------------------------------------------------------------------------------


class EndpointError(UserError):
    """The endpoint refuses the request, or fails after all retries. The message names URL, status
    and answer.
    """


class UnavailableError(EndpointError):
    """All attempts have failed: the endpoint is unreachable, broken, too slow or too busy."""


class AttemptError(Exception):
    """An attempt that failed but may succeed when repeated. wait: seconds that the endpoint asks to
    wait.
    """

    def __init__(self, what: str, wait: float = 0.0):
        super().__init__(what)
        self.wait = wait


class AnswerError(ValueError):
    """An answer that is not what was asked for, and would not be if it were asked again."""


# --- requests -------------------------------------------------------------------------------------


class Endpoint:
    """A URL that takes JSON, with the time limits and retries of requests to it.

    url: http or https, without a user. key_variable: environment variable of the key, if there is
    one. The key is only sent in the Authorization header. No redirect is followed. Only https goes
    through the environment's proxy, which cannot read the key then. Stars replace a key that an
    answer repeats.

    timeout: seconds that one attempt may take, from its connection to its last byte. retries:
    attempts after the first, if the endpoint is busy (408, 429), broken (5xx, an answer that cannot
    be read), too slow or unreachable. Any other status except 200 stops at once. backoff: seconds
    before the first retry, doubled for each further one, and up to half as much again at random.
    longest_wait: seconds; an endpoint whose Retry-After asks for more counts as unavailable.
    abandons: whether an unfinished request is given up once its answer is no longer wanted, rather
    than waited for. query: parameters behind the URL, none of them secret.

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
        abandons: bool = False,
        query: Mapping[str, str] | None = None,
    ):
        self.url, self.proxied = check_url(url), url.startswith("https:")
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.longest_wait = longest_wait
        self.abandons, self.query = abandons, query
        self.key = os.environ.get(key_variable, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            # httpx would complain too, but quote the key.
            raise UserError(
                f"the environment variable {key_variable} contains characters that are not allowed in an HTTP header"
            )
        authorization = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.headers = {"Content-Type": "application/json", **authorization}
        try:
            # Made here once, rather than in all threads that ask first.
            client(os.getpid(), self.proxied)
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            # a SOCKS proxy needs another package
            raise UserError(f"the environment's proxy for https cannot be used: {error}") from error

    def post(
        self, body: object, read_answer: Callable[[bytes], Answer], stopped: threading.Event
    ) -> Answer:
        """Posts a body as JSON, or sends a GET without one, and returns `read_answer` of the
        answer's bytes. On a wrong answer `read_answer` raises AnswerError, or ValueError if another
        attempt may help. Raises EndpointError if the endpoint refuses or all attempts fail, and
        CancelledError once `stopped` is set.
        """
        content = b"" if body is None else json.dumps(body).encode()
        for attempt in count(1):
            try:
                return self.attempt(content, read_answer, stopped)
            except AttemptError as failure:
                if attempt > self.retries or failure.wait > self.longest_wait:
                    asked = f", and asks to wait {failure.wait:.0f} s" if failure.wait else ""
                    raise UnavailableError(
                        f"{self.url} {failure} (attempts: {attempt}{asked})"
                    ) from failure
                pause = max(
                    self.backoff * 2 ** (attempt - 1) * random.uniform(1, 1.5), failure.wait
                )
            if stopped.wait(pause):
                break
        raise CancelledError

    def get(self, read_answer: Callable[[bytes], Answer]) -> Answer:
        """Sends a GET request; else as `post`."""
        return self.post(None, read_answer, threading.Event())

    def attempt(
        self, content: bytes, read_answer: Callable[[bytes], Answer], stopped: threading.Event
    ) -> Answer:
        try:
            answered = asyncio.run_coroutine_threadsafe(
                self.request(content), event_loop("requests").loop
            )
            while self.abandons and not wait([answered], timeout=0.2).done:
                if stopped.is_set():
                    answered.cancel()
            response = answered.result()
        except TimeoutError as error:
            late = f"timed out, no end of the answer within {self.timeout:g} s"
            raise AttemptError(f"does not answer: TimeoutError: {late}") from error
        except (httpx.HTTPError, OSError) as error:
            cause = first_cause(error)
            # An answer that is no HTTP is quoted.
            raise AttemptError(
                f"does not answer: {type(cause).__name__}: {self.without_key(str(cause))}"
            ) from error
        status, answer = response.status_code, response.content
        what = f"answered with status {status}: {self.excerpt(answer)}"
        if status in (408, 429) or status >= 500:
            raise AttemptError(what, seconds_asked(response.headers))
        if status != 200:
            raise EndpointError(f"{self.url} {what}")
        try:
            return read_answer(answer)
        except AnswerError as error:
            raise EndpointError(f"{self.url} {what} — {error}") from error
        except (ValueError, RecursionError) as error:  # of JSON that is nested too deeply
            raise AttemptError(f"{what} — {error}") from error

    async def request(self, content: bytes) -> httpx.Response:
        """The whole answer. Raises TimeoutError; httpx's own limits begin again with each byte."""
        async with asyncio.timeout(self.timeout):
            ask = client(os.getpid(), self.proxied).request
            method = "POST" if content else "GET"
            return await ask(
                method, self.url, params=self.query, content=content, headers=self.headers
            )

    def without_key(self, text: str) -> str:
        """The text with stars in place of the key, if it is long enough to be a secret."""
        return text.replace(self.key, STARS) if len(self.key) >= SHORTEST_SECRET else text

    def excerpt(self, body: bytes) -> str:
        """The beginning of an answer on one line, without control characters and without the key."""
        text = self.without_key(body[: 2**16].decode(errors="replace"))
        text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * EXCERPT]).split())
        return (text[:EXCERPT] + "…" if len(text) > EXCERPT else text) or "(nothing)"


@cache
def client(process: int, proxied: bool) -> httpx.AsyncClient:
    """The client whose connections all requests of a process share, in the event loop of requests.
    It keeps no cookies. proxied: through the environment's proxy, if there is one.
    """
    return httpx.AsyncClient(
        verify=ssl.create_default_context(),
        trust_env=proxied,
        timeout=None,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
    )


# --- what answers and URLs say --------------------------------------------------------------------


def seconds_asked(headers: Mapping[str, str]) -> float:
    """The wait that Retry-After asks for: seconds, or a date, which is of the server's clock if it
    tells its own. 0 for anything else.
    """
    asked = headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        until = parsedate_to_datetime(asked).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    try:
        now = parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        now = time.time()
    return max(0.0, until - now)


def check_url(url: str) -> str:
    """Returns the URL. Raises ValueError if it cannot be an endpoint's, of http or https."""
    try:
        parts = httpx.URL(url)
        parts.host.encode("idna")  # refuses empty and overlong labels
        host_fits = parts.host and "%" not in parts.host  # httpx quotes what no host can hold
        names_server = (
            parts.scheme in ("http", "https") and host_fits and (parts.port or 80) < 2**16
        )
    except (httpx.InvalidURL, UnicodeError):
        names_server = False
    if not names_server or set(url) & set("@?# ") or not url.isascii() or not url.isprintable():
        # Without a password, or a key in a query.
        shown = re.split("[?#]", url.rpartition("@")[2])[0]
        raise UserError(
            f"the endpoint must be a URL such as http://localhost:8000/v1, without user, got {shown!r}"
        )
    return url


def first_cause(error: BaseException) -> BaseException:
    """The system's error, which says more than httpx's: "connection refused" rather than "all
    attempts failed".
    """
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    cause = group[0] if group else error.__cause__ or error.__context__
    return error if cause is None else first_cause(cause)

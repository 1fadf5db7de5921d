"""vLLM servers over HTTP: their limits, their completions, and new weights."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from transformers.utils.logging import get_logger

from fastp3o.calls.answers import Answers
from fastp3o.calls.endpoint import AnswerError, Endpoint, EndpointError, UnavailableError
from fastp3o.errors import UserError
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.groups import SamplingSettings

Read = TypeVar("Read")
logger = get_logger(__name__)

KEY = "VLLM_API_KEY"
OLDEST = (0, 30)
LARGEST = 1e5  # nats; vLLM clamps a log-prob of 0 to -9999
# A server that has been restarted has other weights. It takes longer to start than this leaves
# it.
RETRIES = 1
QUICK = 30.0  # seconds for an answer that takes a server no work

# All that vLLM would otherwise take from the generation_config.json of the model that it was
# started with.
NO_PENALTIES = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


# --- questions and answers ------------------------------------------------------------------------


class OtherWeightsError(EndpointError):
    """A server samples from weights other than the policy's."""


class Completion(NamedTuple):
    """One response of a server. logprobs: those of its tokens, in nats, as the server's
    --logprobs-mode defines them; by default before temperature and truncation.
    """

    ids: Ids
    logprobs: list[float]


class Question(NamedTuple):
    """A prompt that a server is asked to complete. place: what its answer comes with, such as its
    place in a call. server: the one that is asked, if it is there; None for the one that has least
    to do. settings: that differ from those of the call.
    """

    place: Any
    prompt_ids: Ids
    seed: int
    server: str | None = None
    settings: Mapping[str, Any] = {}


# --- the servers ----------------------------------------------------------------------------------


class Servers:
    """vLLM servers with equal models, which share the prompts: the one that has least to do gets
    the next. One that no longer answers is lost, and its prompts go to the others, until it is
    `found_again`.

    Args:
        urls: without a path. The environment variable VLLM_API_KEY holds their key, if they have
            one.
        requests: prompts that this process asks for at once. Each is one request for all of its
            responses.
        time_limit: seconds that an answer may take, and a reload of weights.
        vocabulary: number of the policy's tokens.
        interrupts: whether new weights come while requests are under way, which go on from them.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        requests: int,
        time_limit: float,
        vocabulary: int,
        interrupts: bool,
    ):
        self.vocabulary, self.interrupts = vocabulary, interrupts
        self.urls = [url.rstrip("/") for url in urls]
        self.requests, self.time_limit = requests, time_limit
        self.under_way: list[Answers] = []
        self.calls: list[Future] = []  # in the background, which ask for more as they go on
        self.lost: set[str] = set()
        self.paused: list[str] = []
        self.busy, self.counting = Counter[str](), threading.Lock()

    @property
    def present(self) -> list[str]:
        return [url for url in self.urls if url not in self.lost]

    def lose(self, url: str, error: UnavailableError) -> None:
        """Marks a server as lost. Raises the error if no server is left."""
        with self.counting:
            if url not in self.lost:
                logger.warning(
                    f"{error}. {len(self.present) - 1} of {len(self.urls)} servers are left"
                )
            self.lost.add(url)
            if not self.present:
                raise error

    def found_again(self, lost: set[str]) -> set[str]:
        """The lost servers that respond again. lost: those that any process has marked as lost."""
        responding = set()
        for url in lost:
            with suppress(EndpointError):
                self.endpoint(url, "/version", timeout=QUICK, retries=0).get(read_version)
                responding.add(url)
        return responding

    def endpoint(self, url: str, path: str, **options: Any) -> Endpoint:
        return Endpoint(
            url + path, KEY, **{"timeout": self.time_limit, "retries": RETRIES} | options
        )

    def require_usable(self, longest_sequence: int) -> None:
        """Raises EndpointError if a server does not answer as vLLM does, and ValueError if it is
        too old, or has no room for a prompt and a response of this many tokens together.
        """
        for url in self.urls:
            version = self.endpoint(url, "/version", timeout=QUICK).get(read_version)
            if version < OLDEST:
                raise UserError(
                    f"{url} is vLLM {dotted(version)}, and {dotted(OLDEST)} or newer is needed"
                )
            room = self.endpoint(url, "/v1/models", timeout=QUICK).get(read_longest_sequence)
            if room < longest_sequence:
                raise UserError(
                    f"{url} takes sequences of {room} tokens, and prompt and response may have {longest_sequence}: "
                    "start it with a larger --max-model-len, or lower --max_prompt_tokens or --max_response_tokens"
                )

    def complete(
        self, questions: Iterable[Question], settings: Mapping[str, Any], end_ids: set[int]
    ) -> Answers[Question, tuple[Any, list[Completion]]]:
        """Begins to ask for completions. Answers are pairs of a question's place and its
        completions.

        settings: vLLM's, with the numbers of completions, `n`, and of tokens at most, `max_tokens`.
        end_ids: the tokens that end a response.
        """
        self.under_way = [one for one in self.under_way if not one.stopped.is_set()]
        endpoints = {url: self.endpoint(url, "/v1/completions", abandons=True) for url in self.urls}

        def ask(question: Question, stopped: threading.Event) -> tuple[Any, list[Completion]]:
            own = {**settings, **question.settings}

            def read(answer: bytes) -> list[Completion]:
                return read_completions(answer, question.prompt_ids, own, end_ids, self.vocabulary)

            body = {**own, "prompt": question.prompt_ids, "seed": question.seed}
            while True:
                with self.counting:
                    present = self.present
                    url = (
                        question.server
                        if question.server in present
                        else min(present, key=self.busy.__getitem__)
                    )
                    self.busy[url] += 1
                try:
                    completions = endpoints[url].post(body, read, stopped)
                    if self.interrupts and url in self.lost:
                        raise UnavailableError(
                            f"{url} was lost, and has not taken new weights since"
                        )
                    return question.place, completions
                except UnavailableError as error:
                    self.lose(url, error)
                finally:
                    with self.counting:
                        self.busy[url] -= 1

        answers = Answers(ask, questions, self.requests)
        self.under_way.append(answers)
        return answers

    def pause(self) -> None:
        """Requests under way wait for `resume` if new weights may interrupt them, else there may be
        none. This, `load` and `drop_keys` raise EndpointError if a server refuses, or if none is
        left.
        """
        self.paused = self.present if self.interrupts else []
        self.post_to_all("/pause", {}, self.paused, query={"mode": "keep"})

    def load(self, folder: str) -> None:
        """Has every available server read its weights from a folder."""
        self.post_to_all(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        )

    def drop_keys(self) -> None:
        """Has every available server drop keys and values computed with older weights."""
        query = {"reset_running_requests": "true"} if self.interrupts else None
        for url, answer in self.post_to_all("/reset_prefix_cache", {}, query=query).items():
            if not (isinstance(answer, dict) and answer.get("success") is True):
                raise EndpointError(
                    f"{url} still has keys of older weights: it is serving other clients"
                )

    def resume(self) -> None:
        """Has paused servers continue, including those lost since. Raises EndpointError if one
        cannot.
        """
        paused, self.paused = self.paused, []
        self.post_to_all("/resume", {}, paused, timeout=QUICK)

    def post_to_all(
        self, path: str, body: object, urls: Sequence[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The answers of `urls`, or of all that are there; None: to a GET. Raises EndpointError if
        one refuses, or if none is left."""

        def ask(url: str, stopped: threading.Event) -> dict[str, Any]:
            try:
                return {url: self.endpoint(url, path, **options).post(body, json.loads, stopped)}
            except UnavailableError as error:
                self.lose(url, error)
                return {}
            except EndpointError as error:
                raise EndpointError(
                    f"{error}. New weights need VLLM_SERVER_DEV_MODE=1, and a server that sees --vllm_folder"
                ) from error

        answers: dict[str, Any] = {}
        for answer in Answers(ask, self.present if urls is None else urls, len(self.urls)):
            answers |= answer
        return answers

    def wait(self) -> None:
        """Waits until this process has no requests in progress."""
        wait([*self.calls, *(future for answers in self.under_way for future in answers.futures)])

    def stop(self) -> None:
        """Cancels the requests in progress."""
        for answers in self.under_way:
            answers.stop()


# --- what servers answer --------------------------------------------------------------------------


def reader(read: Callable[[Any], Read], wrong: str) -> Callable[[bytes], Read]:
    """A function that reads a JSON answer. It raises AnswerError with the message `wrong` for an
    answer of another form.
    """

    def read_answer(answer: bytes) -> Read:
        try:
            return read(json.loads(answer))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise AnswerError(wrong) from error

    return read_answer


read_version = reader(
    lambda content: tuple(map(int, re.findall(r"^(\d+)\.(\d+)", content["version"])[0])),
    "which is not the version of a vLLM server",
)
read_longest_sequence = reader(
    lambda content: int(content["data"][0]["max_model_len"]),
    "which does not say how long its model's sequences may be (max_model_len)",
)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def read_completions(
    answer: bytes, prompt_ids: Ids, settings: Mapping[str, Any], end_ids: set[int], vocabulary: int
) -> list[Completion]:
    """The completions of an answer, in vLLM's order. Raises AnswerError if they are not as many
    whole ones as `settings` asks for, of this prompt, with a log-prob of each token, and ValueError
    if another attempt may help.
    """
    count, max_tokens = settings["n"], settings["max_tokens"]
    try:
        choices = sorted(json.loads(answer)["choices"], key=itemgetter("index"))
        completions = [
            Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for choice in choices
        ]
        reasons = {choice["finish_reason"] for choice in choices}
        numbers = [choice["index"] for choice in choices]
        others = [choice for choice in choices if choice["prompt_token_ids"] != prompt_ids]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            "which is not one of vLLM's completions with token ids and log-probs"
        ) from error
    if reasons - {"stop", "length"}:
        raise ValueError("which was cut short")
    if len(completions) != count:
        raise AnswerError(f"which has {len(completions)} responses, and {count} were asked for")
    for completion in completions:
        require_whole(completion, max_tokens, end_ids)
        if max(completion.ids) >= vocabulary:
            raise AnswerError(
                f"which has token {max(completion.ids)}, and the policy has {vocabulary} tokens"
            )
    if others or numbers != list(range(count)):
        raise AnswerError("which has responses to another prompt, or one of them twice")
    return completions


def require_whole(completion: Completion, max_tokens: int, end_ids: set[int]) -> None:
    """Raises AnswerError if it is not a response with its end, or of full length, and a log-prob of
    each token.
    """
    ids, logprobs = completion
    whole = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
    if not (ids and whole and isinstance(logprobs, list) and len(ids) == len(logprobs)):
        raise AnswerError("which has a response without tokens, or without a log-prob of each")
    if not all(
        type(logprob) in (int, float) and -LARGEST <= logprob <= 1e-3 for logprob in logprobs
    ):
        raise AnswerError("which has a log-prob that is not a finite number of nats")
    if len(ids) > max_tokens or any(token in end_ids for token in ids[:-1]):
        raise AnswerError(
            f"which has a response that goes on after its end, or after {max_tokens} tokens"
        )
    if len(ids) < max_tokens and ids[-1] not in end_ids:
        raise AnswerError(
            f"which has a response of {len(ids)} tokens, cut short: is its --max-model-len too small?"
        )


def completion_settings(
    settings: SamplingSettings, temperature: float, max_tokens: int, end_ids: set[int]
) -> dict[str, Any]:
    """Everything that determines a vLLM completion, except its prompt, seed and number of
    responses.
    """
    return NO_PENALTIES | {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p,
        "ignore_eos": True,  # the served folder's; the policy's are these
        "stop_token_ids": sorted(end_ids),
        "logprobs": 0,  # of the sampled tokens alone
        "return_token_ids": True,
        "skip_special_tokens": False,
    }

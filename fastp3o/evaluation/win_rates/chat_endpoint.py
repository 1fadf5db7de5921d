"""Single questions to an OpenAI-compatible chat-completions endpoint."""

import json
import threading
from typing import Any, NamedTuple

from fastp3o.endpoint import Endpoint, check_url


class Answer(NamedTuple):
    """text: empty where the model returned none. finished: False where a length limit cut the text off."""

    text: str
    finished: bool


class ChatEndpoint(Endpoint):
    """One model behind an endpoint.

    Args:
        url: without /chat/completions, as for OpenAI's clients: http://localhost:8000/v1.
        model: its name at the endpoint.
        patience: as of an Endpoint.

    The key is that of the environment variable OPENAI_API_KEY.
    """

    def __init__(self, url: str, model: str, **patience: Any):
        super().__init__(check_url(url).rstrip("/") + "/chat/completions", "OPENAI_API_KEY", **patience)
        self.model = model

    def ask(self, question: str, stopped: threading.Event) -> Answer:
        """The model's answer at temperature 0. Raises as `post` does."""
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        return self.post(body, self.read_answer, stopped)

    def read_answer(self, body: bytes) -> Answer:
        try:
            choice = json.loads(body)["choices"][0]
            text, finished = choice["message"].get("content"), choice.get("finish_reason") != "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("which is not a chat completion") from error
        return Answer(self.without_key(text) if isinstance(text, str) else "", finished)

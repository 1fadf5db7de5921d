"""Answers to many questions that are asked at once."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Answers(Generic[Question, Answer]):
    """Answers to questions that are asked in the background, some `at_once`. `ask` gets an event
    that is set once no more answers are wanted.

    Iterating yields answers as they come. An error or an interrupt sends no more requests, and
    waits for pending ones.
    """

    def __init__(
        self,
        ask: Callable[[Question, threading.Event], Answer],
        questions: Iterable[Question],
        at_once: int,
    ):
        self.ask, self.stopped, self.pool = ask, threading.Event(), ThreadPoolExecutor(at_once)
        self.awaited: set[Future[Answer]] = set()
        self.come: SimpleQueue[Future[Answer]] = SimpleQueue()
        self.add(questions)

    def add(self, questions: Iterable[Question]) -> None:
        for question in questions:
            future = self.pool.submit(self.ask, question, self.stopped)
            self.awaited.add(future)
            future.add_done_callback(self.come.put)

    @property
    def futures(self) -> list[Future[Answer]]:
        """Requests whose answers have not been read yet."""
        return list(self.awaited)

    def __iter__(self) -> Iterator[Answer]:
        return chain.from_iterable(self.lists())

    def lists(self) -> Generator[list[Answer], None, None]:
        """Lists of the answers that have come meanwhile, also to questions that were added."""
        try:
            while self.awaited:
                done = [self.come.get()]
                done += [self.come.get() for _ in range(self.come.qsize())]  # nobody else takes any
                self.awaited.difference_update(done)
                yield [future.result() for future in done]
        finally:
            self.stop()
            self.pool.shutdown()

    def stop(self) -> None:
        """Sends no more requests, and does not wait for unfinished ones."""
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)

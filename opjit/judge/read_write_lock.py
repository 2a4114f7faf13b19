"""A lock for many readers or one writer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """Lets several threads share something, or one thread have it alone.

    Waiting writers go first, one after another. With at most one writer for each reader that has
    finished, as in a judge, readers do not starve.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = threading.Lock()  # of the writers
        self._readers = 0
        self._writers = 0  # that write or wait

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._writers += 1
        try:
            with self._turn:
                with self._condition:
                    self._condition.wait_for(lambda: not self._readers)
                yield
        finally:
            with self._condition:
                self._writers -= 1
                self._condition.notify_all()

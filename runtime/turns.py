"""Turns: many threads may call one object; one generation is alive, and each of its steps holds a lock."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from inspect import GEN_RUNNING, getgeneratorstate
from threading import RLock, get_ident
from typing import Any, TypeVar

from dflash2.errors import Dflash2Error

Item = TypeVar("Item")
Result = TypeVar("Result")


class Turns:
    """Whose turn it is.

    The lock is held while a step runs and never between two of them, so a stream may hop threads. A new generation
    supersedes the one alive: the old one is closed where it stands, and ends without another item.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._live: Generator[Any, Any, Any] | None = None
        self._stepping: int | None = None
        self._calling = False
        self.superseded = 0  # calls that came from outside a step and took the memories over

    def inside(self) -> bool:
        """Whether this thread is in the middle of a step: what it calls is part of that step."""
        return self._stepping == get_ident()

    def call(self, callback: Callable[..., Result], *arguments: Any) -> Result:
        """Call the user's code in the middle of a step; what it may not do is refused by `refuse_callbacks`."""
        self._calling = True
        try:
            return callback(*arguments)
        finally:
            self._calling = False

    def refuse_callbacks(self) -> None:
        """Raise Dflash2Error if the caller is a callback of a step: half of what it would touch is in flux."""
        if self._calling and self.inside():
            raise Dflash2Error("this cannot be done within a callback of a generation; do it between tokens.")

    @contextmanager
    def hold(self, *, supersede: bool) -> Iterator[None]:
        """Wait for the step that runs, then keep others out; ends the generation alive if asked to.

        Within a step of the same thread it changes nothing.
        """
        with self._lock:
            if supersede and not self.inside():
                self._end()
                self.superseded += 1
            yield

    def drive(self, steps: Generator[Item, Any, None]) -> Generator[Item, Any, None]:
        """Run `steps` as the generation alive from the first `next` on; what is sent in is passed on."""
        begun = False
        sent = None
        try:
            while True:
                with self._lock:
                    if not begun:
                        self._end()
                        self._live = steps
                        begun = True
                    if self._live is not steps:
                        return
                    try:
                        item = self._step(steps, sent)
                    except StopIteration:
                        return
                sent = yield item
        finally:
            with self._lock:
                if self._live is steps:
                    self._end()

    def _step(self, steps: Generator[Item, Any, None], sent: Any) -> Item:
        outer, self._stepping = self._stepping, get_ident()
        try:
            return steps.send(sent)
        finally:
            self._stepping = outer

    def _end(self) -> None:
        if self._live is not None and getgeneratorstate(self._live) == GEN_RUNNING:
            raise Dflash2Error("a callback of a request cannot make another request of the same object.")
        live, self._live = self._live, None
        if live is not None:
            live.close()

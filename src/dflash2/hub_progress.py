"""Progress of a download: huggingface_hub's bars, turned into bytes done of bytes in all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """For callers that do not ask."""


class Meter:
    """Bytes of one file, reported on top of those before it."""

    def __init__(self, before: int, total: int, progress: Progress) -> None:
        self._done = before
        self._total = total
        self._progress = progress

    def add(self, count: int) -> None:
        """Report `count` more bytes."""
        self._done += count
        self._progress(min(self._done, self._total), self._total)

    def options(self) -> dict[str, Any]:
        """Arguments for `hf_hub_download`; its releases before 1.0 take no class, so they report whole files only."""
        from huggingface_hub import hf_hub_download

        if "tqdm_class" not in inspect.signature(hf_hub_download).parameters:
            return {}
        return {"tqdm_class": type("Bar", (_Bar,), {"meter": self})}


class _Bar:
    """Stands in for the progress bar that the library would show."""

    meter: Meter

    def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
        self.n, self.total = 0.0, total
        self.update(initial)

    def update(self, count: float | None = 1) -> None:
        self.n += count or 0
        self.meter.add(int(count or 0))

    def update_transfer(self, count: float | None = 1) -> None:
        """Bytes on the wire, which compression and deduplication change: not reported."""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else is called on a bar (close, refresh, set_postfix_str)."""
        return lambda *_, **__: None

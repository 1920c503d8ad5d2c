"""The two contexts of a pair and what each holds; knows nothing of `llama_cpp.Llama`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dflash2.errors import ContextLimitError, Dflash2Error, NativeError
from dflash2.native import AttentionOptions, Context, ContextOptions, IntArray, Model, Outputs, Placement
from dflash2.runtime.inject import inject
from dflash2.runtime.pair import DrafterSpec
from dflash2.runtime.stats import CycleRecord, Recorder, record_of

# Rows per injection call. The drafter reserves head logits for this many rows, whatever it is asked for.
_DRAFTER_BATCH = 64
_WATCH_CYCLES = 32
_LEAST_ACCEPTED = 0.1  # tokens per cycle, below which a drafter does not help


class Session:
    """A target context, its drafter, and the state of the cycle between them.

    Attributes:
        length: positions in the target's memory, rejected rows not yet dropped included.
        injected: the drafter holds injected positions up to here.
        noise, block: the drafter's input [B] and what is verified [B]; the first entry of both is the anchor.
        features: scratch of `inject`, [rows per call, feature width].
        on_cycle: called with a CycleRecord after every cycle.
    """

    def __init__(
        self,
        target: Context,
        drafter_path: Path,
        spec: DrafterSpec,
        *,
        placement: Placement,
        attention: AttentionOptions,
        threads: tuple[int, int],
        depth: int,
        n_ctx: int,
        auto_disable: bool,
    ) -> None:
        """Load the drafter next to an open `target`; at most `n_ctx` positions will be used.

        `threads` (one row, many rows) and `attention` are the target's. Raises NativeError, or Dflash2Error for a
        bad depth.
        """
        self.target = target
        self.spec = spec
        self.n_ctx = n_ctx
        self.auto_disable = auto_disable
        self.recorder = Recorder(spec.block_size)
        self.on_cycle: Callable[[CycleRecord], None] | None = None
        self.length = self.injected = 0
        self.noise: IntArray = np.full(spec.block_size, spec.mask_token, np.int32)
        self.block: IntArray = np.zeros(spec.block_size, np.int32)
        self._pending = (0, 0, 0)
        self._surplus = 0
        self._watched = (0, 0)
        self._suspended = False
        self._depth = 0
        rows = max(_DRAFTER_BATCH, spec.block_size)
        self.features = np.empty((rows, spec.feature_width), np.float32)
        self._model = Model(drafter_path, placement)
        try:
            options = ContextOptions(
                n_ctx=target.n_ctx,
                n_batch=rows,
                n_ubatch=rows,
                n_threads=threads[0],
                n_threads_batch=threads[1],
                flash_attn_type=attention.flash_attn_type,
                type_k=attention.type_k,
                type_v=attention.type_v,
            )
            self.drafter = Context.open(self._model, options, other=target, feature_width=spec.feature_width)
            self.drafter.set_causal(spec.causal)
            if spec.top_k:
                self.drafter.output_lattice()
            self.depth = depth
        except Dflash2Error:
            self.close()
            raise

    def close(self) -> None:
        """Free the drafter; the target stays with whoever opened it, but is not used any more."""
        self.target.close()
        if hasattr(self, "drafter"):
            self.drafter.close()
        self._model.close()

    @property
    def drafting(self) -> bool:
        """Whether the next tokens will be drafted."""
        return self._depth > 0 and not self._suspended

    @property
    def depth(self) -> int:
        """Draft tokens verified per cycle, 0 for none; setting it also ends a suspension by the watchdog."""
        return self._depth

    @depth.setter
    def depth(self, depth: int) -> None:
        if type(depth) is not int or not 0 <= depth < self.spec.block_size:
            raise Dflash2Error(
                f"depth must be a whole number in 0..{self.spec.block_size - 1} for this drafter, got {depth!r}."
            )
        if depth >= self.target.n_batch:
            raise Dflash2Error(
                f"depth {depth} needs n_batch of at least {depth + 1}, this target has {self.target.n_batch}; "
                "raise n_batch or lower depth."
            )
        snapshots = self.target.snapshots
        if snapshots is not None and depth > snapshots:
            raise Dflash2Error(
                f"depth {depth} needs a target that can step back {depth} tokens; this one's recurrent state keeps "
                f"{snapshots} snapshots. Make the object with this depth, or with depth=0 if llama.cpp keeps none."
            )
        self._depth = depth
        self._suspended = False
        self._watched = (0, 0)
        self._pending = (0, 0, 0)
        self.target.tap(self.spec.taps if depth else ())

    def depth_at(self, position: int) -> int:
        """Draft tokens that fit behind an anchor at `position`; raises ContextLimitError if not even it fits."""
        room = self.n_ctx - position - 1
        if room < 0:
            raise ContextLimitError(f"the context of {self.n_ctx} tokens is full; raise n_ctx or shorten the prompt.")
        return min(self._depth, room)

    def evaluate(self, tokens: IntArray, start: int, *, all_logits: bool = False) -> Iterator[int]:
        """Process `tokens` at `start`..., batch by batch, injecting as needed; yields the position reached.

        Logits are kept for the last row of each batch, or for all. Raises NativeError if the target's memory
        cannot be cut to `start`.
        """
        self.settle()
        if not self.rewind(start):
            raise NativeError(
                f"the target's recurrent memory cannot step back to position {start}; call reset() first."
            )
        begin = self._begin_injection(start, start + len(tokens)) if self.drafting else None
        for offset in range(0, len(tokens), self.target.n_batch):
            batch = tokens[offset : offset + self.target.n_batch]
            position, end = start + offset, start + offset + len(batch)
            self.length = end
            self._surplus = 0
            self.target.decode_tokens(batch, position, Outputs.ALL if all_logits else Outputs.LAST)
            if begin is not None and begin < end:
                first = max(0, begin - position)
                n = len(batch) - first
                inject(self.target, self.drafter, self.features, first=first, n=n, position=position + first)
                self.injected = end
            yield end

    def _begin_injection(self, start: int, end: int) -> int:
        """First position worth injecting of start..end; only the last window of a windowed drafter is ever read."""
        begin = start if self.spec.window is None else max(start, end - self.spec.window)
        if begin != self.injected:  # positions must follow each other unless the memory is empty
            self.drafter.clear()
            self.injected = begin
        return begin

    def rewind(self, length: int) -> bool:
        """Cut both memories to `length` positions; False if the target's cannot (then clear it)."""
        if self.length > length and not self.target.truncate(length):
            return False
        self.length = length
        self.injected = min(self.injected, length)
        self.drafter.truncate(self.injected)
        return True

    def forget(self, length: int = 0) -> None:
        """Note that the target's memory was replaced from outside and now holds `length` positions."""
        self.length = length
        self.injected = 0
        self._pending = (0, 0, 0)
        self.drafter.clear()

    def save(self) -> tuple[bytes, int]:
        """The drafter's memory and how far it reaches."""
        self.settle()
        return self.drafter.save(), self.injected

    def restore(self, drafter_memory: bytes, injected: int, length: int) -> None:
        """Undo `save`, after the target's memory was restored to `length` positions. Raises NativeError."""
        self.forget(length)
        self.drafter.restore(drafter_memory)
        self.injected = injected

    def reusable(self, prefix: int) -> int:
        """How much of a shared `prefix` can stay: all of it, unless it was processed while drafting was off.

        A windowed drafter may have dropped some of the window before `prefix`. The target is not made to process
        those tokens again: that would cost more than it gains, and would not leave its numbers bit for bit alike.
        """
        self.settle()
        return min(prefix, self.injected) if self.drafting else prefix

    def take_pending(self) -> tuple[int, int, int]:
        """Rows of the target's last batch to inject next, (first row, count, position), and forget them."""
        pending, self._pending = self._pending, (0, 0, 0)
        return pending

    def settle(self) -> None:
        """Inject what the last cycle accepted, while the target still holds its features."""
        first, n, position = self.take_pending()
        if n and self.drafting:
            inject(self.target, self.drafter, self.features, first=first, n=n, position=position)
            self.injected = position + n

    @property
    def surplus(self) -> int:
        """Rows at the end of the target's last batch that were rejected."""
        return self._surplus

    def finish(self, position: int, block: IntArray, accepted: int, kept: int) -> None:
        """Close the cycle at `position` that verified `block`: `kept` of its rows stay in the target."""
        self.length = position + kept
        self._pending = (0, kept, position)
        self._surplus = len(block) - kept
        self.recorder.cycle(len(block) - 1, accepted)
        if self.on_cycle is not None:
            self.on_cycle(record_of(position, block, accepted))
        if len(block) > 1:
            self._watch(accepted)

    def _watch(self, accepted: int) -> None:
        """Switch drafting off when a run of cycles accepted next to nothing."""
        cycles, total = self._watched[0] + 1, self._watched[1] + accepted
        self._watched = (cycles, total) if cycles < _WATCH_CYCLES else (0, 0)
        if cycles < _WATCH_CYCLES or total >= _LEAST_ACCEPTED * cycles or not self.auto_disable:
            return
        self._suspended = True
        warnings.warn(
            f"drafting is switched off: {total} draft tokens were accepted in {cycles} cycles. Likely causes: the "
            "drafter belongs to another target (or another fine-tune of it), the checkpoint was converted with the "
            "wrong taps or mask token, or the drafter's layers mix causal and non-causal attention, which this "
            "library runs as one kind. Set depth again to retry; auto_disable=False keeps drafting on.",
            RuntimeWarning,
            stacklevel=2,
        )

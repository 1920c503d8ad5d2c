"""The two contexts of a pair and what each holds; knows nothing of `llama_cpp.Llama`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dflash2.errors import ContextLimitError, Dflash2Error, NativeError
from dflash2.native import AttentionOptions, Bytes, Context, ContextOptions, IntArray, Model, Outputs, Placement
from dflash2.runtime.checkpoints import Checkpoint, CheckpointLimits, Checkpoints
from dflash2.runtime.depth import PLAIN, Step
from dflash2.runtime.injection import Injection, drafter_rows
from dflash2.runtime.pair import DrafterSpec
from dflash2.runtime.planning import Depth, Planner
from dflash2.runtime.stats import CycleRecord, Recorder, record_of

# A chat template's opening of the answer, which the next turn may render otherwise, lies behind a checkpoint; an
# evaluation shorter than the second figure is no prompt.
_TAIL = 4
_LEAST_PROMPT = 8
_F16, _BF16 = 1, 30


class Session:
    """A target context, its drafter, and the state of the cycle between them.

    Attributes:
        length: positions in the target's memory, rejected rows not yet dropped included.
        planner: how much the next cycle drafts.
        injection: the drafter's side: what it holds, and what is to be injected.
        noise, block: the drafter's input [B] and what is verified [B]; the first entry of both is the anchor.
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
        depth: Depth,
        n_ctx: int,
        auto_disable: bool,
        swa_full: bool = True,
        checkpoints: CheckpointLimits | None = None,
    ) -> None:
        """Load the drafter next to an open `target`; at most `n_ctx` positions will be used.

        `threads` (one row, many rows) are the target's, as is `swa_full`: whether its sliding layers keep every
        position. Raises NativeError, or Dflash2Error for a bad depth.
        """
        self.target = target
        self.spec = spec
        self.n_ctx = n_ctx
        self.recorder = Recorder(spec.block_size)
        self.on_cycle: Callable[[CycleRecord], None] | None = None
        self.length = 0
        self.noise: IntArray = np.full(spec.block_size, spec.mask_token, np.int32)
        self.block: IntArray = np.zeros(spec.block_size, np.int32)
        self._surplus = 0
        self._tapped = False
        self._midway = False  # within a cycle or a prompt: the memories are only right when it is finished
        quantised = not {attention.type_k, attention.type_v} <= {None, 0, _F16, _BF16}
        self.planner = Planner(target, spec, auto_disable=auto_disable, quantised_cache=quantised)
        self.checkpoints = Checkpoints(checkpoints or CheckpointLimits())
        # Whether the target's memory forgets what an earlier position needs.
        self._target_forgets = target.snapshots is not None or (target.window > 0 and not swa_full)
        rows = drafter_rows(spec.block_size, target.n_vocab)
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
            self.injection = Injection(
                target, self.drafter, rows=rows, width=spec.feature_width, cleared=self._drafter_cleared
            )
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
    def injecting(self) -> bool:
        """Whether the drafter is to have what the target processes now."""
        return self.planner.injecting

    @property
    def depth(self) -> Depth:
        """Draft tokens verified per cycle, "auto", or 0 for none; setting it also ends a suspension."""
        return self.planner.depth

    @depth.setter
    def depth(self, depth: Depth) -> None:
        self.planner.depth = depth
        self.injection.drop()
        self._tap()

    def _tap(self) -> None:
        """Have the target keep what is injected, or not."""
        self._tapped = self.injecting
        self.target.tap(self.spec.taps if self._tapped else ())

    def _tap_as_planned(self) -> None:
        if self.injecting != self._tapped:
            self.injection.skip()  # its features were not kept, or will not be
            self._tap()

    def pin(self, pinned: bool) -> None:
        """Note whether the request to come promises its tokens only if the depth is always the same."""
        self.planner.pin(pinned)
        self._tap_as_planned()

    def plan(self, position: int) -> Step:
        """What to do behind an anchor at `position`; raises ContextLimitError if not even it fits."""
        room = self.n_ctx - position - 1
        if room < 0:
            raise ContextLimitError(f"the context of {self.n_ctx} tokens is full; raise n_ctx or shorten the prompt.")
        self._midway = True
        step = self.planner.plan()
        self._tap_as_planned()
        if step.depth > room:
            step = Step(room, step.block) if room else PLAIN
        return step

    def evaluate(self, tokens: IntArray, start: int, *, all_logits: bool = False) -> Iterator[int]:
        """Process `tokens` at `start`..., batch by batch, injecting as needed; yields the position reached.

        Logits are kept for the last row of each batch, or for all. Raises NativeError if the target's memory
        cannot be cut to `start`.
        """
        if len(tokens):
            self.target.check_tokens(tokens)
        self.settle()
        if not self.rewind(start):
            raise NativeError(f"the target's memory cannot step back to position {start}; call reset() first.")
        self._midway = True
        stop = start + len(tokens)
        if stop - start >= _LEAST_PROMPT:
            self.planner.offer_prompt(stop - start)
        self._tap_as_planned()
        begin = self._begin_injection(start, stop) if self.injecting else None
        marks = self._marks(start, stop)
        for position, end in _batches(start, stop, self.target.n_batch, marks):
            self.length = end
            self._surplus = 0
            self.target.drop_rows()  # even if the batch is never decoded: those there belong to another position
            batch = tokens[position - start : end - start]
            self.target.decode_tokens(batch, position, Outputs.ALL if all_logits else Outputs.LAST)
            if begin is not None and begin < end:
                first = max(0, begin - position)
                self.injection.batch(first, len(batch) - first, position + first)
            if end in marks:
                self._checkpoint()
            yield end
        self._midway = False

    def _begin_injection(self, start: int, end: int) -> int:
        """First position worth injecting of start..end; only the last window of a windowed drafter is ever read.

        The last one of the checkpoint near a prompt's end, that is, which lies a few tokens before.
        """
        begin = start if self.spec.window is None else max(start, end - _TAIL - self.spec.window)
        self.injection.begin(begin)
        return begin

    def _drafter_cleared(self) -> None:
        if self.spec.window is None:  # layers that see everything lose what a checkpoint does not hold
            self.checkpoints.drop_drafter()

    def _marks(self, start: int, stop: int) -> tuple[int, ...]:
        """Positions within a prompt at which to take checkpoints."""
        if not self.checkpoints.limits.count or stop - start < _LEAST_PROMPT:
            return ()
        if not self._target_forgets:
            return (stop,) if self.injecting and self.drafter.window else ()
        step, tail = self.checkpoints.limits.step, stop - _TAIL
        spaced = range(max(start, self.checkpoints.last) + step, tail - step // 2, step)
        return (*spaced, tail)

    def _checkpoint(self) -> None:
        """Keep what the memories cannot bring back of the present position."""
        complete = self.drafter.window and self.injection.reached == self.length and self.drafter.reaches(self.length)
        target = self.target.save_part() if self._target_forgets else None
        drafter = self.drafter.save_part() if complete else None
        if target is not None or drafter is not None:
            self.checkpoints.add(Checkpoint(self.length, target, drafter))

    def checkpoint_if_due(self) -> None:
        """Take a checkpoint of a target that cannot step back, between two cycles, when enough tokens came since."""
        if self._target_forgets and self.length >= self.checkpoints.last + self.checkpoints.limits.step:
            self.inject(now=True)
            self._checkpoint()

    def rewind(self, length: int) -> bool:
        """Cut both memories to `length` positions; False if the target's cannot (nothing was cut then)."""
        if self.length > length and not (self.target.reaches(length) and self.target.truncate(length)):
            return False
        self._shorten(length, None)
        return True

    def _shorten(self, length: int, checkpoint: Checkpoint | None) -> None:
        """Cut the drafter to what the target was cut to, with the help of `checkpoint` if it lost its window."""
        self.length = length
        self.injection.cut(length, checkpoint)
        self.checkpoints.drop_beyond(length)

    def reuse(self, prefix: int) -> int:
        """Cut both memories to what can stay of a `prefix` shared with the next request; returns its length.

        All of it, unless the target was not drafted for then, or cannot step back so far: then the nearest
        checkpoint counts, or nothing. A windowed drafter may have dropped some of its window before `prefix`; the
        target is not made to process those tokens again, which would cost more than it gains.
        """
        self.settle()
        prefix = min(prefix, self.injection.reached) if self.injecting else prefix
        beyond = self.checkpoints.nearest(prefix + _TAIL)  # a drafter's window can be cut by a few tokens
        if beyond is not None and beyond.length < prefix:  # but it cannot skip any
            beyond = None
        if prefix > 0 and self.length > prefix and self.target.reaches(prefix) and self.target.truncate(prefix):
            self._shorten(prefix, beyond)
            return prefix
        if self.length == prefix:
            return prefix
        checkpoint = self.checkpoints.nearest(prefix)
        if checkpoint is None or checkpoint.target is None:
            self.target.clear()
            self.forget()
            return 0
        self.target.restore_part(checkpoint.target, checkpoint.length)
        self._shorten(checkpoint.length, checkpoint)
        return checkpoint.length

    def forget(self, length: int = 0) -> None:
        """Note that the target's memory was replaced from outside and now holds `length` positions."""
        self.target.replaced()
        self.length = length
        self.checkpoints.drop_beyond(0)
        self.injection.forget()

    def reset(self) -> None:
        """Empty both memories."""
        if self.length and not self.target.truncate(0):
            self.target.clear()
        self.forget()

    def adopt(self, length: int) -> bool:
        """Note that someone else went on in the target, to `length` positions; the drafter starts anew behind them.

        Returns whether the logits of the last position are there.
        """
        has_logits = self.target.adopt()
        self.length = length
        self._surplus = 0
        self.injection.drop()
        self.injection.restart(length)
        return has_logits

    def save(self) -> tuple[bytes, int]:
        """The drafter's memory and how far it reaches."""
        self.settle()
        return self.drafter.save().tobytes(), self.injection.reached

    def restore(self, drafter_memory: bytes, injected: int, length: int) -> None:
        """Undo `save`, after the target's memory was restored to `length` positions. Raises NativeError."""
        self.forget(length)
        self.drafter.restore(drafter_memory)
        self.injection.reached = injected

    def saved_for_rollback(self) -> Bytes | None:
        """The target's state before a verify pass, if it keeps no snapshots to step back by; else None."""
        return self.target.save_part() if self.target.snapshots == 0 else None

    def recover(self, length: int) -> None:
        """Make good what an exception in a cycle or prompt left behind; the caller knows `length` positions."""
        if self._midway:
            self._midway = False
            self.injection.drop()
            self.injection.cut(length)
            self.target.drop_rows()
            self._surplus = 0
            self.rewind(length)  # else later: the next evaluation says so

    def holds(self, length: int) -> bool:
        """Whether the target is at `length` positions, the logits of the last one included."""
        return self.length == length and self.target.has_logits

    def settle(self) -> None:
        """Inject what the last cycle accepted, while the target still holds its features."""
        self.inject(now=True)

    def inject(self, *, now: bool) -> None:
        """Take the features of what the last cycle accepted; inject them `now`, or with others when they are many."""
        if self.injecting:
            self.injection.collect()
        else:
            self.injection.skip()
        if now:
            self.injection.flush()

    @property
    def surplus(self) -> int:
        """Rows at the end of the target's last batch that were rejected."""
        return self._surplus

    def finish(self, position: int, block: IntArray, accepted: int, kept: int, surplus: int) -> None:
        """Close the cycle at `position` that verified `block`: `kept` of its rows stay in the target.

        `surplus` rejected rows still stand at the end of the target's last batch.
        """
        if kept or self.target.snapshots is None:  # else nothing was cut, see `rollback`
            self.length = position + kept
        self.injection.accepted(kept, position)
        self._surplus = surplus
        self._midway = False
        times = self.recorder.cycle(len(block) - 1, accepted)
        if self.on_cycle is not None:
            self.on_cycle(record_of(position, block, accepted))
        if kept == accepted + 1:  # else broken off
            self.planner.learn(len(block) - 1, accepted, times)

    def finish_plain(self, position: int) -> None:
        """Close a cycle without drafts: its only row stays."""
        self.injection.accepted(1, position)
        self._surplus = 0
        self._midway = False
        self.planner.learn(0, 0, self.recorder.cycle(0, 0))

    def coasts(self, position: int) -> bool:
        """Whether the token behind a plain one at `position` is plain too, without a plan."""
        self._midway = position < self.n_ctx and self.planner.coasts()
        return self._midway


def _batches(start: int, stop: int, most: int, marks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first position, end) of batches of `most` tokens that end at every mark."""
    position = start
    while position < stop:
        end = min(position + most, stop, *(mark for mark in marks if mark > position))
        yield position, end
        position = end

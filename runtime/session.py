"""The two contexts of a pair and what each holds; knows nothing of `llama_cpp.Llama`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dflash2.errors import ContextLimitError, Dflash2Error, NativeError
from dflash2.native import AttentionOptions, Bytes, Context, ContextOptions, IntArray, Model, Outputs, Placement
from dflash2.runtime.checkpoints import Checkpoint, CheckpointLimits, Checkpoints
from dflash2.runtime.depth import PLAIN, DepthController, Step
from dflash2.runtime.inject import inject
from dflash2.runtime.pair import DrafterSpec
from dflash2.runtime.stats import CycleRecord, Recorder, record_of
from dflash2.runtime.watchdog import Watchdog, warn

# Rows per injection call, at most. The drafter reserves head logits for all of them, whatever it is asked for: so
# few that these take no more than so many bytes.
_MOST_ROWS = 64
_LOGITS_BYTES = 32 << 20
# A chat template's opening of the answer, which the next turn may render otherwise, lies behind a checkpoint; an
# evaluation shorter than the second figure is no prompt.
_TAIL = 4
_LEAST_PROMPT = 8
_F16, _BF16 = 1, 30

Depth = int | Literal["auto"]


class Session:
    """A target context, its drafter, and the state of the cycle between them.

    Attributes:
        length: positions in the target's memory, rejected rows not yet dropped included.
        injected: the drafter holds injected positions up to here.
        noise, block: the drafter's input [B] and what is verified [B]; the first entry of both is the anchor.
        features: scratch of `inject`, [rows per call, feature width].
        draft_block: rows of a draft pass at a fixed depth, or more if the depth needs more.
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
        self.auto_disable = auto_disable
        self.recorder = Recorder(spec.block_size)
        self.on_cycle: Callable[[CycleRecord], None] | None = None
        self.draft_block = spec.block_size
        self.length = self.injected = 0
        self.noise: IntArray = np.full(spec.block_size, spec.mask_token, np.int32)
        self.block: IntArray = np.zeros(spec.block_size, np.int32)
        self._pending = (0, 0, 0)
        self._surplus = 0
        self._held = 0  # rows of `features` to be injected behind the present ones
        self._tapped = self._pinned = False
        self._coasting = False
        self._coast = self._coasted = 0  # plain tokens to come, and gone by, that are not planned
        self._suspended = False
        self._depth: Depth = 0
        self._controller: DepthController | None = None
        self._doubts = {
            "quantised_cache": not {attention.type_k, attention.type_v} <= {None, 0, _F16, _BF16},
            "mixed_causality": spec.mixed_causality,
        }
        self.checkpoints = Checkpoints(checkpoints or CheckpointLimits())
        # Whether the target's memory forgets what an earlier position needs.
        self._target_forgets = target.snapshots is not None or (target.window > 0 and not swa_full)
        rows = drafter_rows(spec.block_size, target.n_vocab)
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
        """Whether drafts may come, though perhaps not with the next token."""
        return self._depth != 0 and not self._suspended

    @property
    def injecting(self) -> bool:
        """Whether the drafter is to have what the target processes now."""
        return self.drafting and (self._controller is None or self._pinned or self._controller.ready)

    @property
    def depth(self) -> Depth:
        """Draft tokens verified per cycle, 0 for none; setting it also ends a suspension by the watchdog."""
        return self._depth

    @depth.setter
    def depth(self, depth: Depth) -> None:
        most = self.most_depth if depth == "auto" else depth
        if type(most) is not int or not 0 <= most < self.spec.block_size:
            raise Dflash2Error(
                f'depth must be "auto" or a whole number in 0..{self.spec.block_size - 1} for this drafter, '
                f"got {depth!r}."
            )
        if most >= self.target.n_batch:
            raise Dflash2Error(
                f"depth {depth} needs n_batch of at least {most + 1}, this target has {self.target.n_batch}; "
                "raise n_batch or lower depth."
            )
        snapshots = self.target.snapshots
        if snapshots and most > snapshots:
            raise Dflash2Error(
                f"depth {depth} needs a target that can step back {depth} tokens; this one's recurrent state keeps "
                f"{snapshots} snapshots. Make the object with this depth."
            )
        self._depth = depth
        self._suspended = self._pinned = False
        self._coast = self._coasted = 0
        self._pending = (0, 0, 0)
        self._held = 0
        if depth == "auto" and most > 0:
            self._controller = DepthController(most, self.spec.block_size, self.spec.window)
        else:
            self._controller = None
            self._depth = most
        self._watchdog = Watchdog(judge_speed=self._controller is None, **self._doubts)
        self._tap()

    @property
    def most_depth(self) -> int:
        """The largest depth that block, batch and snapshots allow."""
        most = min(self.spec.block_size, self.target.n_batch) - 1
        return min(most, self.target.snapshots) if self.target.snapshots else most

    def _tap(self) -> None:
        """Have the target keep what is injected, or not."""
        self._tapped = self.injecting
        self.target.tap(self.spec.taps if self._tapped else ())

    def pin(self, pinned: bool) -> None:
        """Note whether the request to come promises its tokens only if the depth is always the same."""
        self._pinned = pinned
        self._coast = self._coasted = 0
        if self.injecting != self._tapped:
            self._pending = (0, 0, 0)
            self._tap()

    def plan(self, position: int) -> Step:
        """What to do behind an anchor at `position`; raises ContextLimitError if not even it fits."""
        room = self.n_ctx - position - 1
        if room < 0:
            raise ContextLimitError(f"the context of {self.n_ctx} tokens is full; raise n_ctx or shorten the prompt.")
        self._coasting = self._coast > 0
        if self._coasting:
            self._coast -= 1
            return PLAIN
        step = self._choose() if self.drafting else PLAIN
        if self.injecting != self._tapped:
            self._pending = (0, 0, 0)  # its features were not kept
            self._tap()
        if step.depth > room:
            step = Step(room, step.block) if room else PLAIN
        return step

    def _choose(self) -> Step:
        if self._controller is None:
            assert isinstance(self._depth, int)
            plain = self._watchdog.wants_plain and self.auto_disable and not self._pinned
            return PLAIN if plain else Step(self._depth, max(self.draft_block, self._depth + 1))
        if self._pinned or (self._watchdog.doubtful and self._controller.ready):
            return self._controller.most()
        return self._controller.plan()

    def evaluate(self, tokens: IntArray, start: int, *, all_logits: bool = False) -> Iterator[int]:
        """Process `tokens` at `start`..., batch by batch, injecting as needed; yields the position reached.

        Logits are kept for the last row of each batch, or for all. Raises NativeError if the target's memory
        cannot be cut to `start`.
        """
        self.settle()
        if not self.rewind(start):
            raise NativeError(f"the target's memory cannot step back to position {start}; call reset() first.")
        stop = start + len(tokens)
        if self._controller is not None and stop - start >= _LEAST_PROMPT and self._controller.offer_prompt():
            self._controller.saw_prompt(stop - start)
        if self.injecting != self._tapped:
            self._tap()
        begin = self._begin_injection(start, stop) if self.injecting else None
        marks = self._marks(start, stop)
        for position, end in _batches(start, stop, self.target.n_batch, marks):
            self.length = end
            self._surplus = 0
            batch = tokens[position - start : end - start]
            self.target.decode_tokens(batch, position, Outputs.ALL if all_logits else Outputs.LAST)
            if begin is not None and begin < end:
                first = max(0, begin - position)
                n = len(batch) - first
                inject(self.target, self.drafter, self.features, first=first, n=n, position=position + first)
                self.injected = end
            if end in marks:
                self._checkpoint()
            yield end

    def _begin_injection(self, start: int, end: int) -> int:
        """First position worth injecting of start..end; only the last window of a windowed drafter is ever read.

        The last one of the checkpoint near a prompt's end, that is, which lies a few tokens before.
        """
        begin = start if self.spec.window is None else max(start, end - _TAIL - self.spec.window)
        if begin != self.injected:  # positions must follow each other unless the memory is empty
            self._clear_drafter()
            self.injected = begin
        return begin

    def _clear_drafter(self) -> None:
        self.drafter.clear()
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
        complete = self.drafter.window and self.injected == self.length and self.drafter.reaches(self.length)
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
        self.injected = min(self.injected, length)
        if checkpoint is not None and checkpoint.drafter is not None and not self.drafter.reaches(self.injected):
            self.drafter.restore_part(checkpoint.drafter, checkpoint.length)
        _cut(self.drafter, self.injected)
        self.checkpoints.drop_beyond(length)

    def reuse(self, prefix: int) -> int:
        """Cut both memories to what can stay of a `prefix` shared with the next request; returns its length.

        All of it, unless the target was not drafted for then, or cannot step back so far: then the nearest
        checkpoint counts, or nothing. A windowed drafter may have dropped some of its window before `prefix`; the
        target is not made to process those tokens again, which would cost more than it gains.
        """
        self.settle()
        prefix = min(prefix, self.injected) if self.injecting else prefix
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
        self.injected = 0
        self._pending = (0, 0, 0)
        self._held = 0
        self.checkpoints.drop_beyond(0)
        self.drafter.clear()

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
        self._clear_drafter()
        self.length = self.injected = length
        self._pending = (0, 0, 0)
        self._surplus = self._held = 0
        return has_logits

    def save(self) -> tuple[bytes, int]:
        """The drafter's memory and how far it reaches."""
        self.settle()
        return self.drafter.save().tobytes(), self.injected

    def restore(self, drafter_memory: bytes, injected: int, length: int) -> None:
        """Undo `save`, after the target's memory was restored to `length` positions. Raises NativeError."""
        self.forget(length)
        self.drafter.restore(drafter_memory)
        self.injected = injected

    def saved_for_rollback(self) -> Bytes | None:
        """The target's state before a verify pass, if it keeps no snapshots to step back by; else None."""
        return self.target.save_part() if self.target.snapshots == 0 else None

    def settle(self) -> None:
        """Inject what the last cycle accepted, while the target still holds its features."""
        self.inject(now=True)

    def inject(self, *, now: bool) -> None:
        """Take the features of what the last cycle accepted; inject them `now`, or with others when they are many."""
        (first, n, position), self._pending = self._pending, (0, 0, 0)
        if n and self.injecting:
            if position != self.injected + self._held:
                self._clear_drafter()
                self.injected, self._held = position, 0
            while n:
                if self._held == len(self.features):
                    self._flush()
                part = self.features[self._held : self._held + n]
                self.target.layer_inputs(first, part)
                first, n, self._held = first + len(part), n - len(part), self._held + len(part)
        if now:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            # Given up first: if an interrupt comes in between, positions no longer follow, and the drafter starts anew.
            held, self._held = self._held, 0
            self.drafter.decode_features(self.features[:held], self.injected)
            self.injected += held

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
        self._pending = (0, kept, position)
        self._surplus = surplus
        times = self.recorder.cycle(len(block) - 1, accepted)
        if self.on_cycle is not None and len(block) > 1:
            self.on_cycle(record_of(position, block, accepted))
        if kept != accepted + 1:  # broken off
            return
        if self._controller is not None and not self._pinned:
            if self._coasting:
                return
            self._controller.observe(len(block) - 1, accepted, times, self._coasted)
            self._coast = self._coasted = self._controller.coast()
        if not self.drafting:
            return
        watch = self._watchdog
        reason = watch.observe(accepted, times.total) if len(block) > 1 else watch.observe_plain(times.total)
        if reason is not None and self.auto_disable:
            self._suspended = True
            warn(reason)


def drafter_rows(block_size: int, n_vocab: int) -> int:
    """Rows per batch of the drafter: its block at least, and so few that their logits take little memory."""
    return max(block_size, min(_MOST_ROWS, _LOGITS_BYTES // (4 * n_vocab)))


def _batches(start: int, stop: int, most: int, marks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first position, end) of batches of `most` tokens that end at every mark."""
    position = start
    while position < stop:
        end = min(position + most, stop, *(mark for mark in marks if mark > position))
        yield position, end
        position = end


def _cut(drafter: Context, length: int) -> None:
    if not drafter.truncate(length):
        raise NativeError(f"the drafter's memory cannot be cut to {length} positions.")

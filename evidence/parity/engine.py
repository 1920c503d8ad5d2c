"""What llama.cpp computes for a block: a target alone gives the features, a drafter is observed operation by operation.

Each block is drafted once more without an observer, since llama.cpp may fuse operations that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash2.native import (
    Context,
    ContextOptions,
    FloatArray,
    IntArray,
    Model,
    Observer,
    Operation,
    Outputs,
    Placement,
    silence,
)
from dflash2.runtime import DrafterSpec, read_pair, select


@dataclass(frozen=True)
class Drafted:
    """One block as llama.cpp drafted it.

    Attributes:
        features: injected before it, [P, taps * hidden size].
        injected, block: observed results by name, rows first.
        tokens: the block [B], at position P.
        rows: what the selector wrote [B - 1, hidden size], or logits [B - 1, vocabulary].
        proposal: the tokens drafted when nothing is observed, [B - 1].
    """

    features: FloatArray
    injected: Mapping[str, FloatArray]
    block: Mapping[str, FloatArray]
    tokens: IntArray
    rows: FloatArray
    proposal: IntArray


class _Results:
    """Results of the graphs since the last `take` by name; a result of several batches is joined."""

    def __init__(self) -> None:
        self.n = 0  # rows of the batch that is being evaluated
        self._parts: dict[str, list[FloatArray]] = {}

    def note(self, operation: Operation) -> None:
        """Keep a result whose rows are those of the batch, as [n, everything else]."""
        values = operation.values
        if values is not None and operation.name and self.n in values.shape[1:3]:
            self._parts.setdefault(operation.name, []).append(values.reshape(self.n, -1))

    def take(self, n: int) -> dict[str, FloatArray]:
        """Results that have `n` rows in all; forgets everything."""
        taken, self._parts = self._parts, {}
        return {
            name: np.concatenate(parts)
            for name, parts in taken.items()
            if sum(map(len, parts)) == n and len({part.shape[1] for part in parts}) == 1
        }


def drafted(
    target: Path,
    drafter: Path,
    text: Sequence[int],
    positions: Sequence[int],
    *,
    options: ContextOptions,
    placement: Placement,
) -> Iterator[Drafted]:
    """Draft a block at each of `positions` (ascending, within `text`) behind the features of all tokens before it.

    Raises NativeError, TargetMismatchError or GGUFError.
    """
    spec = read_pair(target, drafter)
    silence()
    results = _Results()
    observer = Observer(results.note)
    with _contexts(target, drafter, spec, options, placement, observer) as (context, watched, plain):
        features = _features(context, spec, np.asarray(text, np.int32), options.n_batch)
        injected: dict[str, FloatArray] = {}
        reached = 0
        for position in positions:
            for first in range(reached, position, options.n_batch):
                part = features[first : min(first + options.n_batch, position)]
                results.n = len(part)
                plain.decode_features(part, first)
                watched.decode_features(part, first)
            if observer.raised is not None:
                raise observer.raised
            for name, values in results.take(position - reached).items():
                injected[name] = np.concatenate([injected[name], values]) if name in injected else values
            reached = position
            tokens = np.full(spec.block_size, spec.mask_token, np.int32)
            tokens[0] = text[position]
            proposal = select(_draft(plain, spec, tokens, position), spec.top_k).tokens
            results.n = len(tokens)
            rows = _draft(watched, spec, tokens, position)
            if observer.raised is not None:
                raise observer.raised
            block = results.take(len(tokens))
            yield Drafted(features[:position], dict(injected), block, tokens, rows, proposal)


@contextmanager
def _contexts(
    target: Path,
    drafter: Path,
    spec: DrafterSpec,
    options: ContextOptions,
    placement: Placement,
    observer: Observer,
) -> Iterator[tuple[Context, Context, Context]]:
    """The tapped target, the observed drafter and the drafter as it runs."""
    width = spec.feature_width
    with (
        closing(Model(target, placement)) as target_model,
        closing(Model(drafter, placement)) as drafter_model,
        closing(Context.open(target_model, options)) as context,
        closing(Context.open(drafter_model, options, other=context, feature_width=width, observer=observer)) as watched,
        closing(Context.open(drafter_model, options, other=context, feature_width=width)) as plain,
    ):
        context.tap(spec.taps)
        for one in (watched, plain):
            one.set_causal(spec.causal)
            if spec.top_k:
                one.output_lattice()
        yield context, watched, plain


def _features(context: Context, spec: DrafterSpec, tokens: IntArray, n_batch: int) -> FloatArray:
    features = np.empty((len(tokens), spec.feature_width), np.float32)
    for first in range(0, len(tokens), n_batch):
        part = tokens[first : first + n_batch]
        context.decode_tokens(part, first, Outputs.LAST)
        context.layer_inputs(0, features[first : first + len(part)])
    return features


def _draft(context: Context, spec: DrafterSpec, tokens: IntArray, position: int) -> FloatArray:
    context.decode_tokens(tokens, position, Outputs.NONE if spec.top_k else Outputs.ALL)
    rows: FloatArray = (context.lattice() if spec.top_k else context.logits())[1:].copy()
    context.truncate(position)
    return rows

"""Judges the stages: which of them drift, and which is the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import GGMLQuantizationType

from dflash2.errors import EvidenceError
from dflash2.evidence.parity.engine import Drafted, drafted
from dflash2.native import ContextOptions, FloatArray, Placement

if TYPE_CHECKING:
    from dflash2.evidence.parity.stages import Computed, Seen, Walk
    from dflash2.evidence.parity.weights import Weights

_TIMES = 4.0  # how far an error may exceed that of the simulated rounding: sums are rounded too, in another order
_FLOOR = 2e-5  # single precision: rounding of sums, of exp and of rotation angles
_ANGLE = 2e-7  # per position: an angle of rotation is a product in single precision
_ROTATED = ("queries", "keys", "injected keys")
_GPU_FLOOR = 2e-3  # CUDA multiplies single precision in TF32 (10 bits)
_DEFAULT_CACHE = GGMLQuantizationType.F16  # llama.cpp's
# Relative error (RMS) of weights of a type, at most.
_WEIGHT_ERRORS = {
    "F32": 1e-6,
    "F16": 5e-4,
    "BF16": 4e-3,
    "Q8_0": 0.01,
    "Q6_K": 0.03,
    "Q5_K": 0.05,
    "Q5_0": 0.06,
    "Q4_K": 0.1,
    "Q4_0": 0.13,
}
_OTHER_WEIGHTS = 0.5


@dataclass(frozen=True)
class StageResult:
    """One stage over all blocks; errors are relative to the reference's row (L2), the worst row of all.

    Attributes:
        name, layer: which; layer is None outside the layers.
        error: of llama.cpp against the reference with the same weights, both fed llama.cpp's own previous stage.
        limit: what the arithmetic of this stage explains.
        weights: the same against the checkpoint's weights and settings, None without a checkpoint.
        weights_limit: what the types of the weights explain.
    """

    name: str
    layer: int | None
    error: float
    limit: float
    weights: float | None = None
    weights_limit: float | None = None

    @property
    def engine_drifts(self) -> bool:
        """Whether llama.cpp computes something else than the file says."""
        return not self.error <= self.limit

    @property
    def weights_drift(self) -> bool:
        """Whether the file says something else than the checkpoint."""
        return self.weights is not None and self.weights_limit is not None and not self.weights <= self.weights_limit

    @property
    def drifts(self) -> bool:
        """Either."""
        return self.engine_drifts or self.weights_drift

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


@dataclass(frozen=True)
class Parity:
    """Outcome: the stages in order of computation, and how many of `n_blocks` proposals were the reference's."""

    stages: tuple[StageResult, ...]
    n_blocks: int
    n_equal: int

    @property
    def first(self) -> StageResult | None:
        """The first stage that drifts."""
        return next((stage for stage in self.stages if stage.drifts), None)


def parity(
    target: Path,
    drafter: Path,
    texts: Sequence[Sequence[int]],
    *,
    checkpoint: Path | None = None,
    n_blocks: int = 4,
    options: ContextOptions,
    placement: Placement | None = None,
) -> Parity:
    """Compare `n_blocks` blocks of each of `texts` (token ids), spread over its second half.

    `checkpoint` is the drafter's checkpoint as a GGUF in F32. Raises EvidenceError without PyTorch, or for a drafter
    that the reference does not compute, NativeError, TargetMismatchError, GGUFError.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EvidenceError("parity needs PyTorch: pip install 'llama-dflash2[reference]'.") from error
    from dflash2.evidence.parity.weights import Weights

    placement = placement or Placement()
    variants = [Weights(drafter, target, rounding=False), Weights(drafter, target, rounding=True)]
    if checkpoint is not None:
        variants.append(Weights(checkpoint, target, rounding=False))
    judge = _Judge(tuple(variants), _FLOOR if not placement.n_gpu_layers else _GPU_FLOOR)
    cache_type = GGMLQuantizationType(_DEFAULT_CACHE if options.type_k is None else options.type_k).name
    for text in texts:
        positions = sorted({len(text) // 2 + i * (len(text) - len(text) // 2) // n_blocks for i in range(n_blocks)})
        for block in drafted(target, drafter, text, positions, options=options, placement=placement):
            judge.block(block, cache_type)
    return judge.outcome()


class _Judge:
    """Gathers the worst of every stage."""

    def __init__(self, weights: tuple[Weights, ...], floor: float) -> None:
        self._weights, self._floor = weights, floor
        self._found: dict[tuple[str, int | None], list[StageResult]] = {}
        self._n_blocks = self._n_equal = 0

    def block(self, drafted: Drafted, cache_type: str) -> None:
        """Add one block."""
        seen = _seen(drafted, cache_type)
        walks = [self._walk(weights, seen) for weights in self._weights]
        for computed in zip(*(walk.stages() for walk in walks), strict=True):
            self._stage(computed, _ANGLE * len(seen.features) if computed[0].name in _ROTATED else 0.0)
        self._selected(drafted, walks)
        self._n_blocks += 1
        unaided = replace(seen, injected={}, block={})
        alone = self._walk(self._weights[0], unaided)
        alone.stages()
        self._n_equal += alone.proposal() == drafted.proposal.tolist()

    @staticmethod
    def _walk(weights: Weights, seen: Seen) -> Walk:
        from dflash2.evidence.parity.stages import Walk

        return Walk(weights, seen)

    def _stage(self, computed: Sequence[Computed], angles: float = 0.0) -> None:
        exact, rounding = computed[0], computed[1]
        error = _error(exact.observed, exact.value)
        limit = self._floor + angles + _TIMES * _error(rounding.value, exact.value)
        weights = weights_limit = None
        if len(computed) > 2:
            weights = _error(exact.value, computed[2].value)
            weights_limit = self._floor + _TIMES * sum(map(self._weight_error, exact.tensors))
        self._add(StageResult(exact.name, exact.layer, error, limit, weights, weights_limit))

    def _weight_error(self, name: str) -> float:
        if not self._weights[0].has(name):
            return 0.0  # the target's, on both sides
        kind = self._weights[0].type_of(name)
        return _WEIGHT_ERRORS.get(kind, _OTHER_WEIGHTS)

    def _selected(self, drafted: Drafted, walks: Sequence[Walk]) -> None:
        """Candidates, pair scores and proposals, each from llama.cpp's own previous stage."""
        import torch

        k = self._weights[0].geometry.top_k
        if k:
            ids = torch.from_numpy(drafted.rows[:, :k].astype("int64"))
            logits = walks[0].logits[1:]
            self._add(StageResult("candidates", None, _missed(logits, ids), 0.0))
            own = torch.from_numpy(drafted.rows[:, k : k + k * k].copy()).double().reshape(-1, k, k)
            own[0] = own[0, :1]  # one predecessor, the anchor: a patched library writes its row once
            scores = [walk.pair_scores(walk.hidden[1:], logits, ids) for walk in walks]
            self._scores(own.flatten(1), [one.flatten(1) for one in scores])
        limit = max(one.limit for one in self._found["logits", None])
        self._add(StageResult("proposals", None, _lost(drafted.rows, drafted.proposal.tolist(), k), limit))

    def _scores(self, own: Any, values: Sequence[Any]) -> None:
        from dflash2.evidence.parity.stages import Computed

        tensors = tuple(f"selector_{part}.weight" for part in ("hidden", "predecessor", "successor"))
        self._stage([Computed("pair scores", None, own, value, tensors) for value in values])

    def _add(self, result: StageResult) -> None:
        self._found.setdefault((result.name, result.layer), []).append(result)

    def outcome(self) -> Parity:
        """The block of every stage that is nearest to its limit, or furthest beyond it."""
        stages = tuple(max(results, key=_excess) for results in self._found.values())
        return Parity(stages, self._n_blocks, self._n_equal)


def _excess(stage: StageResult) -> float:
    engine = stage.error / max(stage.limit, 1e-30)
    return max(engine, (stage.weights or 0.0) / max(stage.weights_limit or 0.0, 1e-30))


def _missed(logits: Any, ids: Any) -> float:
    """How far the least candidate of `ids` [n, K] lies below the K-th best logit; 1 if one is there twice."""
    k = ids.shape[1]
    if any(len(set(row)) < k for row in ids.tolist()):
        return 1.0
    worst, least = logits.topk(k, -1).values[:, -1], logits.gather(-1, ids).min(-1).values
    return float((worst - least).max())


def _lost(rows: FloatArray, proposal: Sequence[int], k: int) -> float:
    """How far the choices of an unobserved run lie below the best ones by the observed `rows`, relative to the best.

    What nobody observes may be fused and so rounded elsewhere: a near-tie may fall the other way. 1 for a token that
    is no candidate.
    """
    most, at = 0.0, 0
    for row, token in zip(rows, proposal, strict=True):
        scores, place = row, token
        if k:
            ids = row[:k].astype(int).tolist()
            if token not in ids:
                return 1.0
            scores, place = row[k + k * at : k + k * (at + 1)], ids.index(token)
        most = max(most, float(scores.max() - scores[place]) / max(float(abs(scores).max()), 1e-12))
        at = place
    return most


def _seen(drafted: Drafted, cache_type: str) -> Seen:
    import torch

    from dflash2.evidence.parity.stages import Seen

    def double(values: Any) -> Any:
        return torch.from_numpy(values).double()

    return Seen(
        features=double(drafted.features),
        injected={name: double(values) for name, values in drafted.injected.items()},
        block={name: double(values) for name, values in drafted.block.items()},
        tokens=torch.from_numpy(drafted.tokens).long(),
        cache_type=cache_type,
    )


def _error(values: Any, reference: Any) -> float:
    """Largest relative distance of a row: |values - reference| / |reference|."""
    flat, true = values.flatten(1), reference.flatten(1)
    distance = (flat - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-12)
    return float(distance.max())

"""Inject: write the drafter's keys and values of positions the target has processed."""

from __future__ import annotations

from dflash2.native import Context, FloatArray


def inject(target: Context, drafter: Context, buffer: FloatArray, *, first: int, n: int, position: int) -> None:
    """Inject rows `first`..`first + n` of the target's last batch; row `first` stands at `position`.

    The drafter projects the tapped layers' inputs to its own K and V (no query, no convolution on these rows).
    `buffer` [chunk, feature_width] is scratch; its length is the most rows per call. Raises NativeError.
    """
    for done in range(0, n, len(buffer)):
        features = buffer[: min(len(buffer), n - done)]
        target.layer_inputs(first + done, features)
        drafter.decode_features(features, position + done)

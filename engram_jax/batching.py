"""Batches padded to a few sizes, so that a serving loop compiles a few times only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .arguments import as_array, check_ragged

TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192)
REQUEST_BUCKETS = (1, 8, 32, 128, 512)

# What a padded place holds: nothing reads it, but it must not look like a token.
_FILL = {
    "input_ids": -1,
    "positions": 0,
    "dead_mask": True,
    "slot_mapping": -1,
    "lookback_token_ids": -1,
    "lookback_dead_mask": False,
    "block_table": -1,
}
_PER_TOKEN = ("input_ids", "positions", "dead_mask", "slot_mapping")
_TOKEN_IDS = ("input_ids", "lookback_token_ids")
_MASKS = ("dead_mask", "lookback_dead_mask")


def bucket_size(size: int, buckets: Sequence[int]) -> int:
    """Choose the smallest bucket that holds `size`.

    Args:
        size: how many there are.
        buckets: the sizes to choose from, in any order.

    Returns:
        The bucket; beyond the largest, the next multiple of it.

    Raises:
        ValueError: there is no bucket, or one below 1.

    Example:
        >>> bucket_size(9, (1, 8, 32)), bucket_size(33, (1, 8, 32))
        (32, 64)
    """
    if not buckets or min(buckets) < 1:
        raise ValueError(f"buckets is {tuple(buckets)}; it must hold sizes from 1 up")
    largest = max(buckets)
    if size > largest:
        return -(-size // largest) * largest
    return min(bucket for bucket in buckets if bucket >= size)


def pad_batch(
    *,
    input_ids: Any,
    positions: Any,
    query_start_loc: Any,
    token_buckets: Sequence[int] = TOKEN_BUCKETS,
    request_buckets: Sequence[int] = REQUEST_BUCKETS,
    **per_token_or_request: Any,
) -> dict[str, Any]:
    """Pad a ragged batch with tokens of no request and requests of no token.

    Padded tokens hash to -1 and pass the gate as they are; padded requests are empty.
    The hidden states are the caller's to pad, to `len(result["input_ids"])`.

    Args:
        input_ids: raw token ids [T].
        positions: each token's place in its request [T].
        query_start_loc: where each request's tokens start, and the end of the last
            [R + 1].
        token_buckets: the sizes that T is padded to.
        request_buckets: the sizes that R is padded to.
        **per_token_or_request: `dead_mask`, `slot_mapping`, `lookback_token_ids`,
            `lookback_dead_mask` or `block_table`, as `NgramHashState` takes them.

    Returns:
        The same arguments in NumPy, int32 and bool, padded: `stack.batch(**padded)`,
        inside jit or not.

    Raises:
        TypeError: an argument is none of these, or has the wrong dtype.
        ValueError: lengths do not fit each other, or an integer does not fit int32.

    Example:
        >>> padded = pad_batch(input_ids=[5, 6, 7], positions=[0, 1, 0],
        ...                    query_start_loc=[0, 2, 3], token_buckets=(4,),
        ...                    request_buckets=(3,))
        >>> padded["input_ids"].tolist(), padded["query_start_loc"].tolist()
        ([5, 6, 7, -1], [0, 2, 3, 3])
    """
    starts = _narrow("query_start_loc", query_start_loc)
    if starts.ndim != 1 or not len(starts):
        raise ValueError(
            f"query_start_loc has shape {starts.shape}; it must hold R + 1 offsets"
        )
    check_ragged(starts, len(input_ids))
    sizes = {"tokens": len(input_ids), "requests": len(starts) - 1}
    padded_sizes = {
        "tokens": bucket_size(sizes["tokens"], token_buckets),
        "requests": bucket_size(sizes["requests"], request_buckets),
    }
    missing = padded_sizes["requests"] - sizes["requests"]
    padded: dict[str, Any] = {"query_start_loc": np.pad(starts, (0, missing), "edge")}
    given = {"input_ids": input_ids, "positions": positions, **per_token_or_request}
    for name, values in given.items():
        if name not in _FILL:
            raise TypeError(f"pad_batch does not know {name!r}; it pads {list(_FILL)}")
        if values is None:
            continue
        array = _narrow(name, values)
        counted = "tokens" if name in _PER_TOKEN else "requests"
        if not array.ndim or len(array) != sizes[counted]:
            raise ValueError(
                f"{name} has shape {array.shape}; its first axis must be the "
                f"{sizes[counted]} {counted} of the batch"
            )
        rows = padded_sizes[counted] - sizes[counted]
        widths = [(0, rows), *[(0, 0)] * (array.ndim - 1)]
        padded[name] = np.pad(array, widths, constant_values=_FILL[name])
    return padded


def _narrow(name: str, values: Any) -> np.ndarray:
    """Take bools, or integers as int32: jit would cut wider ones off, silently."""
    array = np.asarray(as_array(values))
    if name in _MASKS:
        array = array.astype(bool) if not array.size else array
        if array.dtype != np.bool_:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be bool")
        return array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; it must be integers")
    limits = np.iinfo(np.int32)
    wrong = (array < limits.min) | (array > limits.max)
    if wrong.any():
        what = "token ids" if name in _TOKEN_IDS else "its values"
        raise ValueError(
            f"{name} holds {array[wrong][0]}; {what} must be within int32, "
            f"{limits.min}..{limits.max}: cut off, it would name another token or place"
        )
    return array.astype(np.int32)

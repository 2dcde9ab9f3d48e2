"""Check what callers pass for a batch: lists, NumPy or JAX arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32, Integer

from .kernels.ids import narrow_ids

# A device array, a NumPy array or a (nested) list. The docstrings of the functions that
# take them give the shapes, which they check.
Ints = Integer[Array, "..."] | Integer[np.ndarray, "..."] | Sequence[Any]
Bools = Bool[Array, "..."] | Bool[np.ndarray, "..."] | Sequence[Any]


def _known(*arrays: Any) -> bool:
    """Say whether values are there to be looked at: not inside jit."""
    return not any(isinstance(array, Tracer) for array in arrays)


def check_shape(
    name: str, array: Array | np.ndarray, wanted: tuple[int | None, ...]
) -> None:
    """Refuse an array of another shape; None stands for any length."""
    fits = array.ndim == len(wanted) and all(
        want is None or have == want
        for have, want in zip(array.shape, wanted, strict=True)
    )
    if not fits:
        shown = ", ".join("any" if want is None else str(want) for want in wanted)
        raise ValueError(f"{name} has shape {array.shape}; it must be [{shown}]")


def as_mask(name: str, mask: Any, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """Take a bool array of a shape, or None."""
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray | jax.Array) and len(mask) == 0:
        mask = np.zeros(np.shape(mask), bool)  # an empty list says nothing of its dtype
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{name} has dtype {mask.dtype}; it must be bool")
    check_shape(name, mask, shape)
    return mask


def _check_vocabulary(name: str, ids: Any, live: Any, vocab_size: int) -> None:
    """Refuse known ids outside the vocabulary; -1 says that there is no token."""
    ids = np.asarray(ids)
    wrong = ((ids < -1) | (ids >= vocab_size)) & np.asarray(live)
    if wrong.any():
        place = tuple(int(axis) for axis in np.argwhere(wrong)[0])
        raise ValueError(
            f"{name}{list(place)} is {ids[place]}; token ids must be within "
            f"0..{vocab_size - 1} (-1: no token). The ids come from another "
            "tokenizer, or from tokens not sampled yet: mark those in dead_mask"
        )


def as_ragged(
    input_ids: Any, query_start_loc: Any
) -> tuple[Int32[Array, " T"], Int32[Array, " R_plus_1"]]:
    """Take a batch's token ids and request offsets, as int32."""
    input_ids = narrow_ids(as_array(input_ids), "input_ids")
    check_shape("input_ids", input_ids, (None,))
    starts = narrow_ids(as_array(query_start_loc), "query_start_loc")
    check_shape("query_start_loc", starts, (None,))
    if starts.shape[0] == 0:
        raise ValueError("query_start_loc is empty; it must hold R + 1 offsets")
    return input_ids, starts


def check_ragged(query_start_loc: Any, num_tokens: int) -> None:
    """Refuse known request offsets that do not partition the batch."""
    starts = np.asarray(query_start_loc)
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc is {starts.tolist()}; it must start at 0, not decrease, "
            f"and end at or before the {num_tokens} tokens of input_ids"
        )


def _check_positions(positions: Any, starts: Any) -> None:
    """Refuse known positions that a request cannot have."""
    starts = np.asarray(starts)
    positions = np.asarray(positions)[: starts[-1]]
    if (positions < 0).any():
        raise ValueError(
            f"positions holds {int(positions.min())}; positions count from 0, the "
            "request's first token, and are int32"
        )
    follows = (positions[1:] == positions[:-1] + 1) | (positions[1:] == 0)
    begins = starts[(starts > 0) & (starts < len(positions))]
    follows[begins - 1] = True
    if not follows.all():
        place = int(np.flatnonzero(~follows)[0])
        raise ValueError(
            f"positions[{place + 1}] is {int(positions[place + 1])} after "
            f"{int(positions[place])} in one request; places in a request follow each "
            "other (or begin again at 0), and query_start_loc says where one begins"
        )


def check_slots(slot_cache: Any, slot_mapping: Any, query_start_loc: Any) -> None:
    """Refuse a slot cache that cannot hold what the batch writes."""
    if not isinstance(slot_cache, jax.Array) or slot_cache.dtype != jnp.int32:
        found = getattr(slot_cache, "dtype", "no dtype")
        raise TypeError(
            f"slot_cache is a {type(slot_cache).__name__} of {found}; it must be an "
            "int32 JAX array, as init_slot_cache makes it"
        )
    check_shape("slot_cache", slot_cache, (None,))
    if not _known(slot_mapping, query_start_loc):
        return
    written = np.asarray(slot_mapping)[: np.asarray(query_start_loc)[-1]]
    if (written >= slot_cache.shape[0]).any():
        raise ValueError(
            f"slot_mapping holds {int(written.max())}, but slot_cache has "
            f"{slot_cache.shape[0]} slots; that token would be forgotten. Give "
            "init_slot_cache as many slots as the KV cache has (-1: no slot)"
        )


def check_values(
    vocab_size: int,
    input_ids: Any,
    positions: Any | None,
    starts: Any,
    dead_mask: Any = None,
    lookback_ids: Any = None,
    lookback_dead: Any = None,
) -> None:
    """Refuse values of a batch that are known, not traced, and out of range.

    Takes `NgramHashState.__call__`'s arguments as given, before narrowing: `narrow_ids`
    turns ids beyond int32 into -1, "no token".
    """
    if not _known(starts):
        return
    check_ragged(starts, input_ids.shape[0])
    token = np.arange(input_ids.shape[0])
    # Through NumPy: inside jit, indexing a known array gives a traced value.
    valid = token < int(np.asarray(starts)[-1])
    if positions is not None and _known(positions):
        _check_positions(positions, starts)
    if _known(input_ids, dead_mask):
        live = valid if dead_mask is None else valid & ~np.asarray(dead_mask)
        _check_vocabulary("input_ids", input_ids, live, vocab_size)
    if lookback_ids is not None and _known(lookback_ids, lookback_dead):
        live = True if lookback_dead is None else ~np.asarray(lookback_dead)
        _check_vocabulary("lookback_token_ids", lookback_ids, live, vocab_size)


def as_array(values: Any) -> Any:
    """Turn a list into a NumPy array, before JAX narrows wide ids."""
    if values is None or isinstance(values, np.ndarray | jax.Array):
        return values
    array = np.asarray(values)
    return array if array.size else array.astype(np.int32)

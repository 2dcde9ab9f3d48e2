"""Integers that name tokens or rows, brought to int32 without truncation."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer

OUTSIDE = -1
"""The id that no token and no row has."""


def narrow_ids(
    ids: Integer[Array, "..."] | np.ndarray,
    name: str = "ids",
    *,
    outside: int = OUTSIDE,
) -> Int32[Array, "..."]:
    """Cast ids to int32; one that does not fit becomes `outside`, never another id.

    Args:
        ids: integers of any width; a NumPy array is narrowed before JAX sees it, since
            JAX without x64 truncates int64 silently.
        name: what they are, for the message.
        outside: what stands for an id that does not fit.

    Returns:
        int32, of the same shape.

    Raises:
        TypeError: `ids` are not integers.

    Example:
        >>> narrow_ids(np.array([7, 2**32 + 7]))
        Array([ 7, -1], dtype=int32)
    """
    if not isinstance(ids, np.ndarray):
        ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} have dtype {ids.dtype}; they must be integers")
    limits = jnp.iinfo(jnp.int32)
    own = jnp.iinfo(ids.dtype)
    if own.min < limits.min or own.max > limits.max:
        xp = np if isinstance(ids, np.ndarray) else jnp
        fits = ids <= limits.max
        if own.min < limits.min:
            fits &= ids >= limits.min
        # Two steps: an unsigned dtype has no -1.
        ids = xp.where(fits, xp.where(fits, ids, 0).astype(np.int32), np.int32(outside))
    return jnp.asarray(ids, jnp.int32)

"""Rows of a batch on their way from the host: what a prefetched batch carries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from .staging import to_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StagedRows:
    """One layer's packed rows, in host memory until a step reads them.

    A pytree: it passes into jit, where the copy to the device runs beside the step's
    other work.

    Attributes:
        rows: uint8 [T, C, D + D/32] in pinned host memory; with `index`, [U, D + D/32],
            each distinct row once. In one or more pieces along the first axis.
        index: int32 [T, C], which of `rows` each is; ``-1 - slot`` takes a row of
            `cache`. None: `rows` are all, in place.
        cache: uint8 [S, D + D/32] in device memory, or None.
    """

    # Not typed further: JAX builds pytrees of placeholders, too.
    rows: tuple[Any, ...]
    index: Any = None
    cache: Any = None

    def packed(self) -> UInt8[Array, "T C P"]:
        """Put the rows together in device memory.

        Returns:
            uint8 [T, C, D + D/32], bit for bit what the table's own lookup gives.

        Example:
            >>> rows = jnp.array([[1, 2], [3, 4]], jnp.uint8)
            >>> cache = jnp.array([[5, 6]], jnp.uint8)
            >>> StagedRows((rows,), jnp.array([[1, -1, 0]]), cache).packed().tolist()
            [[[3, 4], [5, 6], [1, 2]]]
        """
        pieces = [to_device(piece) for piece in self.rows]
        rows = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        if self.index is None:
            return rows
        index = to_device(self.index)
        found = rows.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds")
        if self.cache is None:
            return found
        slots = jnp.maximum(-1 - index, 0)
        cached = self.cache.at[slots].get(mode="promise_in_bounds")
        return jnp.where((index >= 0)[..., None], found, cached)

"""Rows of a table in host memory, read by the GPU at the table's address."""

import jax
from jaxtyping import Array, Int32, UInt8, UInt32

from .ids import narrow_ids


def record_lookup(
    address: UInt32[Array, "2"],
    ids: Int32[Array, "..."],
    *,
    num_rows: int,
    head_dim: int,
) -> UInt8[Array, "... P"]:
    """Read packed rows of a table by where it lies: `lookup_packed` without an array.

    The table is [R, D + D/32] bytes, values and scales of a row side by side, in memory
    that the GPU can read: JAX knows nothing of it. Its owner keeps it there as long as
    a compiled program may read it. There is no XLA form.

    Gradient: none, tables are constants.

    Args:
        address: of the table, its lower 32 bits first (without x64 JAX has no 64-bit
            integers); a multiple of 8.
        ids: rows, of any shape; an id outside the table reads as zeros.
        num_rows: R.
        head_dim: D.

    Returns:
        uint8 [..., D + D/32].

    Raises:
        NotImplementedError: the kernel does not cover these sizes.
    """
    from . import record_lookup_pallas  # here, since importing Pallas takes a second

    def read(address, ids):
        return record_lookup_pallas.record_lookup_pallas(
            address, ids, num_rows=num_rows, width=head_dim
        )

    return jax.custom_batching.sequential_vmap(read)(address, narrow_ids(ids))

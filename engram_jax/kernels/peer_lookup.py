"""Rows of tables that are cut over several GPUs, read from their owners' memory."""

from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, BFloat16, Float8e4m3fn, Int32, UInt8, UInt32

from .ids import narrow_ids

RECORD_WORDS = 8


def make_record(
    addresses: npt.ArrayLike, rows: npt.ArrayLike, own: int
) -> npt.NDArray[np.uint32]:
    """Write down where the shards of a table lie, for one device to read.

    Each entry is two addresses, of values and scales, as pairs of 32-bit words (lower
    first: without x64 JAX has no 64-bit integers), the shard's first row, one past its
    last, and two words that hold nothing. The last entry is that of the device's own
    shard, once more.

    Args:
        addresses: of the values and of the scales of each shard in order, [S, 2].
        rows: first row and one past the last of each, [S, 2].
        own: the number of the device's own shard.

    Returns:
        uint32 [S + 1, 8].

    Example:
        >>> make_record([[1 << 32, 7]], [[0, 100]], own=0).tolist()
        [[0, 1, 7, 0, 0, 100, 0, 0], [0, 1, 7, 0, 0, 100, 0, 0]]
    """
    words = np.array(addresses, "<u8").view("<u4")
    record = np.zeros((len(words), RECORD_WORDS), np.uint32)
    record[:, :4], record[:, 4:6] = words, rows
    return np.concatenate([record, record[own : own + 1]])


def peer_lookup(
    weights: Sequence[Float8e4m3fn[Array, "_ D"] | UInt8[Array, "_ D"]],
    scales: Sequence[UInt8[Array, "_ G"]],
    records: Sequence[UInt32[Array, "_ 8"]],
    ids: Int32[Array, "T L C"],
    *,
    columns: int | None,
    rows_per_shard: Sequence[int],
    packed: bool,
) -> BFloat16[Array, "T L C D"] | UInt8[Array, "T L C P"]:
    """Read rows of all layers from the memory of the GPUs that hold them.

    `out[t, l, c]` is row `ids[t, l, c]` of layer l's whole table, as `lookup` or
    `lookup_packed` would give it; zeros for an id outside of the shard that it is
    looked for in: that of its column, or with a row cut outside of the table.

    Runs inside `shard_map`, on GPUs of one host that reach each other's memory. A
    row of another GPU is D + D/32 bytes over NVLink. There is no XLA form.

    Where one of this GPU's own shards does not lie where its record says, the table was
    replaced or copied since, and the memory of its peers may hold anything: nothing is
    read, and the rows of that layer are NaN (bytes 0x7F and scales 255 where packed).

    Gradient: none, tables are constants.

    Args:
        weights: this GPU's shard of each layer's table [R, D], e4m3 values or bytes.
        scales: their E8M0 bytes [R, D/32].
        records: what `make_record` gave for this GPU, for each layer.
        ids: rows of each token.
        columns: hash columns that a shard holds; None where tables are cut by rows.
        rows_per_shard: rows that a shard of each layer has room for.
        packed: give the stored bytes instead of numbers.

    Returns:
        bfloat16 [T, L, C, D]; packed, uint8 [T, L, C, D + D/32].

    Raises:
        NotImplementedError: the kernel does not cover these sizes.
    """
    from . import peer_lookup_pallas  # here, since importing Pallas takes a second

    ids = narrow_ids(ids)

    def read(*operands):
        return peer_lookup_pallas.peer_lookup_pallas(
            *operands,
            columns=columns,
            rows_per_shard=tuple(rows_per_shard),
            packed=packed,
        )

    weights, scales = lax.stop_gradient((tuple(weights), tuple(scales)))
    return jax.custom_batching.sequential_vmap(read)(
        weights, scales, tuple(records), ids
    )

"""Rows of tables cut over the GPUs of one process, read from their owners' memory.

Each thread finds the shard that holds its row, takes that shard's addresses from a
record (`peer_lookup.make_record`) and reads the row over NVLink, or from this GPU's own
memory: `lookup_pallas`' pieces do the rest, all reads in flight before the first is
used. One launch reads the rows of all layers, and no GPU waits for another.

The record is of the past: were a table replaced, its addresses would be of memory that
holds something else by now. So each thread compares the addresses of this GPU's own
shards, which are operands, with those recorded for them. Where they differ it reads
nothing, and the rows are NaN.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from . import lookup_pallas
from .lookup_pallas import Place, Sizes
from .mosaic_pallas import Predicate, Word, address, load, pick
from .peer_lookup import RECORD_WORDS

_RECORD_BYTES = 4 * RECORD_WORDS


@dataclasses.dataclass(frozen=True)
class _Tables:
    layers: int
    n_hash_cols: int
    num_shards: int
    columns: int | None  # of a shard; None: cut by rows
    rows_per_shard: tuple[int, ...]


def unsupported_reason(
    weights: Sequence[jax.Array], ids: jax.Array, *, interpret: bool = False
) -> str | None:
    """Say why `peer_lookup_pallas` cannot take these operands, or give None."""
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        return f"tables differ in their rows' width: {sorted(widths)}"
    return lookup_pallas.unsupported_reason(
        weights[0], weights[0], ids, interpret=interpret
    )


def peer_row(
    refs: Mapping[str, Any],
    row: Word,
    exists: Predicate,
    *,
    tables: _Tables,
    sizes: Sizes,
) -> Place:
    """Find an output row in the memory of the GPU that holds it."""
    columns, numbers = tables.n_hash_cols, range(tables.layers)
    column, layer = row % columns, row // columns % tables.layers
    (id_,) = load(address(refs["ids"]) + row.widen() * 4, only_if=exists)
    if tables.columns is not None:
        shard = column // tables.columns
    else:
        by_layer = [id_ // rows for rows in tables.rows_per_shard]
        shard = pick(layer, by_layer).minimum(tables.num_shards - 1)
    record, own_weight, own_scale = (
        pick(layer, [address(refs[f"{name} {number}"]) for number in numbers])
        for name in ("record", "weight", "scale")
    )
    entry = record + (shard * _RECORD_BYTES).widen()
    weight, scale = load(entry, 2, width=64)
    start, end = load(entry + 16, 2)
    own = load(record + tables.num_shards * _RECORD_BYTES, 2, width=64)
    unmoved = own[0].compare("eq", own_weight) & own[1].compare("eq", own_scale)
    inside = exists & id_.compare("sge", start) & id_.compare("slt", end)
    local = (id_ - start).widen()
    return Place(
        values=weight + local * sizes.width,
        scales=scale + local * sizes.scales,
        inside=inside & unmoved,
        is_nan=inside & ~unmoved,
    )


@functools.partial(
    jax.jit, static_argnames=("columns", "rows_per_shard", "packed", "in_flight")
)
def peer_lookup_pallas(
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    records: Sequence[jax.Array],
    ids: jax.Array,
    *,
    columns: int | None,
    rows_per_shard: tuple[int, ...],
    packed: bool,
    in_flight: int | None = None,
) -> jax.Array:
    """Read rows of all layers from their owners; `peer_lookup` says what.

    Args:
      weights: This GPU's shard of each layer's table, e4m3 or uint8 [R, D].
      scales: Their scales, uint8 [R, D/32].
      records: Where the shards of each layer's table lie, uint32 [S + 1, 8].
      ids: int32 [T, L, C].
      columns: Hash columns that a shard holds; None where tables are cut by rows.
      rows_per_shard: Rows that a shard of each layer has room for.
      packed: Give the stored bytes instead of numbers.
      in_flight: Pieces that a thread reads before it uses the first.

    Returns:
      bfloat16 [T, L, C, D]; packed, uint8 [T, L, C, D + D/32].
    """
    reason = unsupported_reason(weights, ids)
    if reason is not None:
        raise NotImplementedError(f"peer_lookup_pallas: {reason}")
    layers, n_hash_cols = ids.shape[1:]
    num_shards = records[0].shape[0] - 1
    tables = _Tables(layers, n_hash_cols, num_shards, columns, rows_per_shard)
    sizes = Sizes(weights[0].shape[1], ids.size)
    operands = {"ids": ids.reshape(-1)}
    for name, arrays in (("record", records), ("weight", weights), ("scale", scales)):
        operands |= {f"{name} {number}": x for number, x in enumerate(arrays)}
    rows = lookup_pallas.read_rows(
        "peer_rows",
        functools.partial(peer_row, tables=tables, sizes=sizes),
        operands,
        sizes,
        packed=packed,
        in_flight=in_flight,
    )
    return rows.reshape(*ids.shape, rows.shape[-1])

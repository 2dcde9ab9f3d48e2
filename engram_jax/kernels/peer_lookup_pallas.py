"""Rows of tables cut over the GPUs of one host, read from their owners' memory.

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
from .lookup_pallas import Place, Sizes, by_layer
from .mosaic_pallas import Predicate, Word, address, load, pick
from .peer_lookup import RECORD_WORDS

_RECORD_BYTES = 4 * RECORD_WORDS


@dataclasses.dataclass(frozen=True)
class PeerTables:
    """Say how the tables of all layers are cut.

    Attributes:
      num_shards: Shards of each table.
      columns: Hash columns of a shard; None where tables are cut by rows.
      rows_per_shard: Rows that a shard of each layer has room for.
    """

    num_shards: int
    columns: int | None
    rows_per_shard: tuple[int, ...]


def find_row(
    refs: Mapping[str, Any],
    layer: Word,
    column: Word,
    id_: Word,
    exists: Predicate,
    *,
    tables: PeerTables,
    width: int,
) -> Place:
    """Find a row of a layer's table in the memory of the GPU that holds it.

    Args:
      refs: The operands' references by name: "record 0", "weight 0" and "scale 0" are
        those of layer 0.
      layer: The layer's index.
      column: The hash column that the id is of.
      id_: The row's number in the whole table; one outside reads as zeros.
      exists: Whether a row is asked for.
      tables: How they are cut.
      width: Values of a row.

    Returns:
      The place; NaN where this GPU's own shard is not where its record says.
    """
    numbers = range(len(tables.rows_per_shard))
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
    place = Place.of(weight, scale, id_ - start, width, inside & unmoved)
    return dataclasses.replace(place, is_nan=inside & ~unmoved)


def peer_row(
    refs: Mapping[str, Any],
    row: Word,
    exists: Predicate,
    *,
    n_hash_cols: int,
    tables: PeerTables,
    width: int,
) -> Place:
    """Find an output row in the memory of the GPU that holds it."""
    column, layer = row % n_hash_cols, row // n_hash_cols % len(tables.rows_per_shard)
    (id_,) = load(address(refs["ids"]) + row.widen() * 4, only_if=exists)
    return find_row(refs, layer, column, id_, exists, tables=tables, width=width)


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
    reason = lookup_pallas.unsupported_reason(weights, ids)
    if reason is not None:
        raise NotImplementedError(f"peer_lookup_pallas: {reason}")
    tables = PeerTables(records[0].shape[0] - 1, columns, rows_per_shard)
    sizes = Sizes(weights[0].shape[1], ids.size)
    find = functools.partial(
        peer_row, n_hash_cols=ids.shape[2], tables=tables, width=sizes.width
    )
    rows = lookup_pallas.read_rows(
        "peer_rows",
        find,
        {"ids": ids.reshape(-1)}
        | by_layer(record=records, weight=weights, scale=scales),
        sizes,
        packed=packed,
        in_flight=in_flight,
    )
    return rows.reshape(*ids.shape, rows.shape[-1])

"""Rows fetched over a mesh: ids to the shards, each shard's rows back to the tokens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int32, UInt8

from . import collectives, kernels, mxfp8
from .host_storage import lookup_pinned
from .sharding import EngramSharding
from .sharding import P as PartitionSpec

_HOST = jax.memory.Space.Host

Lookup = Callable[[Array, Array, int | None], Array]
"""Reads rows of local shards: (ids [T, L, C], bounds, c) -> [T, L, c, W]; bounds are
each shard's first row, one past its last, and the first of the c columns that it reads
where they lie: [L, 3]. With c = None there is no such column, and it reads all."""


def fetch_rows(
    sharding: EngramSharding,
    tables: Sequence[Any],
    hash_ids: Int32[Array, "T L C"],
    layers: Sequence[int] | None = None,
) -> UInt8[Array, "S L C P"] | Float[Array, "S L C D"]:
    """Fetch the rows of all layers for all tokens, with one exchange.

    Each shard looks up what it holds of every token that it serves; `exchange` in
    `EngramSharding` says how the rows reach the tokens' devices. The same rows, bit
    for bit, as one device holding all of the table. A column's ids must lie in that
    column's rows, as hashes do, or outside of all (-1): they read as zeros.

    By "peer_read" each device reads its tokens' rows from the memory of those that hold
    them (`kernels.peer_lookup`). A table that does not lie where its addresses were
    recorded is refused where it can be seen, and inside jit gives rows that are NaN. As
    a device may still be reading when its peers have finished, wait for the last step
    before dropping a table.

    Gradient: float tables get the same gradient as on one device, once; FP8 tables
    are constants.

    Args:
        sharding: how tables and tokens lie on the mesh.
        tables: `ParallelEngramEmbedding` of each layer, all FP8 or all float.
        hash_ids: rows of each token, any T: the tokens of all replicas, in order.
        layers: the index of each table's layer; None for all of the model's.

    Returns:
        [T padded, L, C, W], laid out by `sharding.rows`, T padded to
        `sharding.pad_tokens(T)`: packed bytes (W = D + D/32), or rows of width D in
        bfloat16 or the float table's dtype.

    Raises:
        ValueError: shapes do not fit the sharding; or a table was replaced after its
            addresses were recorded.
    """
    layers = range(sharding.shards.num_layers) if layers is None else layers
    _check(sharding, tables, hash_ids, layers)
    padded = sharding.pad_tokens(hash_ids.shape[0])
    hash_ids = pad_tokens(sharding, kernels.narrow_ids(hash_ids), padded, fill=-1)
    if padded == 0:  # no collective takes empty arrays
        return _no_rows(sharding, tables)
    if reads_peers(sharding, tables, padded):
        return _read_peers(sharding, tables, hash_ids, layers)
    arrays = [
        (
            None if table.weight is None else table.weight[...],
            None if table.scale is None else table.scale[...],
        )
        for table in tables
    ]

    def body(arrays, ids):
        lookup = functools.partial(_look_up, sharding.row_format, tables, arrays)
        # Storage outside JAX knows its rows by their ids.
        by_place = all(weight is not None for weight, _ in arrays)
        return exchange_rows(sharding, lookup, ids, layers, by_place=by_place)

    call = sharding.shard_map(body, (sharding.table, sharding.replica), sharding.rows)
    return call(arrays, hash_ids)


def reads_peers(
    sharding: EngramSharding, tables: Sequence[Any], num_tokens: int
) -> bool:
    """Say whether rows come by "peer_read".

    Args:
        sharding: how tables and tokens lie on the mesh.
        tables: `ParallelEngramEmbedding` of each layer.
        num_tokens: T, of all replicas together.

    Returns:
        False where a collective is faster, or a table's addresses are not known.
    """
    form = sharding.exchange_for(num_tokens)
    return form == "peer_read" and all(t.addresses is not None for t in tables)


def peer_operands(tables: Sequence[Any]) -> Any:
    """Give what kernels take to read tables from the peers' memory.

    Args:
        tables: `ParallelEngramEmbedding` of each layer, with known addresses.

    Returns:
        For each layer weights, scales and records, laid out by `peer_specs`.

    Raises:
        ValueError: a table was replaced after its addresses were recorded, as far as
            that can be seen.
    """
    for table in tables:
        if not isinstance(table.addresses[...], Tracer):
            table.check_addresses()
    return (
        [table.weight[...] for table in tables],
        [table.scale[...] for table in tables],
        [table.addresses[...] for table in tables],
    )


def peer_specs(sharding: EngramSharding) -> Any:
    """Give the partition specs of `peer_operands`."""
    return (sharding.table, sharding.table, sharding.by_device)


def peer_cut(
    sharding: EngramSharding, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Give the arguments by which kernels know how tables are cut.

    Args:
        sharding: how tables lie on the mesh.
        layers: the index of each table's layer; None for all of the model's.

    Returns:
        `columns` and `rows_per_shard` of `kernels.peer_lookup` and `ngram_rows`.
    """
    shards = sharding.shards
    layers = range(shards.num_layers) if layers is None else layers
    return {
        "columns": shards.columns if shards.cut == "heads" else None,
        "rows_per_shard": [shards.rows_per_shard[layer] for layer in layers],
    }


def _read_peers(sharding, tables, hash_ids, layers) -> Any:
    """Rows of this device's tokens, each from the device that holds it."""

    def body(operands, ids):
        weights, scales, records = operands
        return kernels.peer_lookup(
            weights,
            scales,
            [record[0] for record in records],
            ids,
            packed=sharding.row_format == "packed",
            **peer_cut(sharding, layers),
        )

    specs = (peer_specs(sharding), sharding.rows)
    call = sharding.shard_map(body, specs, sharding.rows)
    return call(peer_operands(tables), hash_ids)


def _no_rows(sharding, tables) -> Any:
    table, dtype = tables[0], jnp.bfloat16
    width = table.head_dim
    if table.weight is not None and table.scale is None:
        dtype = table.weight.dtype
    elif sharding.row_format == "packed":
        width, dtype = width + width // mxfp8.BLOCK, jnp.uint8
    return jnp.zeros((0, len(tables), sharding.shards.n_hash_cols, width), dtype)


def _look_up(row_format, tables, arrays, ids, bounds, columns) -> Any:
    """Rows of this device's shards, in the format that travels."""
    backends = {table.backend for table in tables}
    if len(backends) > 1 or any(_in_host(weight) for weight, _ in arrays):
        if columns is not None:
            ids = kernels.read_columns(ids, bounds[0, 2], columns)
        rows = [
            _look_up_layer(row_format, table, parts, ids[:, layer], bounds[layer, :2])
            for layer, (table, parts) in enumerate(zip(tables, arrays, strict=True))
        ]
        return jnp.stack(rows, axis=1)
    weights, scales = zip(*arrays, strict=True)
    packed = scales[0] is not None and row_format == "packed"
    (backend,) = backends
    return kernels.lookup_layers(
        weights,
        scales,
        ids,
        bounds,
        columns=columns,
        packed=packed,
        backend=backend,
    )


def _in_host(weight: Any) -> bool:
    return weight is None or jax.typeof(weight).memory_space == _HOST


def _look_up_layer(row_format: str, table: Any, parts: Any, ids, bounds):
    (weight, scale), (row_start, row_end) = parts, bounds
    if _in_host(weight):
        if weight is None:
            owned = (ids >= row_start) & (ids < row_end)
            rows = table.storage.lookup_packed(jnp.where(owned, ids, -1))
        else:
            rows = lookup_pinned(weight, scale, ids, row_start, row_end)
        return rows if row_format == "packed" else mxfp8.dequantize(*mxfp8.unpack(rows))
    packed = scale is not None and row_format == "packed"
    lookup: Any = kernels.lookup_packed if packed else kernels.lookup
    return lookup(
        weight, scale, ids, row_start=row_start, row_end=row_end, backend=table.backend
    )


def exchange_rows(
    sharding: EngramSharding,
    lookup: Lookup,
    ids: Int32[Array, "slot L C"],
    layers: Sequence[int],
    *,
    by_place: bool = False,
) -> Array:
    """Look up this device's share of the rows and trade it for its tokens' rows.

    Runs inside `shard_map`. Every device takes part with the same shapes, also one
    whose replica has no tokens (ids that are all -1).

    Args:
        sharding: how tables and tokens lie on the mesh.
        lookup: reads rows of this device's shards.
        ids: this replica's ids, padded with -1 to the slot that all replicas share.
        layers: the index of each layer that ids are of.
        by_place: whether `lookup` may be given a row's place in the shard for its id,
            with bounds to match. Where only the shard's own ids come to it, senders
            then say what it would have to know its number for.

    Returns:
        [tokens of this device, L, C, W].
    """
    shards = sharding.shards
    in_tables = [a for a in sharding.data_axes if a in sharding.table_axes]
    by_place = by_place and bool(in_tables) and sharding.ids_exchange == "all_to_all"
    if by_place:
        ids = _places(shards, ids, layers)
    ids, first = _served_ids(sharding, ids, tuple(in_tables))
    if by_place:
        room = [[0, shards.rows_per_shard[layer]] for layer in layers]
        bounds = jnp.asarray(np.array(room, np.int32))
    else:
        bounds = _own_bounds(sharding, layers, first)
    rows = lookup(ids, bounds, None if first is None else shards.columns)
    if not sharding.table_axes:
        return rows
    rows = _EXCHANGES[sharding.exchange](sharding, rows)
    return rows[:, :, : shards.n_hash_cols]


def _own_bounds(sharding, layers, first):
    """The first of this shard's rows, one past its last, and its first column."""
    shards = sharding.shards
    numbers = [shards.row_start[list(layers)], shards.row_end[list(layers)]]
    if first is not None:
        numbers.append(np.broadcast_to(first, numbers[0].shape))
    # One table for all shards: one small operation picks this one's numbers.
    table = np.stack(numbers, axis=-1).swapaxes(0, 1).astype(np.int32)
    shard = lax.axis_index(sharding.table_axes) if sharding.table_axes else 0
    return jnp.asarray(table)[shard]


def _places(shards, ids, layers):
    """The place of each id's row in its column's shard; -1 where it has none there."""
    shard = np.arange(shards.n_hash_cols) // shards.columns
    start, end = (
        rows[list(layers)][:, shard].astype(np.int32)
        for rows in (shards.row_start, shards.row_end)
    )
    return jnp.where((ids >= start) & (ids < end), ids - start, kernels.OUTSIDE)


def _served_ids(sharding, ids, served):
    """The ids of all the tokens that this shard serves.

    Beside them the first of each shard's columns among theirs, [S]: the lookup reads
    its own where they lie, as cutting them out takes a kernel, and 3 us of 8,192
    tokens' ids on an H200. None where all that came are its own.
    """
    shards, replicas = sharding.shards, sharding.size(served)
    if shards.cut != "heads":
        if served:
            ids = lax.all_gather(ids, served, axis=0, tiled=True)
        return ids, None
    # The shards of one tensor rank lie side by side, one of each replica.
    shard, width = np.arange(shards.num_shards), replicas * shards.columns
    if not served:
        return ids, shard * shards.columns if shards.num_shards > 1 else None
    in_blocks = sharding.ids_exchange == "all_to_all"
    if sharding.tensor_axes:
        # Columns of other tensor ranks' shards need not travel.
        rank = lax.axis_index(sharding.tensor_axes)
        ids = kernels.read_columns(ids, rank * width, width)
        shard %= replicas
    elif in_blocks:
        ids = kernels.read_columns(ids, 0, width)
    if not in_blocks:
        ids = lax.all_gather(ids, served, axis=0, tiled=True)
        return ids, shard * shards.columns
    # In the order of their shards before they travel, so that they arrive as one array.
    tokens, layers, _ = ids.shape
    blocks = ids.reshape(tokens, layers, replicas, shards.columns)
    blocks = jnp.moveaxis(blocks, 2, 0).reshape(-1, layers, shards.columns)
    return lax.all_to_all(blocks, served, 0, 0, tiled=True), None


def _split_axes(sharding) -> tuple[str, ...]:
    """Axes that are cut into tables on the way in and into tokens on the way out."""
    return tuple(a for a in sharding.row_token_axes if a in sharding.table_axes)


def _select(sharding, rows, axis=0):
    """This device's tokens of all that were served."""
    split = _split_axes(sharding)
    pieces = sharding.size(split)
    if pieces == 1:
        return rows
    # Tokens lie replica by replica, and within one by tensor rank.
    index = lax.axis_index(split)
    length = rows.shape[axis] // pieces
    return lax.dynamic_slice_in_dim(rows, index * length, length, axis=axis)


def _all_gather(sharding, rows):
    # Selected before the columns are put in order: other tokens' need not be.
    parts = collectives.gather(rows[None], sharding.table_axes, 0)
    return _in_columns(_select(sharding, parts, axis=1))


def _in_columns(parts):
    """Blocks of columns [S, T, L, c, W] side by side: [T, L, S * c, W]."""
    shards, tokens, layers, columns, width = parts.shape
    rows = jnp.moveaxis(parts, 0, 2)
    return rows.reshape(tokens, layers, shards * columns, width)


def _all_to_all(sharding, rows):
    split = _split_axes(sharding)
    kept = tuple(a for a in sharding.table_axes if a not in split)
    if split:
        rows = collectives.trade(rows, split, 0, 2)
        in_order = tuple(a for a in sharding.table_axes if a in split)
        if in_order != split:
            rows = _reorder_columns(sharding, rows, split, in_order)
    if kept:
        rows = _in_columns(collectives.gather(rows[None], kept, 0))
    return rows


def _reorder_columns(sharding, rows, arrived, wanted):
    """Blocks of columns came in the tokens' axis order; put them in the shards'."""
    tokens, layers, _, width = rows.shape
    sizes = [sharding.mesh.shape[axis] for axis in arrived]
    blocks = rows.reshape(tokens, layers, *sizes, sharding.shards.columns, width)
    order = [2 + arrived.index(axis) for axis in wanted]
    last = 2 + len(arrived)
    return blocks.transpose(0, 1, *order, last, last + 1).reshape(rows.shape)


def _all_reduce(sharding, rows):
    return _select(sharding, collectives.sum_all(rows, sharding.table_axes))


def _reduce_scatter(sharding, rows):
    split = _split_axes(sharding)
    kept = tuple(a for a in sharding.table_axes if a not in split)
    if split:
        rows = collectives.sum_and_split(rows, split)
    return collectives.sum_all(rows, kept) if kept else rows


_EXCHANGES = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}


def pad_tokens(
    sharding: EngramSharding, x: Array, padded: int, fill: int | float | bool = 0
) -> Array:
    """Pad the token axis, so that it splits evenly over the devices.

    Args:
        sharding: how tokens lie on the mesh.
        x: [T, ...], or None, which stays None.
        padded: T to pad to.
        fill: what padded tokens hold.

    Returns:
        [padded, ...].
    """
    missing = padded - x.shape[0]
    if missing == 0:
        return x
    # On an Explicit mesh an axis that does not divide cannot be cut anyway.
    x = sharding.reshard(x, PartitionSpec())
    return jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def unpad_tokens(sharding: EngramSharding, x: Array, num_tokens: int) -> Array:
    """Drop what `pad_tokens` added.

    Args:
        sharding: how tokens lie on the mesh.
        x: [T padded, ...].
        num_tokens: T.

    Returns:
        [T, ...].
    """
    if x.shape[0] == num_tokens:
        return x
    return sharding.reshard(x, PartitionSpec())[:num_tokens]


def gather_columns(x: Array, axes: tuple[str, ...], width: int) -> Array:
    """Put the columns that each device computed together, and drop the padding.

    Args:
        x: this device's columns [T, N / devices].
        axes: mesh axes that the columns are cut over.
        width: columns to keep.

    Returns:
        [T, width].
    """
    if axes:
        x = collectives.gather(x, axes, 1)
    return x[:, :width]


def columns_to_tokens(x: Array, axes: tuple[str, ...], width: int) -> Array:
    """Trade columns of all tokens for all columns of this device's tokens.

    Args:
        x: this device's columns [T, N / devices].
        axes: mesh axes that columns are cut over, and tokens shall be.
        width: columns to keep.

    Returns:
        [T / devices, width].
    """
    return collectives.trade(x, axes, 0, 1)[:, :width]


def _check(sharding, tables, hash_ids, layers) -> None:
    shards = sharding.shards
    if hash_ids.ndim != 3 or hash_ids.shape[1:] != (len(tables), shards.n_hash_cols):
        raise ValueError(
            f"hash_ids has shape {hash_ids.shape}; it must be [T, {len(tables)}, "
            f"{shards.n_hash_cols}]: rows of each token, layer and column"
        )
    for table, layer in zip(tables, layers, strict=True):
        if (table.weight is None or table.scale is not None) != (
            tables[0].weight is None or tables[0].scale is not None
        ):
            raise ValueError(
                "some tables have scales and some have none; all layers of a stack "
                "must be FP8, or all float"
            )
        if table.weight is None:
            continue
        rows = table.weight.shape[0]
        if rows != shards.num_rows(layer):
            raise ValueError(
                f"the table of layer index {layer} has {rows} rows; "
                f"{shards.num_shards} shards of {shards.rows_per_shard[layer]} rows "
                f"need {shards.num_rows(layer)}. EngramSharding.place_table makes it"
            )

"""Hash and row lookup of all layers in one Mosaic GPU kernel, for decoding.

At a few tokens each kernel costs more to start than to run: hash, one lookup a layer
and one reordering a layer are five kernels for two layers. Here every thread finds its
row itself, reads 16 of its values and writes them where the FP8 projection expects
them (`wkv_pallas.permute_columns`). Threads of a row repeat its hash, which costs
nothing while the card is nearly empty; for many tokens the separate kernels are faster.
Rows of tables that are cut over several GPUs come from their owners' memory, as in
`peer_lookup_pallas`, those of tables in host memory from where these lie. Where wanted,
threads also move the lookback windows past the batch, which would be a kernel of its
own.

Why inline Mosaic code: see `lookup_pallas` and `ngram_hash_pallas`; their pieces serve
here.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from engram_jax.layout import EngramLayout

from . import record_lookup_pallas
from .lookup_pallas import Place, by_layer, own_row
from .mosaic_pallas import (
    WARPGROUP,
    Predicate,
    Word,
    address,
    decode_e4m3,
    e8m0_pair,
    load,
    pick,
    remainder,
    store,
    thread_index,
)
from .ngram_hash_pallas import (
    INTERPRET_REASON,
    Batch,
    Refs,
    batch_operands,
    batch_sizes,
    close_window,
    layout_constants,
    layout_reason,
    read,
    read_back,
    read_byte,
    read_column,
    read_multipliers,
    roll,
)
from .peer_lookup_pallas import PeerTables, find_row

_PIECE = 16  # values that a thread moves
_ORDER = 64  # columns within which `wkv_pallas.permute_columns` works
_TOKENS_MULTIPLE = 8  # what the projection's matrix unit takes at a time
_NAN_SCALES = 0xFFFF  # two scales that are NaN

Locate = Callable[[Refs, Word, Word, Word, Predicate], Place]
"""Finds a row: (refs, layer, column, row's number, whether one is asked for)."""


def padded_tokens(tokens: int) -> int:
    """Give the tokens of the output: a multiple of 8, at least 8."""
    return max(1, -(-tokens // _TOKENS_MULTIPLE)) * _TOKENS_MULTIPLE


def unsupported_reason(
    weights: Sequence[jax.Array | jax.ShapeDtypeStruct],
    tokens: int,
    *,
    layout: EngramLayout,
    pad_id: int,
    as_records: bool = False,
    interpret: bool = False,
) -> str | None:
    """Say why `decode_front_end_pallas` cannot take these operands, or give None.

    Of the tables only the shapes matter; `as_records`: given by their addresses.
    """
    if interpret:
        return INTERPRET_REASON
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        return f"tables differ in their rows' width: {sorted(widths)}"
    (width,) = widths
    if width % _ORDER:
        return f"rows have {width} values, not a multiple of {_ORDER}"
    stride = record_lookup_pallas.record_bytes(width)
    if as_records and stride % 4:
        return f"records have {stride} bytes, which are no whole words"
    if tokens * layout.n_hash_cols * width // _PIECE >= 2**31:
        return f"{tokens} tokens have more pieces than 32 bits can count"
    return layout_reason(layout, pad_id)


def _find_row(
    refs: Refs, batch: Batch, layout: EngramLayout, layer: Word, token: Word, col: Word
) -> tuple[Word, Predicate]:
    """Hash one column of one token, and say whether the token is alive.

    The row of a token of no request is -1.
    """
    places = [Word.of(back) for back in range(batch.depth)]
    multipliers = read_multipliers(refs, batch, layer)
    factor, prime, offset = read_column(refs, layer * layout.n_hash_cols + col)
    values, owned = read_back(refs, batch, token, places)
    ids = close_window(values, batch.pad_id)
    rolling = roll(ids, multipliers, col // layout.n_heads)
    row = owned.select(remainder(rolling, factor, prime) + offset, -1)
    return row, owned & values[0].compare("sge", 0)


def _own_row(refs, layer, column, row, exists, *, rows_in_tables, width) -> Place:
    del column
    return own_row(refs, layer, row, exists, rows_in_tables=rows_in_tables, width=width)


def _record_row(refs, layer, column, row, exists, *, rows_in_tables, width) -> Place:
    del column
    numbers = range(len(rows_in_tables))
    where = pick(layer, [address(refs[f"record {number}"]) for number in numbers])
    (table,) = load(where, width=64)
    rows = pick(layer, [Word.of(rows) for rows in rows_in_tables])
    inside = exists & row.compare("ult", rows)
    return record_lookup_pallas.place_of(table, row, inside, width)


def _move_piece(
    refs: Refs,
    batch: Batch,
    layout: EngramLayout,
    layer: Word,
    piece: Word,
    width: int,
    tokens: int,
    locate: Locate,
) -> None:
    """Write 16 values of a row, and one of them whether its token is alive.

    Of `tokens` tokens from that which "first" names, or from the batch's first.
    """
    per_row = width // _PIECE
    exists = piece.compare("ult", tokens * layout.n_hash_cols * per_row)
    number = exists.select(piece, 0)
    slot, part = number // per_row, number % per_row
    place, col = slot // layout.n_hash_cols, slot % layout.n_hash_cols
    token = place + load(address(refs["first"]))[0] if "first" in refs else place
    in_batch = exists & token.compare("ult", batch.tokens)
    token = in_batch.select(token, 0)
    row, alive = _find_row(refs, batch, layout, layer, token, col)
    is_first = layer.compare("eq", 0) & col.compare("eq", 0) & part.compare("eq", 0)
    mask = address(refs["alive"]) + place.widen()
    alive = (alive & in_batch).select(Word.of(1), 0)
    store(mask, [alive], width=8, only_if=exists & is_first)

    # Part (64-block, b) holds the words a = 0 to 3 at byte 16 a + 4 b of its block.
    found = locate(refs, layer, col, row, in_batch)
    block, b = part // 4, part % 4
    values = found.values + (block * _ORDER + b * 4).widen()
    words = [load(values + 16 * a, only_if=found.inside)[0] for a in range(4)]
    scales = found.scales + (block * 2).widen()
    (both,) = load(scales, width=16, only_if=found.inside)
    both = found.or_nan(both, Word.of(_NAN_SCALES))
    pairs = [e8m0_pair(both & 0xFF), e8m0_pair(both >> 8)]
    decoded = [
        decode_e4m3(word, pairs[a // 2], in_order=False) for a, word in enumerate(words)
    ]
    outs = [address(refs[f"out {number}"]) for number in range(layout.num_layers)]
    where = pick(layer, outs) + (number * (2 * _PIECE)).widen()
    for d in range(2):
        store(where + 16 * d, [four[d] for four in decoded], only_if=exists)


def _read_advanced(refs: Refs, batch: Batch, entry: Word, exists: Predicate) -> Any:
    """Read what an entry of the windows is after the batch: its id, whether dead."""
    width = batch.depth - 1
    request, column = entry // width, entry % width
    start, end = (read(refs, "starts", request + i, exists) for i in range(2))
    chunk = end - start
    in_chunk, from_window = (
        exists & column.compare(relation, chunk) for relation in ("slt", "sge")
    )
    token = (end - 1 - column).minimum(batch.tokens - 1)
    before = (entry - chunk).minimum(batch.requests * width - 1)
    new, old = (
        read(refs, "ids", token, in_chunk),
        read(refs, "lookback", before, from_window),
    )
    dead = read_byte(refs, "dead", token, in_chunk)
    dead = new.compare("ult", batch.vocab).select(dead, 1)
    old_dead = read_byte(refs, "lookback_dead", before, from_window)
    return in_chunk.select(new, old), in_chunk.select(dead, old_dead)


def _write_advanced(refs: Refs, entry: Word, advanced: Any, exists: Predicate) -> None:
    """Write what `_read_advanced` gave; the mask only where there is one."""
    id_, dead = advanced
    store(address(refs["advanced"]) + entry.widen() * 4, [id_], only_if=exists)
    if "advanced_dead" in refs:
        mask = address(refs["advanced_dead"]) + entry.widen()
        store(mask, [dead], width=8, only_if=exists)


def _run_thread(
    refs: Refs, batch: Batch, layer: Word, thread: Word, move: Callable[[], None]
) -> None:
    """Let a thread move a piece, and the first layer's also an entry of the windows.

    The entry is read first, so that it waits for memory together with the piece.
    """
    if "advanced" not in refs:
        move()
        return
    entries = batch.requests * (batch.depth - 1)
    exists = layer.compare("eq", 0) & thread.compare("ult", entries)
    entry = exists.select(thread, 0)
    advanced = _read_advanced(refs, batch, entry, exists)
    move()
    _write_advanced(refs, entry, advanced, exists)


def decode_front_end_pallas(
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    input_ids: jax.Array,
    positions: jax.Array,
    query_start_loc: jax.Array,
    token_map: jax.Array,
    dead_mask: jax.Array | None = None,
    lookback_token_ids: jax.Array | None = None,
    lookback_dead_mask: jax.Array | None = None,
    slot_cache: jax.Array | None = None,
    block_table: jax.Array | None = None,
    records: Sequence[jax.Array] | None = None,
    first_token: jax.Array | None = None,
    addresses: Sequence[jax.Array] | None = None,
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    columns: int | None = None,
    rows_per_shard: tuple[int, ...] = (),
    table_shapes: tuple[tuple[int, ...], ...] = (),
    num_tokens: int | None = None,
    advance_lookback: bool = False,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array, Any]:
    """Hash every token's n-grams and read their rows, for all layers.

    Equals, for each layer l, ``permute_columns(lookup(weights[l], scales[l],
    ngram_hash(..)[:, l]).reshape(T, C * D))``.

    Args:
      weights: One table a layer, e4m3 or uint8 [R, D], D a multiple of 64.
      scales: Their scales, uint8 [R, D/32].
      input_ids: int32 [T].
      positions: int32 [T].
      query_start_loc: int32 [R + 1], not decreasing.
      token_map: int32 [V].
      dead_mask: bool [T].
      lookback_token_ids: int32 [R, n - 1].
      lookback_dead_mask: bool [R, n - 1].
      slot_cache: int32 [slots], written already.
      block_table: int32 [R, blocks].
      records: Where the shards of each layer's table lie, uint32 [S + 1, 8] of
        `peer_lookup.make_record`; weights and scales are then this GPU's shards. None
        where they are the whole tables.
      first_token: int32 [1], the first token whose rows are wanted; None: 0.
      addresses: Instead of weights and scales, which are then empty: where each layer's
        table lies in host memory, uint32 [2], as `record_lookup` takes it.
      layout: Primes, offsets and multipliers.
      pad_id: The compressed pad id.
      block_size: Positions in a block.
      columns: With records, hash columns that a shard holds; None where tables are cut
        by rows.
      rows_per_shard: With records, rows that a shard of each layer has room for.
      table_shapes: With addresses, each layer's rows and values of a row.
      num_tokens: How many tokens' rows are wanted; None: T. Those past the batch's end
        are zeros.
      advance_lookback: Whether to move the lookback windows, which must be given, past
        the batch.
      interpret: Must be False; see `ngram_hash_pallas.INTERPRET_REASON`.

    Returns:
      One bfloat16 [`padded_tokens` (N), C * D] a layer, N = `num_tokens`, and which
      tokens are alive, bool [N]: of a request, and not dead. Rows from N on are not
      written and hold anything; the projection does not use what comes of them. Rows of
      a table that is not where its record says are NaN. Last the windows after the
      batch, int32 [R, n - 1], and their dead mask, None where no mask was given; both
      together None unless asked for.
    """
    tokens = input_ids.shape[0] if num_tokens is None else num_tokens
    tables: Any = weights
    if addresses is not None:
        tables = [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in table_shapes]
    reason = unsupported_reason(
        tables,
        tokens,
        layout=layout,
        pad_id=pad_id,
        as_records=addresses is not None,
        interpret=interpret,
    )
    if reason is not None:
        raise NotImplementedError(f"decode_front_end_pallas: {reason}")
    width, layers = tables[0].shape[1], len(tables)
    out_type = jax.ShapeDtypeStruct(
        (padded_tokens(tokens), layout.n_hash_cols * width), jnp.bfloat16
    )
    alive_type = jax.ShapeDtypeStruct((tokens,), jnp.bool_)
    empty = tokens == 0 or input_ids.shape[0] == 0
    if advance_lookback and (empty or lookback_token_ids is None):
        lacks = "token" if empty else "window to advance"
        raise NotImplementedError(f"decode_front_end_pallas: there is no {lacks}")
    windows = (query_start_loc.shape[0] - 1, layout.max_ngram_size - 1)
    if empty or windows[0] == 0:
        rows = tuple(jnp.zeros(out_type.shape, out_type.dtype) for _ in tables)
        alive = jnp.zeros(alive_type.shape, alive_type.dtype)
        ids, dead = (jnp.zeros(windows, dtype) for dtype in (jnp.int32, jnp.bool_))
        return rows, alive, (ids, dead) if advance_lookback else None
    operands = batch_operands(
        input_ids,
        positions,
        query_start_loc,
        token_map,
        dead_mask,
        lookback_token_ids,
        lookback_dead_mask,
        slot_cache,
        block_table,
    )
    batch = batch_sizes(operands, layout, pad_id, block_size)
    operands |= layout_constants(layout)
    if first_token is not None:
        operands["first"] = first_token
    operands |= by_layer(weight=weights, scale=scales)
    own: Any = {"rows_in_tables": [x.shape[0] for x in tables], "width": width}
    if addresses is not None:
        operands |= by_layer(record=addresses)
        locate: Locate = functools.partial(_record_row, **own)
    elif records is not None:
        operands |= by_layer(record=records)
        peers = PeerTables(records[0].shape[0] - 1, columns, rows_per_shard)
        locate = functools.partial(find_row, tables=peers, width=width)
    else:
        locate = functools.partial(_own_row, **own)
    out_types = {f"out {layer}": out_type for layer in range(layers)}
    out_types["alive"] = alive_type
    threads = tokens * layout.n_hash_cols * width // _PIECE
    if advance_lookback:
        threads = max(threads, math.prod(windows))
        out_types["advanced"] = jax.ShapeDtypeStruct(windows, jnp.int32)
        if {"dead", "lookback_dead"} & operands.keys():
            out_types["advanced_dead"] = jax.ShapeDtypeStruct(windows, jnp.bool_)
    names = [*operands, *out_types]

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(),) * len(names),
            *(plgpu.Layout.WG_SPLAT,) * 2,
        ),
    )
    def move(ctx, *arguments):
        del ctx
        *buffers, layer, cta = arguments
        refs = dict(zip(names, buffers, strict=True))
        thread = Word(cta.registers.item()) * WARPGROUP + thread_index()
        layer = Word(layer.registers.item())
        piece = functools.partial(
            _move_piece, refs, batch, layout, layer, thread, width, tokens, locate
        )
        _run_thread(refs, batch, layer, thread, piece)

    def decode_front_end(*buffers):
        move(*buffers, lax.axis_index("layer"), lax.axis_index("cta"))

    outs = plgpu.kernel(
        decode_front_end,
        out_type=tuple(out_types.values()),
        grid=(layers, -(-threads // WARPGROUP)),
        grid_names=("layer", "cta"),
    )(*operands.values())
    named = dict(zip(out_types, outs, strict=True))
    advanced = None
    if advance_lookback:
        advanced = named["advanced"], named.get("advanced_dead")
    return tuple(outs[:layers]), named["alive"], advanced

"""Hash and row lookup of all layers in one Mosaic GPU kernel, for decoding.

At a few tokens each kernel costs more to start than to run: hash, one lookup a layer
and one reordering a layer are five kernels for two layers. Here every thread finds its
row itself, reads 16 of its values and writes them where the FP8 projection expects
them (`wkv_pallas.permute_columns`). Threads of a row repeat its hash, which costs
nothing while the card is nearly empty; for many tokens the separate kernels are faster.

Why inline Mosaic code: see `lookup_pallas` and `ngram_hash_pallas`; their pieces serve
here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from engram_jax.layout import EngramLayout

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
    read_back,
    read_column,
    read_multipliers,
    roll,
)

_PIECE = 16  # values that a thread moves
_ORDER = 64  # columns within which `wkv_pallas.permute_columns` works
_TOKENS_MULTIPLE = 8  # what the projection's matrix unit takes at a time


def padded_tokens(tokens: int) -> int:
    """Give the tokens of the output: a multiple of 8, at least 8."""
    return max(1, -(-tokens // _TOKENS_MULTIPLE)) * _TOKENS_MULTIPLE


def unsupported_reason(
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    input_ids: jax.Array,
    *,
    layout: EngramLayout,
    pad_id: int,
    interpret: bool = False,
) -> str | None:
    """Say why `decode_front_end_pallas` cannot take these operands, or give None."""
    del scales
    if interpret:
        return INTERPRET_REASON
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        return f"tables differ in their rows' width: {sorted(widths)}"
    (width,) = widths
    if width % _ORDER:
        return f"rows have {width} values, not a multiple of {_ORDER}"
    if input_ids.size * layout.n_hash_cols * width // _PIECE >= 2**31:
        return f"{input_ids.size} tokens have more pieces than 32 bits can count"
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


def _move_piece(
    refs: Refs,
    tables: Sequence[tuple[Any, Any, Any]],
    batch: Batch,
    layout: EngramLayout,
    layer: Word,
    piece: Word,
    width: int,
    rows: Sequence[int],
) -> None:
    per_row = width // _PIECE
    exists = piece.compare("ult", batch.tokens * layout.n_hash_cols * per_row)
    number = exists.select(piece, 0)
    slot, part = number // per_row, number % per_row
    token, col = slot // layout.n_hash_cols, slot % layout.n_hash_cols
    row, alive = _find_row(refs, batch, layout, layer, token, col)
    is_first = layer.compare("eq", 0) & col.compare("eq", 0) & part.compare("eq", 0)
    mask = address(refs["alive"]) + token.widen()
    store(mask, [alive.select(Word.of(1), 0)], width=8, only_if=exists & is_first)
    inside = exists & row.compare("ult", pick(layer, [Word.of(r) for r in rows]))

    # Part (64-block, b) holds the words a = 0 to 3 at byte 16 a + 4 b of its block.
    weight, scale, out = (
        pick(layer, [address(ref) for ref in refs_of])
        for refs_of in zip(*tables, strict=True)
    )
    block, b = part // 4, part % 4
    values = weight + row.widen() * width + (block * _ORDER + b * 4).widen()
    words = [load(values + 16 * a, only_if=inside)[0] for a in range(4)]
    scales = scale + row.widen() * (width // 32) + (block * 2).widen()
    (both,) = load(scales, width=16, only_if=inside)
    pairs = [e8m0_pair(both & 0xFF), e8m0_pair(both >> 8)]
    decoded = [
        decode_e4m3(word, pairs[a // 2], in_order=False) for a, word in enumerate(words)
    ]
    where = out + (number * (2 * _PIECE)).widen()
    for d in range(2):
        store(where + 16 * d, [four[d] for four in decoded], only_if=exists)


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
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
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
      layout: Primes, offsets and multipliers.
      pad_id: The compressed pad id.
      block_size: Positions in a block.
      interpret: Must be False; see `ngram_hash_pallas.INTERPRET_REASON`.

    Returns:
      One bfloat16 [`padded_tokens` (T), C * D] a layer, and which tokens are alive,
      bool [T]: of a request, and not dead. Rows from T on are not written and hold
      anything; the projection does not use what comes of them.
    """
    reason = unsupported_reason(
        weights, scales, input_ids, layout=layout, pad_id=pad_id, interpret=interpret
    )
    if reason is not None:
        raise NotImplementedError(f"decode_front_end_pallas: {reason}")
    width, columns = weights[0].shape[1], layout.n_hash_cols
    out_type = jax.ShapeDtypeStruct(
        (padded_tokens(input_ids.shape[0]), columns * width), jnp.bfloat16
    )
    if input_ids.shape[0] == 0 or query_start_loc.shape[0] < 2:
        rows = tuple(jnp.zeros(out_type.shape, out_type.dtype) for _ in weights)
        return rows, jnp.zeros(input_ids.shape, jnp.bool_)
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
    rows, layers = [weight.shape[0] for weight in weights], len(weights)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(),) * (len(operands) + 3 * layers + 1),
            *(plgpu.Layout.WG_SPLAT,) * 2,
        ),
    )
    def move(ctx, *arguments):
        del ctx
        *buffers, alive, layer, cta = arguments
        refs = dict(zip(operands, buffers, strict=False)) | {"alive": alive}
        buffers = buffers[len(operands) :]
        tables = [tuple(buffers[layer::layers]) for layer in range(layers)]
        piece = Word(cta.registers.item()) * WARPGROUP + thread_index()
        layer = Word(layer.registers.item())
        _move_piece(refs, tables, batch, layout, layer, piece, width, rows)

    def decode_front_end(*buffers):
        move(*buffers, lax.axis_index("layer"), lax.axis_index("cta"))

    pieces = batch.tokens * columns * width // _PIECE
    alive_type = jax.ShapeDtypeStruct(input_ids.shape, jnp.bool_)
    *rows_out, alive = plgpu.kernel(
        decode_front_end,
        out_type=(*(out_type,) * layers, alive_type),
        grid=(layers, -(-pieces // WARPGROUP)),
        grid_names=("layer", "cta"),
    )(*operands.values(), *weights, *scales)
    return tuple(rows_out), alive

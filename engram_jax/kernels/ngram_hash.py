"""Token ids of a ragged batch to the table rows of their n-grams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from engram_jax.layout import EngramLayout

from .dispatch import Backend, resolve_backend

UNKNOWN_SLOT = -2
"""What a slot cache holds where nothing was written."""

DEAD_SLOT = -1
"""What a slot cache holds for a dead token."""

# One rounding step of a float64 quotient is exact from this prime on: see `_remainder`.
_MIN_QUOTIENT_PRIME = 1 << 12


def _compressed(ids, token_map):
    """Compressed ids, and which of the ids are tokens at all."""
    inside = (ids >= 0) & (ids < token_map.shape[0])
    safe = jnp.where(inside, ids, 0)
    return token_map.at[safe].get(mode="promise_in_bounds"), inside


def compressed_or_dead(input_ids, dead_mask, token_map) -> Int32[Array, "..."]:
    """Compressed ids of a batch's tokens, `DEAD_SLOT` for a dead one."""
    compressed, inside = _compressed(input_ids, token_map)
    if dead_mask is not None:
        inside &= ~dead_mask
    return jnp.where(inside, compressed, DEAD_SLOT)


def _request_of_token(num_tokens: int, query_start_loc):
    """Each token's request, its place in the chunk, and whether it has a request."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    last = query_start_loc.shape[0] - 2
    request = jnp.searchsorted(query_start_loc[1:], token, side="right")
    request = jnp.minimum(request, last).astype(jnp.int32)
    place = token - query_start_loc[request]
    return request, place, (place >= 0) & (token < query_start_loc[-1])


def _cached(slot_cache, block_table, block_size, request, position):
    """What the slot cache holds of earlier positions; `UNKNOWN_SLOT` beyond it."""
    num_slots, blocks = slot_cache.shape[0], block_table.shape[1]
    if num_slots == 0 or blocks == 0:
        return jnp.full_like(position, UNKNOWN_SLOT)
    column = position // block_size
    known = (column >= 0) & (column < blocks)
    block = block_table[request, jnp.where(known, column, 0)]
    # Compared as blocks, so that a product cannot overflow into a valid slot.
    known &= (block >= 0) & (block <= (num_slots - 1) // block_size)
    slot = jnp.where(known, block, 0) * block_size + position % block_size
    known &= slot < num_slots
    value = slot_cache.at[jnp.where(known, slot, 0)].get(mode="promise_in_bounds")
    return jnp.where(known, value, UNKNOWN_SLOT)


def _windows(
    input_ids,
    positions,
    query_start_loc,
    token_map,
    dead_mask,
    lookback_token_ids,
    lookback_dead_mask,
    slot_cache,
    block_table,
    *,
    pad_id,
    max_ngram_size,
    block_size,
):
    """Compressed ids of each token and those before it, int32 [T, n], and validity."""
    num_tokens = input_ids.shape[0]
    request, place, valid = _request_of_token(num_tokens, query_start_loc)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    current = compressed_or_dead(input_ids, dead_mask, token_map)
    alive = current != DEAD_SLOT
    window = [jnp.where(alive, current, pad_id)]
    for back in range(1, max_ngram_size):
        value = jnp.full_like(current, UNKNOWN_SLOT)
        if slot_cache is not None:
            value = _cached(
                slot_cache, block_table, block_size, request, positions - back
            )
        if lookback_token_ids is not None:
            # The nearest place before the chunk is column 0.
            column = jnp.clip(back - 1 - place, 0, max_ngram_size - 2)
            ids = lookback_token_ids[request, column]
            dead = jnp.zeros_like(alive)
            if lookback_dead_mask is not None:
                dead = lookback_dead_mask[request, column]
            compressed, inside = _compressed(ids, token_map)
            given = jnp.where(inside & ~dead, compressed, DEAD_SLOT)
            value = jnp.where((ids == -1) & ~dead, value, given)
        in_chunk = back <= place
        value = jnp.where(in_chunk, current[jnp.maximum(token - back, 0)], value)
        # The request's start and a dead token end the window; an unknown place does
        # not.
        alive &= (positions >= back) & (value != DEAD_SLOT)
        window.append(jnp.where(alive & (value >= 0), value, pad_id))
    return jnp.stack(window, axis=-1), valid


def _remainder(value, primes):
    """Exact `value mod primes` for int64 values below 2^63, as int32.

    A float64 quotient is off by less than 3 * 2^10 / p, so that from p = 4096 on it
    truncates to the quotient or a neighbour; a smaller prime takes a second, exact
    remainder of a small number. Three times as fast as an integer remainder on a CPU,
    which has no vector form of it.
    """
    quotient = (value.astype(jnp.float64) * (1.0 / primes)).astype(jnp.int64)
    rest = (value - quotient * primes).astype(jnp.int32)
    primes = primes.astype(np.int32)
    if primes.min(initial=_MIN_QUOTIENT_PRIME) < _MIN_QUOTIENT_PRIME:
        return rest % primes
    rest = jnp.where(rest < 0, rest + primes, rest)
    return jnp.where(rest >= primes, rest - primes, rest)


def _integer_remainder(value, primes):
    """The same by integer division, where float64 is not the IEEE one."""
    return lax.rem(*jnp.broadcast_arrays(value, primes)).astype(jnp.int32)


def _rows(windows, layout: EngramLayout):
    """Rows [T, L, C] of windows [T, n]: `(xor_s id_s * mult_s) mod prime + offset`."""
    size, layers = layout.max_ngram_size, layout.num_layers
    with jax.enable_x64(True):
        products = windows.astype(jnp.int64)[:, None] * layout.multipliers
        rolling, per_size = products[..., 0], []
        for back in range(1, size):
            rolling = rolling ^ products[..., back]
            per_size.append(rolling)
        value = jnp.stack(per_size, axis=-1)[..., None]
        rows = lax.platform_dependent(
            value,
            tpu=functools.partial(_integer_remainder, primes=layout.primes),
            default=functools.partial(_remainder, primes=layout.primes),
        )
        rows = rows.reshape(-1, layers, layout.n_hash_cols)
        return rows + layout.offsets.astype(np.int32)


def _ngram_hash_xla(*operands, layout: EngramLayout, pad_id, block_size):
    windows, valid = _windows(
        *operands,
        pad_id=pad_id,
        max_ngram_size=layout.max_ngram_size,
        block_size=block_size,
    )
    return jnp.where(valid[:, None, None], _rows(windows, layout), jnp.int32(-1))


def ngram_hash(
    input_ids: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    query_start_loc: Int32[Array, " R_plus_1"],
    token_map: Int32[Array, " V"],
    *,
    layout: EngramLayout,
    pad_id: int,
    dead_mask: Bool[Array, " T"] | None = None,
    lookback_token_ids: Int[Array, "R n_minus_1"] | None = None,
    lookback_dead_mask: Bool[Array, "R n_minus_1"] | None = None,
    slot_cache: Int32[Array, " slots"] | None = None,
    block_table: Int32[Array, "R blocks"] | None = None,
    block_size: int | None = None,
    backend: Backend | None = None,
) -> Int32[Array, "T L C"]:
    """Hash every token's n-grams to table rows, for all layers.

    `rolling_s = xor_{k <= s} id_k * multiplier_k` over the compressed ids of the token
    and those before it; `row = rolling_(size - 1) mod prime + offset` in 64-bit
    integers. `NgramHashState` says where ids before the chunk come from; it checks and
    prepares these operands, and is what callers want.

    Args:
        input_ids: raw token ids; one outside the vocabulary is dead.
        positions: each token's place in its request.
        query_start_loc: where each request's tokens start, and the end of the last.
        token_map: compressed id of each raw id.
        layout: primes, offsets and multipliers.
        pad_id: the compressed pad id.
        dead_mask: True for tokens that take part in no n-gram.
        lookback_token_ids: raw ids before each chunk, most recent first, -1 unknown.
        lookback_dead_mask: which of these are dead.
        slot_cache: compressed ids by slot, this batch's writes included.
        block_table: block of each request's positions.
        block_size: positions in a block.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        int32 [T, L, C]; -1 for tokens of no request.

    Raises:
        NotImplementedError: an explicit backend cannot run here.

    References:
        Conditional Memory via Scalable Lookup, arXiv 2601.07372.
    """
    shape = (input_ids.shape[0], layout.num_layers, layout.n_hash_cols)
    if input_ids.shape[0] == 0 or query_start_loc.shape[0] < 2:
        return jnp.full(shape, -1, jnp.int32)
    operands = (
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
    static = {"layout": layout, "pad_id": pad_id, "block_size": block_size}

    def unsupported_reason(interpret):
        from . import ngram_hash_pallas

        return ngram_hash_pallas.unsupported_reason(
            *operands, **static, interpret=interpret
        )

    chosen = resolve_backend("ngram_hash", backend, unsupported_reason)
    if chosen == "xla":
        return _ngram_hash_xla(*operands, **static)
    from . import ngram_hash_pallas  # here, since importing Pallas takes a second

    kernel = functools.partial(
        ngram_hash_pallas.ngram_hash_pallas,
        **static,
        interpret=chosen == "pallas_interpret",
    )
    return jax.custom_batching.sequential_vmap(kernel)(*operands)

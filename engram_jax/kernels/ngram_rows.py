"""From raw token ids to the rows of every layer, in one step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Float8e4m3fn, Int32, UInt8, UInt32

from engram_jax.layout import EngramLayout

from .dispatch import Backend, resolve_backend
from .wkv import OrderedRows, library_reason

_NAMES = (
    "input_ids",
    "positions",
    "query_start_loc",
    "token_map",
    "dead_mask",
    "lookback_token_ids",
    "lookback_dead_mask",
    "slot_cache",
    "block_table",
)


def reads_at_once(
    weights: Sequence[Any],
    tokens: int,
    *,
    layout: EngramLayout,
    pad_id: int,
    as_records: bool = False,
    backend: Backend | None = None,
) -> bool:
    """Say whether `ngram_rows` has a kernel for these tables and so many tokens.

    Args:
        weights: one table a layer, or their shapes.
        tokens: how many tokens' rows are wanted.
        layout: primes, offsets and multipliers.
        pad_id: the compressed pad id.
        as_records: whether tables are given by their addresses.
        backend: as of `ngram_rows`.

    Returns:
        True where it runs; elsewhere `ngram_hash` and `lookup` are to be used one after
        the other.
    """

    def unsupported_reason(interpret):
        from . import decode_front_end_pallas

        return library_reason(tokens) or decode_front_end_pallas.unsupported_reason(
            weights,
            tokens,
            layout=layout,
            pad_id=pad_id,
            as_records=as_records,
            interpret=interpret,
        )

    if backend in ("xla", "pallas_interpret") or tokens == 0:
        return False
    # Also where kernels were asked for: without this one, others do the same.
    return resolve_backend("ngram_rows", None, unsupported_reason) != "xla"


def ngram_rows(
    weights: Sequence[
        Float8e4m3fn[Array, "_ D"] | UInt8[Array, "_ D"] | jax.ShapeDtypeStruct
    ],
    scales: Sequence[UInt8[Array, "_ G"]],
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    records: Sequence[UInt32[Array, "_ 8"]] | None = None,
    columns: int | None = None,
    rows_per_shard: Sequence[int] = (),
    first_token: Int32[Array, "1"] | None = None,
    num_tokens: int | None = None,
    addresses: Sequence[UInt32[Array, "2"]] | None = None,
    advance_lookback: bool = False,
    **batch: Any,
) -> tuple[tuple[OrderedRows, ...], Bool[Array, " N"], Any]:
    """Hash every token's n-grams and read their rows, for all layers.

    `rows_l = lookup(weights[l], scales[l], ngram_hash(..)[:, l])`, in the order in
    which `wkv`'s GPU kernel reads its weight. For a few tokens, two layers' hash,
    lookups and reordering would be five kernels that take longer to start than to run.

    With `records` rows come from the memory of the GPUs that hold them, as those of
    `peer_lookup`: inside `shard_map`, NaN where a table was replaced.

    Gradient: none, tables are constants.

    Args:
        weights: one table a layer, e4m3 values or their bytes, in device or pinned host
            memory; with records this GPU's shards; with addresses only their shapes.
        scales: their E8M0 bytes [R, D/32]; with addresses none.
        layout: primes, offsets and multipliers.
        pad_id: the compressed pad id.
        block_size: positions in a block of the slot cache.
        records: as of `peer_lookup`, for tables that are cut over GPUs.
        columns: as of `peer_lookup`.
        rows_per_shard: as of `peer_lookup`.
        first_token: the first token whose rows are wanted; None takes the batch's.
        num_tokens: how many tokens' rows are wanted, N; None takes all, T. Those past
            the batch's end are zeros.
        addresses: of tables in host memory, as `record_lookup` takes them.
        advance_lookback: whether the kernel also moves the lookback windows past the
            batch, as `NgramHashState.advance_lookback` does.
        **batch: the other arguments of `ngram_hash`, which
            `NgramHashState.operands` makes.

    Returns:
        Each layer's rows; which tokens are alive (of a request, and not dead); and the
        advanced windows, int32 [R, n-1], with their dead mask, bool [R, n-1], or None
        where no dead mask was given. None in place of both unless asked for.

    Raises:
        NotImplementedError: there is no such kernel (ask `reads_at_once` first), or no
            window to advance.

    """
    from . import decode_front_end_pallas  # here, since importing Pallas takes a second

    tokens = batch["input_ids"].shape[0] if num_tokens is None else num_tokens
    kernel = functools.partial(
        decode_front_end_pallas.decode_front_end_pallas,
        layout=layout,
        pad_id=pad_id,
        block_size=block_size,
        columns=columns,
        rows_per_shard=tuple(rows_per_shard),
        num_tokens=num_tokens,
        advance_lookback=advance_lookback,
        table_shapes=tuple(weight.shape for weight in weights),
    )
    rows, alive, advanced = jax.custom_batching.sequential_vmap(kernel)(
        tuple(weights) if addresses is None else (),
        tuple(scales),
        *(batch.get(name) for name in _NAMES),
        None if records is None else tuple(records),
        first_token,
        None if addresses is None else tuple(addresses),
    )
    return tuple(OrderedRows(values, tokens) for values in rows), alive, advanced

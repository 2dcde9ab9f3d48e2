"""From raw token ids to the rows of every layer, in one step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Float8e4m3fn, UInt8

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


def ngram_rows(
    weights: Sequence[Float8e4m3fn[Array, "_ D"] | UInt8[Array, "_ D"]],
    scales: Sequence[UInt8[Array, "_ G"]],
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    backend: Backend | None = None,
    **batch: Any,
) -> tuple[tuple[OrderedRows, ...], Bool[Array, " T"]] | None:
    """Hash every token's n-grams and read their rows, for all layers.

    `rows_l = lookup(weights[l], scales[l], ngram_hash(..)[:, l])`, in the order in
    which `wkv`'s GPU kernel reads its weight. For a few tokens, two layers' hash,
    lookups and reordering would be five kernels that take longer to start than to run.

    Gradient: none, tables are constants.

    Args:
        weights: one table a layer, e4m3 values or their bytes.
        scales: their E8M0 bytes [R, D/32].
        layout: primes, offsets and multipliers.
        pad_id: the compressed pad id.
        block_size: positions in a block of the slot cache.
        backend: None takes the kernel where `wkv` takes its own; "xla" and
            "pallas_interpret" take none.
        **batch: the other arguments of `ngram_hash`, which
            `NgramHashState.operands` makes.

    Returns:
        Each layer's rows, and which tokens are alive (of a request, and not dead), bool
        [T]; or None where `ngram_hash` and `lookup` are to be used one after the other.

    """
    operands = tuple(batch.get(name) for name in _NAMES)
    static = {"layout": layout, "pad_id": pad_id, "block_size": block_size}
    tokens = batch["input_ids"].shape[0]

    def unsupported_reason(interpret):
        from . import decode_front_end_pallas

        return library_reason(tokens) or decode_front_end_pallas.unsupported_reason(
            weights,
            scales,
            batch["input_ids"],
            layout=layout,
            pad_id=pad_id,
            interpret=interpret,
        )

    if backend in ("xla", "pallas_interpret") or tokens == 0:
        return None
    # Also where kernels were asked for: without this one, others do the same.
    if resolve_backend("ngram_rows", None, unsupported_reason) == "xla":
        return None
    from . import decode_front_end_pallas  # here, since importing Pallas takes a second

    kernel = functools.partial(
        decode_front_end_pallas.decode_front_end_pallas, **static, interpret=False
    )
    rows, alive = jax.custom_batching.sequential_vmap(kernel)(
        tuple(weights), tuple(scales), *operands
    )
    return tuple(OrderedRows(values, tokens) for values in rows), alive

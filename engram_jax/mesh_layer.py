"""Projection and gate of one Engram layer over a mesh."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float, UInt8

from . import kernels
from .exchange import columns_to_tokens, gather_columns, pad_tokens, unpad_tokens
from .sharding import EngramSharding


def project(
    sharding: EngramSharding,
    rows: Float[Array, "T C D"] | UInt8[Array, "T C P"] | kernels.OrderedRows,
    weight: Array,
    scale: Array | None,
    width: int,
    *,
    expanded: Array | None = None,
    backend: kernels.Backend | None = None,
) -> BFloat16[Array, "T N"]:
    """Project rows on the devices of their tokens, or by columns over the tensor axis.

    Args:
        sharding: how tokens and weight lie on the mesh.
        rows: each token's rows, laid out by `sharding.rows`; or those that
            `hash_on_mesh` gives, which count each device's own tokens.
        weight: [N padded, C*D], laid out by `sharding.projection`.
        scale: E8M0 bytes [N padded / 32, C*D/32], or None.
        width: N = (M+1)*E.
        expanded: the weight in bfloat16, laid out alike, or None.
        backend: of `kernels.wkv`.

    Returns:
        bfloat16 [T padded, N], laid out by `sharding.tokens`.
    """

    def body(rows, weight, scale, expanded):
        kv = kernels.wkv(rows, weight, scale, expanded=expanded, backend=backend)
        if not sharding.shard_projection:
            return kv[:, :width]
        together = columns_to_tokens if sharding.sequence_parallel else gather_columns
        return together(kv, sharding.tensor_axes, width)

    if not isinstance(rows, kernels.OrderedRows):
        if rows.shape[0] == 0:  # no collective takes empty arrays
            return jnp.zeros((0, width), jnp.bfloat16)
        rows = pad_tokens(sharding, rows, sharding.pad_tokens(rows.shape[0]))
    specs = (sharding.rows, *(sharding.projection,) * 3)
    call = sharding.shard_map(body, specs, sharding.tokens)
    return call(rows, weight, scale, expanded)


def by_token(
    sharding: EngramSharding,
    function: Callable[..., Array],
    hidden: Float[Array, "T M E"],
    kv: BFloat16[Array, "S N"],
    q_weight: Float[Array, "M E"],
    k_weight: Float[Array, "M E"],
    token_mask: Bool[Array, " T"] | None,
) -> Array:
    """Run the gate on the devices that tokens lie on; no device needs another's.

    Args:
        sharding: how tokens lie on the mesh.
        function: of the five arrays that follow; `kernels.gate` or `gate_values`.
        hidden: the residual streams, laid out in any way, T of any length.
        kv: what `project` gave; T padded.
        q_weight: [M, E].
        k_weight: [M, E].
        token_mask: False shuts the gate.

    Returns:
        What the function gives, [T, ...]; on an Explicit mesh, tokens laid out as those
        of `hidden`.

    Raises:
        ValueError: hidden and kv have tokens of different batches.
    """
    num_tokens, padded = hidden.shape[0], sharding.pad_tokens(hidden.shape[0])
    if kv.shape[0] != padded:
        raise ValueError(
            f"hidden has {num_tokens} tokens, which this mesh pads to {padded}; the "
            f"projected rows have {kv.shape[0]}: they are of another batch"
        )
    if padded == 0:  # XLA has been seen to crash on empty shards
        empty = jax.eval_shape(function, hidden, kv, q_weight, k_weight, token_mask)
        return jnp.zeros(empty.shape, empty.dtype)
    given = jax.typeof(hidden).sharding.spec
    hidden = pad_tokens(sharding, hidden, padded)
    if token_mask is not None:
        token_mask = pad_tokens(sharding, token_mask, padded, fill=False)
    by_tokens = sharding.tokens
    call = sharding.shard_map(
        function, (by_tokens, by_tokens, P(), P(), by_tokens), by_tokens
    )
    result = call(hidden, kv, q_weight, k_weight, token_mask)
    result = unpad_tokens(sharding, result, num_tokens)
    return sharding.reshard(result, P(*given[: result.ndim]))

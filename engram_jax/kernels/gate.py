"""The gate: how much of a token's value enters each residual stream."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, BFloat16, Bool, Float

from .dispatch import Backend, kernel_with_xla_gradient, resolve_backend

# Over fewer elements XLA's CPU compiler sums in another order: in JAX 0.11 below 4,096,
# in JAX 0.12 on a processor with AVX-512 below 16,384. (There, V4.1's width has yet
# another order from some hundred tokens on.)
_MIN_ELEMENTS = 16384


def _plain_inverse_rms(x, eps):
    return lax.rsqrt(jnp.square(x).mean(axis=-1) + jnp.float32(eps))


_inverse_rms: Any = jax.custom_jvp(_plain_inverse_rms, nondiff_argnums=(1,))


@_inverse_rms.defjvp
def _inverse_rms_jvp(eps, primals, tangents):
    # The slope of rsqrt alone, r^3 / 2, is infinite in float32 for a stream of zeros
    # and eps below 1e-25; times the stream it is not.
    (x,), (dx,) = primals, tangents
    inverse = _inverse_rms(x, eps)
    unit = x * inverse[..., None]
    return inverse, -(unit * (dx * inverse[..., None])).mean(axis=-1) * inverse


def gate_values(
    hidden: Float[Array, "T M E"],
    kv: Float[Array, "T N"],
    q_weight: Float[Array, "M E"],
    k_weight: Float[Array, "M E"],
    *,
    eps: float,
    clamp: float = 1e-6,
) -> Float[Array, "T M"]:
    """Compute the gates alone, in float32.

    `dot = sum(hidden * q_weight * k_weight * key) * r_h * r_k / sqrt(E)` with
    `r = rsqrt(mean(x^2) + eps)`; `gate = sigmoid(copysign(sqrt(max(|dot|, clamp)),
    dot))`. Finite, with finite gradients, also where hidden or key are all zero.

    Args:
        hidden: the residual streams [T, M, E], bfloat16, float16 or float32.
        kv: the projection [T, (M+1)*E]; only the M keys are read.
        q_weight: [M, E].
        k_weight: [M, E].
        eps: added to the mean squares, `rms_norm_eps`; above 0.
        clamp: the least |dot| whose root is taken; above 0.

    Returns:
        float32 [T, M], in (0, 1).

    Example:
        >>> x = jnp.ones((1, 2, 4))
        >>> gate_values(x, jnp.zeros((1, 12)), x[0], x[0], eps=1e-6).round(4)
        Array([[0.5002, 0.5002]], dtype=float32)

    References:
        Conditional Memory via Scalable Lookup, arXiv 2601.07372.
    """
    tokens, streams, width = hidden.shape
    f32 = jnp.float32
    # The same sums at every T where that can be had, so that a token decoded alone gets
    # the gate that it gets in a prefill, to the last bit.
    missing = max(-(-_MIN_ELEMENTS // max(streams * width, 1)) - tokens, 0)
    hidden = jnp.pad(hidden.astype(f32), ((0, missing), (0, 0), (0, 0)))
    keys = jnp.pad(kv[:, : streams * width], ((0, missing), (0, 0)))
    keys = keys.reshape(-1, streams, width).astype(f32)
    weights = q_weight.astype(f32) * k_weight.astype(f32)

    dot = (hidden * keys * weights).sum(axis=-1)
    dot = dot * (_inverse_rms(hidden, eps) * _inverse_rms(keys, eps))
    dot = dot * f32(width**-0.5)
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), f32(clamp)))
    return nn.sigmoid(jnp.where(dot < 0, -root, root))[:tokens]


def _gate_xla(hidden, kv, q_weight, k_weight, token_mask, *, eps, clamp):
    _, streams, width = hidden.shape
    if token_mask is None:
        stream, numbers = hidden, kv
    else:
        # Shut tokens compute on zeros, so that a NaN there reaches no gradient.
        stream = jnp.where(token_mask[:, None, None], hidden, 0)
        numbers = jnp.where(token_mask[:, None], kv, 0)
    gate = gate_values(stream, numbers, q_weight, k_weight, eps=eps, clamp=clamp)
    value = numbers[:, streams * width :].astype(jnp.float32)
    added = stream.astype(jnp.float32) + gate[:, :, None] * value[:, None, :]
    added = added.astype(hidden.dtype)
    if token_mask is None:
        return added
    return jnp.where(token_mask[:, None, None], added, hidden)


def _check(hidden, kv, q_weight, k_weight, token_mask, eps, clamp) -> None:
    if hidden.ndim != 3 or not hidden.shape[2]:
        raise ValueError(
            f"hidden has shape {hidden.shape}; it must be [T, M, E], E at least 1"
        )
    for name, number in (("eps", eps), ("clamp", clamp)):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(
                f"{name} is {number}; it must be a number above 0, or a stream of "
                "zeros would have no finite gate or gradient"
            )
    for name, array in (
        ("hidden", hidden),
        ("kv", kv),
        ("q_weight", q_weight),
        ("k_weight", k_weight),
    ):
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise TypeError(
                f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or "
                "float32"
            )
    tokens, streams, width = hidden.shape
    for name, array, wanted in (
        ("kv", kv, (tokens, (streams + 1) * width)),
        ("q_weight", q_weight, (streams, width)),
        ("k_weight", k_weight, (streams, width)),
    ):
        if array.shape != wanted:
            raise ValueError(
                f"{name} has shape {array.shape} for hidden of shape {hidden.shape} "
                f"[T, M, E]; it must be {wanted}"
            )
    if token_mask is not None and (
        token_mask.shape != (tokens,) or token_mask.dtype != jnp.bool_
    ):
        raise ValueError(
            f"token_mask has shape {token_mask.shape} and dtype {token_mask.dtype}; it "
            f"must be bool [{tokens}], one per token"
        )


def gate(
    hidden: Float[Array, "T M E"],
    kv: BFloat16[Array, "T N"] | Float[Array, "T N"],
    q_weight: Float[Array, "M E"],
    k_weight: Float[Array, "M E"],
    *,
    token_mask: Bool[Array, " T"] | None = None,
    eps: float,
    clamp: float = 1e-6,
    backend: Backend | None = None,
) -> Float[Array, "T M E"]:
    """Add each token's value to its residual streams, as far as the gate lets it.

    `out = hidden + gate * value` in float32, rounded once to the dtype of `hidden`,
    with the gates of `gate_values` and `kv = [key_1, .., key_M, value]`.

    Reads `hidden` and `kv` once and writes `out`: (3 M + 1) E elements a token.

    Gradient: with respect to `hidden`, `kv`, `q_weight` and `k_weight`, by recomputing
    the gates; a shut token passes its gradient through and adds to no other.

    Args:
        hidden: the residual streams [T, M, E], bfloat16, float16 or float32.
        kv: the projection [T, (M+1)*E], bfloat16 as `wkv` gives it.
        q_weight: [M, E].
        k_weight: [M, E].
        token_mask: bool [T]; False shuts the gate: the token's streams come out as
            they are, bit for bit, whatever `kv` holds. None opens it for all.
        eps: added to the mean squares, `rms_norm_eps`; above 0.
        clamp: the least |dot| whose root is taken; above 0.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        [T, M, E] in the dtype of `hidden`.

    Raises:
        TypeError: a dtype is none of the above.
        ValueError: shapes do not fit each other, or `eps` or `clamp` is not above 0.
        NotImplementedError: an explicit backend cannot run here.

    Example:
        >>> hidden = jnp.ones((2, 1, 32), jnp.bfloat16)
        >>> kv = jnp.ones((2, 64), jnp.bfloat16)
        >>> ones = jnp.ones((1, 32), jnp.bfloat16)
        >>> mask = jnp.array([True, False])
        >>> gate(hidden, kv, ones, ones, token_mask=mask, eps=1e-6)[:, 0, 0]
        Array([1.91406, 1], dtype=bfloat16)

    References:
        Conditional Memory via Scalable Lookup, arXiv 2601.07372.
    """
    _check(hidden, kv, q_weight, k_weight, token_mask, eps, clamp)
    operands = (hidden, kv, q_weight, k_weight, token_mask)
    static = {"eps": float(eps), "clamp": float(clamp)}

    def unsupported_reason(interpret):
        from . import gate_pallas

        return gate_pallas.unsupported_reason(*operands, **static, interpret=interpret)

    chosen = resolve_backend("gate", backend, unsupported_reason)
    xla_form = functools.partial(_gate_xla, **static)
    if chosen == "xla":
        return xla_form(*operands)
    from . import gate_pallas  # here, since importing Pallas takes a second

    kernel = functools.partial(
        gate_pallas.gate_pallas, **static, interpret=chosen == "pallas_interpret"
    )
    return kernel_with_xla_gradient(kernel, xla_form)(*operands)

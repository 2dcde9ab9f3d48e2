"""Collectives that keep every bit of the rows that they move."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_bits(collective, x) -> Any:
    """Run a collective on the bits of floats.

    They travel as wide as they are (XLA's CPU compiler moves bfloat16 as float32), and
    a sum of which all terms but one are zero keeps that one's bits: a sum of floats
    would turn -0 into +0. Gradient: the collective's own.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return collective(x)
    width = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = collective(lax.bitcast_convert_type(x, width))
    return lax.bitcast_convert_type(bits, x.dtype)


_over_bits.defvjp(
    lambda collective, x: (_over_bits(collective, x), x),
    # Linear, so that x itself is not read, and inside jit not kept either.
    lambda collective, x, cotangent: jax.vjp(collective, x)[1](cotangent),
)


def gather(x: Array, axes: tuple[str, ...], axis: int) -> Any:
    """Put the parts of all devices side by side along an axis."""
    return _over_bits(
        functools.partial(lax.all_gather, axis_name=axes, axis=axis, tiled=True), x
    )


def trade(x: Array, axes: tuple[str, ...], split_axis: int, concat_axis: int) -> Any:
    """Give each device its part along one axis; put what comes side by side."""
    return _over_bits(
        functools.partial(
            lax.all_to_all,
            axis_name=axes,
            split_axis=split_axis,
            concat_axis=concat_axis,
            tiled=True,
        ),
        x,
    )


def sum_all(x: Array, axes: tuple[str, ...]) -> Any:
    """Add up what all devices have, where at most one has other than zeros."""
    return _over_bits(functools.partial(lax.psum, axis_name=axes), x)


def sum_and_split(x: Array, axes: tuple[str, ...]) -> Any:
    """Do as `sum_all`, and give each device its part of the first axis."""
    return _over_bits(
        functools.partial(
            lax.psum_scatter, axis_name=axes, scatter_dimension=0, tiled=True
        ),
        x,
    )

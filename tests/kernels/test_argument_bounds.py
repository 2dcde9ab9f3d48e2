"""Numbers at the edge of what an operation takes: exact there, refused beyond."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engram_jax import kernels

M, E = 2, 32


def gate_gradients(hidden, kv, eps):
    ones = jnp.ones((M, E))

    def loss(hidden, kv, q_weight, k_weight):
        return kernels.gate(hidden, kv, q_weight, k_weight, eps=eps).sum()

    return jax.grad(loss, (0, 1, 2, 3))(hidden, kv, ones, ones)


@pytest.mark.parametrize("eps", [1e-6, 1e-20, 1e-26, 2.0**-126])
@pytest.mark.parametrize(("hidden", "kv"), [(0, 1), (1, 0), (0, 0)])
def test_zero_streams_have_finite_gradients_at_every_eps(eps, hidden, kv):
    """Pitfall: hidden or key all zero; the slope of rsqrt alone is infinite."""
    gradients = gate_gradients(
        jnp.full((1, M, E), hidden, float), jnp.full((1, (M + 1) * E), kv, float), eps
    )
    chex.assert_tree_all_finite(gradients)


def test_the_gradient_of_the_norms_is_that_of_the_formula():
    rng = np.random.default_rng(3)
    shapes = ((2, M, E), (2, (M + 1) * E), (M, E), (M, E))
    hidden, kv, q_weight, k_weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes
    )

    def plain(hidden, kv):
        keys = kv[:, : M * E].reshape(hidden.shape)

        def unit(x):
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

        dot = (unit(hidden) * q_weight * k_weight * unit(keys)).sum(-1) / E**0.5
        root = jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))
        gates = jax.nn.sigmoid(root)
        return jnp.sin(hidden + gates[..., None] * kv[:, None, M * E :]).sum()

    def ours(hidden, kv):
        return jnp.sin(kernels.gate(hidden, kv, q_weight, k_weight, eps=1e-6)).sum()

    chex.assert_trees_all_close(
        jax.grad(ours, (0, 1))(hidden, kv),
        jax.grad(plain, (0, 1))(hidden, kv),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["eps", "clamp"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_the_gate_refuses_numbers_that_make_no_gate(name, value):
    hidden, ones = jnp.ones((1, M, E)), jnp.ones((M, E))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        kernels.gate(
            hidden, jnp.ones((1, (M + 1) * E)), ones, ones, **{"eps": 1e-6, name: value}
        )


TABLE = jnp.arange(1, 5, dtype=jnp.float32)[:, None] * jnp.ones((1, 32))


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_row_window_beyond_int32_is_not_cut_off_to_another(kind):
    """Without x64, JAX makes 2^32 a 0: the window would be another shard's."""
    ids = jnp.array([0, 3, 2**31 - 1])
    read = kernels.lookup(TABLE, None, ids, row_start=kind(2**32))
    chex.assert_trees_all_equal(read[:, 0], jnp.zeros(3))
    read = kernels.lookup(TABLE, None, ids, row_end=kind(2**32))
    chex.assert_trees_all_equal(read[:, 0], jnp.array([1.0, 4, 0]))


def test_a_traced_row_window_beyond_int32_is_not_cut_off_either():
    with jax.enable_x64(True):
        read = jax.jit(
            lambda start: kernels.lookup(TABLE, None, jnp.arange(4), row_start=start)
        )
        chex.assert_trees_all_equal(read(jnp.int64(2**32)), jnp.zeros_like(TABLE))
        chex.assert_trees_all_equal(read(jnp.int64(0)), TABLE)


def test_the_copy_of_a_projection_is_that_of_its_weight():
    weight = jnp.ones((64, 64), jnp.float8_e4m3fn)
    scale = jnp.full((2, 2), 127, jnp.uint8)
    rows = jnp.ones((3, 2, 32), jnp.bfloat16)
    with pytest.raises((TypeError, ValueError), match="expanded"):
        kernels.wkv(rows, weight, scale, expanded=jnp.ones((64, 32), jnp.bfloat16))


def test_rows_of_every_float_table_can_be_projected():
    weight = jnp.ones((64, 64), jnp.float8_e4m3fn)
    scale = jnp.full((2, 2), 127, jnp.uint8)
    rows = kernels.lookup(TABLE.astype(jnp.float16), None, jnp.array([[0, 3]]))
    chex.assert_trees_all_equal(
        kernels.wkv(rows, weight, scale),
        kernels.wkv(rows.astype(jnp.bfloat16), weight, scale),
    )

"""Training: gate and projection beside a frozen FP8 table, and a float table."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_stack import CONFIG, make_stack, random_hidden, random_ids
from tolerances import assert_within

from engram_jax import Constant, EngramBatch, ParallelEngramEmbedding, kernels
from engram_jax.staged_rows import StagedRows

TOKENS, STEPS = 24, 30


def train(stack, learning_rate: float) -> list[float]:
    """Fits the stack's output to fixed random streams; returns the losses."""
    hidden = random_hidden(TOKENS, dtype=jnp.float32)
    target = hidden + 0.1 * random_hidden(TOKENS, 9, jnp.float32)
    batch = stack.batch(random_ids(TOKENS), np.arange(TOKENS), [0, TOKENS])
    optimizer = nnx.Optimizer(stack, optax.adam(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(stack, optimizer):
        def loss(stack):
            out = hidden
            for layer_id in CONFIG.layer_ids:
                out = stack(layer_id, out, batch)
            return jnp.square(out - target).mean()

        value, gradients = nnx.value_and_grad(loss)(stack)
        optimizer.update(stack, gradients)
        return value

    return [float(step(stack, optimizer)) for _ in range(STEPS)]


def test_projection_and_gate_learn_while_the_table_stays():
    stack = make_stack()
    hidden = random_hidden(TOKENS)
    batch = stack.batch(random_ids(TOKENS), np.arange(TOKENS), [0, TOKENS])
    before = stack(1, hidden, batch)
    for layer in stack.layers.values():
        layer.dequantize_projection()
    chex.assert_trees_all_equal(stack(1, hidden, batch), before)
    tables = jax.tree.map(jnp.copy, nnx.state(stack, Constant))
    losses = train(stack, 1e-2)
    assert losses[-1] < 0.5 * losses[0], losses
    chex.assert_trees_all_equal(nnx.state(stack, Constant), tables)
    assert all(np.isfinite(losses))


def test_a_float_table_learns():
    stack = make_stack()
    for layer in stack.layers.values():
        rows = layer.embedding(jnp.arange(layer.embedding.num_rows))
        layer.embedding = ParallelEngramEmbedding(rows.astype(jnp.float32))
    losses = train(stack, 3e-2)
    assert losses[-1] < 0.5 * losses[0], losses


def test_the_gradient_of_a_float_table_reaches_only_the_rows_that_were_read():
    stack = make_stack()
    layer = stack.layers[1]
    rows = layer.embedding(jnp.arange(layer.embedding.num_rows)).astype(jnp.float32)
    ids = jnp.array([[5, 5, 7, -1, 10_000, 0]])

    def total(table):
        return (kernels.lookup(table, None, ids) * jnp.arange(1.0, 7.0)[:, None]).sum()

    gradient = np.asarray(jax.jit(jax.grad(total))(rows))
    expected = np.zeros(rows.shape)
    expected[5], expected[7], expected[0] = 1 + 2, 3, 6
    np.testing.assert_array_equal(gradient, expected)


def test_quantised_projection_comes_back():
    """FP8 to float and back loses nothing."""
    layer = make_stack().layers[1]
    layer.dequantize_projection(jnp.bfloat16)
    before = layer.wkv_weight[...]
    layer.quantize_projection()
    assert layer.wkv_weight.dtype == jnp.float8_e4m3fn
    layer.dequantize_projection(jnp.bfloat16)
    chex.assert_trees_all_equal(layer.wkv_weight[...], before)


def test_packed_rows_project_like_their_values():
    layer = make_stack().layers[3]
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 900, (5, 6)))
    packed = layer.project(layer.embedding.lookup_packed(ids))
    chex.assert_trees_all_equal(packed, layer.project(layer.embedding(ids)))


def test_a_bfloat16_projection_has_the_gradient_of_its_float32_product():
    rng = np.random.default_rng(3)
    rows = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(96, 64)), jnp.float32)
    cotangent = rng.normal(size=(5, 96))

    def total(rows, weight):
        return (kernels.wkv(rows, weight, None).astype(jnp.float32) * cotangent).sum()

    d_rows, d_weight = jax.jit(jax.grad(total, argnums=(0, 1)))(rows, weight)
    as_float = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (rows, weight)]
    magnitude = np.abs(cotangent).max() * 64 * 3
    assert_within("gradient_bfloat16", d_rows, cotangent @ as_float[1], magnitude)
    assert_within("gradient_bfloat16", d_weight, cotangent.T @ as_float[0], magnitude)


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_nan_row_of_a_dead_token_reaches_no_gradient(prefetched):
    """Pitfall: the gate selects, but a weight's gradient sums over all tokens."""
    stack = make_stack()
    layer = stack.layers[1]
    layer.dequantize_projection()
    dead = np.arange(TOKENS) == 5
    ids, starts = random_ids(TOKENS), [0, TOKENS]
    batch = stack.batch(ids, np.arange(TOKENS), starts, dead_mask=dead)
    rows = np.asarray(batch.hash_ids[:, 0])
    (only_there,) = set(rows[5].tolist()[:1]) - set(rows[~dead].ravel().tolist())
    layer.embedding.scale[...] = layer.embedding.scale[...].at[only_there].set(255)

    if prefetched:
        packed = layer.embedding.lookup_packed(batch.hash_ids[:, 0])
        staged = (StagedRows((packed,)), None)
        batch = EngramBatch(batch.hash_ids, batch.token_mask, staged)

    def loss(stack):
        out = stack(1, random_hidden(TOKENS), batch)
        return out.astype(jnp.float32).sum()

    assert np.isfinite(float(loss(stack)))
    chex.assert_tree_all_finite(jax.tree.leaves(nnx.grad(loss)(stack)))

"""The modules together: streams, cuts, transformations, padding."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_stack import CONFIG, make_stack, random_hidden, random_ids, token_map
from tolerances import assert_within

import engram_jax
from engram_jax import (
    EngramBatch,
    EngramLayout,
    EngramStack,
    NgramHashState,
    ParallelEngramEmbedding,
)
from engram_jax.host_storage import PinnedHostTable


@pytest.fixture(scope="module")
def stack() -> engram_jax.EngramStack:
    return make_stack()


def run_layers(stack, hidden, batch):
    for layer_id in stack.config.layer_ids:
        hidden = stack(layer_id, hidden, batch)
    return hidden


@nnx.jit
def one_shot(stack, hidden, input_ids, dead_mask):
    tokens = input_ids.shape[0]
    batch = stack.batch(
        input_ids,
        jnp.arange(tokens),
        jnp.array([0, tokens]),
        dead_mask=dead_mask,
    )
    return run_layers(stack, hidden, batch)


@nnx.jit
def chunk_step(stack, hidden, input_ids, start, dead_mask, window, window_dead):
    tokens = input_ids.shape[0]
    starts = jnp.array([0, tokens])
    batch = stack.batch(
        input_ids,
        start + jnp.arange(tokens),
        starts,
        dead_mask=dead_mask,
        lookback_token_ids=window,
        lookback_dead_mask=window_dead,
    )
    window = stack.hash_state.advance_lookback(
        window, window_dead, input_ids, starts, dead_mask=dead_mask
    )
    return run_layers(stack, hidden, batch), window


@pytest.mark.parametrize("cuts", [(1,), (5, 6, 7), (16, 17), (30,), tuple(range(34))])
def test_chunks_equal_one_shot_bit_for_bit(stack, cuts):
    """Pitfall: what came before a chunk's cut is lost; here any cut gives one result.

    The outputs are compared too: a token alone and the same token in a prefill go
    through products of other shapes, whose float32 sums must not differ.
    """
    tokens = 34
    ids, hidden = random_ids(tokens), random_hidden(tokens)
    dead = np.zeros(tokens, bool)
    dead[[4, 17, 18]] = True
    whole = one_shot(stack, hidden, ids, dead)
    window, parts = stack.hash_state.init_lookback(1), []
    for start, end in zip((0, *cuts), (*cuts, tokens), strict=True):
        if start == end:
            continue
        part = slice(start, end)
        out, window = chunk_step(
            stack, hidden[part], ids[part], start, dead[part], *window
        )
        parts.append(out)
    chex.assert_trees_all_equal(jnp.concatenate(parts), whole)


def test_scan_over_decode_steps_with_a_donated_slot_cache(stack):
    """Two streams decode interleaved in `lax.scan`, and never mix (pitfall)."""
    steps, block = 20, 4
    ids = np.stack([random_ids(steps, 3), random_ids(steps, 4)])
    hidden = random_hidden(2 * steps).reshape(steps, 2, *random_hidden(1).shape[1:])
    table = jnp.array([[1, 3, 5, 7, 9], [0, 2, 4, 6, 8]])
    graph, state = nnx.split(stack)

    @functools.partial(jax.jit, donate_argnames="cache")
    def decode(state, cache):
        stack = nnx.merge(graph, state)

        def step(carry, inputs):
            cache, position = carry
            tokens, hidden = inputs
            batch, cache = stack.batch(
                tokens,
                jnp.full(2, position),
                jnp.arange(3),
                slot_cache=cache,
                slot_mapping=table[:, position // block] * block + position % block,
                block_table=table,
                block_size=block,
            )
            return (cache, position + 1), run_layers(stack, hidden, batch)

        table_ids = jnp.asarray(ids.T)
        (cache, _), out = jax.lax.scan(step, (cache, 0), (table_ids, hidden))
        return cache, out

    cache = stack.hash_state.init_slot_cache(40)
    _, out = decode(state, cache)
    assert cache.is_deleted()
    for stream in range(2):
        whole = one_shot(stack, hidden[:, stream], ids[stream], np.zeros(steps, bool))
        chex.assert_trees_all_equal(out[:, stream], whole)


def test_vmap_over_a_batch(stack):
    ids = np.stack([random_ids(9, seed) for seed in range(3)])
    hidden = jnp.stack([random_hidden(9, seed) for seed in range(3)])
    graph, state = nnx.split(stack)

    def forward(state, ids, hidden):
        stack = nnx.merge(graph, state)
        batch = stack.batch(ids, jnp.arange(9), jnp.array([0, 9]))
        return run_layers(stack, hidden, batch)

    together = jax.jit(jax.vmap(forward, in_axes=(None, 0, 0)))(state, ids, hidden)
    for row in range(3):
        alone = jax.jit(forward)(state, ids[row], hidden[row])
        chex.assert_trees_all_equal(together[row], alone)


def test_checkpoint_gives_the_same_gradients(stack):
    hidden = random_hidden(7, dtype=jnp.float32)
    batch = stack.batch(random_ids(7), np.arange(7), [0, 7])

    def loss(wrap):
        layer = wrap(lambda h: run_layers(stack, h, batch))
        return jax.jit(jax.grad(lambda h: jnp.square(layer(h)).sum()))(hidden)

    plain = np.asarray(loss(lambda f: f), np.float64)
    assert_within(
        "gradient_float32", loss(jax.checkpoint), plain, float(np.abs(plain).max())
    )


def test_dead_tokens_pass_bit_for_bit_whatever_they_hold(stack):
    """Pitfall: a shut gate selects; a product by zero would keep NaN and lose -0."""
    hidden = random_hidden(6)
    hidden = hidden.at[2].set(jnp.nan).at[3].set(-jnp.inf).at[4].set(-0.0)
    dead = np.array([False, False, True, True, True, False])
    out = one_shot(stack, hidden, random_ids(6), dead)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    chex.assert_trees_all_equal(bits(out[2:5]), bits(hidden[2:5]))
    assert bool((out[5] != hidden[5]).any())


def test_ids_outside_the_vocabulary_shut_the_gate(stack):
    """Pitfall: placeholders for tokens not sampled yet never read as a token."""
    hidden = random_hidden(3)
    ids = np.array([5, -1, 9], np.int32)
    out = one_shot(stack, hidden, ids, None)
    chex.assert_trees_all_equal(out[1], hidden[1])
    dead = one_shot(stack, hidden, np.array([5, 7, 9]), np.array([False, True, False]))
    chex.assert_trees_all_equal(out, dead)
    far = one_shot(stack, hidden, np.array([5, CONFIG.vocab_size, 9]), None)
    chex.assert_trees_all_equal(out, far)


def test_padded_batches_compile_once_per_bucket(stack):
    """A serving loop whose token count changes each step does not recompile."""
    graph, state = nnx.split(stack)

    @jax.jit
    @chex.assert_max_traces(n=2)
    def step(state, hidden, padded):
        stack = nnx.merge(graph, state)
        return run_layers(stack, hidden, stack.batch(**padded))

    chex.clear_trace_counter()
    for tokens in (1, 3, 8, 2, 9, 30, 7, 17):
        ids, hidden = random_ids(tokens), random_hidden(tokens)
        padded = engram_jax.pad_batch(
            input_ids=ids,
            positions=np.arange(tokens),
            query_start_loc=[0, tokens],
            dead_mask=np.zeros(tokens, bool),
            token_buckets=(8, 32),
            request_buckets=(4,),
        )
        size = len(padded["input_ids"])
        filled = jnp.full((size, *hidden.shape[1:]), jnp.nan, hidden.dtype)
        out = step(state, filled.at[:tokens].set(hidden), padded)
        alone = one_shot(stack, hidden, ids, np.zeros(tokens, bool))
        chex.assert_trees_all_equal(out[:tokens], alone)
        assert bool(jnp.isnan(out[tokens:]).all())


def test_padding_needs_no_request():
    padded = engram_jax.pad_batch(
        input_ids=np.zeros(0, np.int32),
        positions=np.zeros(0, np.int32),
        query_start_loc=[0],
        lookback_token_ids=np.zeros((0, 3), np.int32),
    )
    chex.assert_shape(padded["lookback_token_ids"], (1, 3))
    stack = make_stack()
    chex.assert_trees_all_equal(
        stack.batch(**padded).hash_ids, stack.dummy_batch(1).hash_ids
    )


def test_padding_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="hidden"):
        engram_jax.pad_batch(
            input_ids=[1], positions=[0], query_start_loc=[0, 1], hidden=[0]
        )
    with pytest.raises(ValueError, match="buckets"):
        engram_jax.bucket_size(3, ())


def test_a_dummy_batch_leaves_the_streams_alone(stack):
    """Pitfall: a rank without tokens still takes part, with every id -1."""
    hidden = random_hidden(4)
    batch = stack.dummy_batch(4)
    assert isinstance(batch, EngramBatch)
    assert bool((batch.hash_ids == -1).all())
    chex.assert_trees_all_equal(nnx.jit(run_layers)(stack, hidden, batch), hidden)


def test_modules_split_and_merge(stack):
    batch = stack.batch(random_ids(5), np.arange(5), [0, 5])
    hidden = random_hidden(5)
    copy = nnx.merge(*nnx.split(stack))
    chex.assert_trees_all_equal(
        nnx.jit(run_layers)(copy, hidden, batch),
        nnx.jit(run_layers)(stack, hidden, batch),
    )
    assert set(copy.layers) == set(CONFIG.layer_ids)


def test_only_gate_weights_are_parameters(stack):
    params = nnx.state(stack, nnx.Param)
    assert len(jax.tree.leaves(params)) == 2 * len(CONFIG.layer_ids)


def test_layers_must_be_those_of_the_config(stack):
    with pytest.raises(ValueError, match=r"\[3\].*\[1, 3\]"):
        engram_jax.EngramStack(CONFIG, stack.hash_state, {3: stack.layers[3]})
    with pytest.raises(KeyError, match="layer 2 has no Engram"):
        stack(2, random_hidden(1), stack.dummy_batch(1))


def test_all_layers_rows_at_once_are_refused(stack):
    batch = stack.dummy_batch(4)
    with pytest.raises(ValueError, match="one layer's rows"):
        stack.layers[1](random_hidden(4), batch.hash_ids.reshape(4, -1))


def test_gate_values_are_those_of_the_layer(stack):
    """The output is hidden + gate * value, with the gates that `gate_values` shows."""
    hidden = random_hidden(6, dtype=jnp.float32)
    batch = stack.batch(random_ids(6), np.arange(6), [0, 6])
    layer, ids = stack.layers[1], stack.hash_ids(1, batch)
    gates = layer.gate_values(hidden, ids, batch.token_mask)
    chex.assert_shape(gates, (6, CONFIG.hc_mult))
    kv = layer.project(layer.rows(ids)).astype(jnp.float32)
    value = kv[:, CONFIG.hc_mult * CONFIG.hidden_size :]
    chex.assert_trees_all_close(
        layer(hidden, ids), hidden + gates[..., None] * value[:, None], rtol=1e-6
    )
    shut = layer.gate_values(hidden, ids, jnp.zeros(6, bool))
    assert float(jnp.abs(shut).max()) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (2, 4)}, "layer_ids is"),
        ({"max_ngram_size": 3}, "max_ngram_size is 3"),
        ({"pad_token_id": 3}, "pad_token_id is 3"),
        ({"vocab_base": 150}, "layer 1 has 900 rows; .* 990, .* zeros"),
    ],
)
def test_a_layout_of_another_model_is_refused(stack, changes, message):
    """Rows beyond a table's end would read as zeros, without an error."""
    config = dataclasses.replace(CONFIG, num_embeddings=(2000, 2000), **changes)
    with pytest.raises(ValueError, match=message):
        EngramStack(
            CONFIG,
            NgramHashState(EngramLayout.from_config(config), token_map()),
            stack.layers,
        )


def test_a_table_is_in_one_place():
    values = np.ones((4, 32), jnp.float8_e4m3fn)
    storage = PinnedHostTable(values, np.full((4, 1), 127, np.uint8))
    with pytest.raises(ValueError, match="neither"):
        ParallelEngramEmbedding(None)
    with pytest.raises(ValueError, match="both"):
        ParallelEngramEmbedding(jnp.ones((4, 32)), storage=storage)


def test_layers_of_another_model_are_refused(stack):
    config = dataclasses.replace(CONFIG, hidden_size=64)
    with pytest.raises(ValueError, match=r"layer 1 has .* \(6, 32, 2, 48\); .* 64\)"):
        EngramStack(config, stack.hash_state, stack.layers)


def test_nnx_jit_in_its_tree_mode_leaves_tables_where_they_are():
    """By default each call would copy them: 203 GB of V4.1's."""
    stack = make_stack()
    hidden, ids = random_hidden(3), random_ids(3)
    batch = stack.batch(ids, np.arange(3), [0, 3])
    table = stack.layers[1].embedding.weight
    before = table[...].unsafe_buffer_pointer()
    nnx.jit(run_layers, graph=False)(stack, hidden, batch)
    assert table[...].unsafe_buffer_pointer() == before

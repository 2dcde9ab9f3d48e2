"""A decode step of a whole stack as the GPU would run it: few kernels, no copies."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_stack
from flax import nnx
from kernels.aot import compile_for_hopper, operand, temporary_bytes, text_of

from engram_jax import kernels
from engram_jax.kernels import wkv_pallas

WIDE = {"head_dim": 64, "hidden_size": 64, "num_embeddings": (900, 1000)}


def decode_step(graph, state, hidden, window, window_dead, tokens, positions):
    """One token of each request through every layer."""
    stack = nnx.merge(graph, state)
    starts = jnp.arange(tokens.shape[0] + 1)
    batch = stack.batch(
        tokens,
        positions,
        starts,
        lookback_token_ids=window,
        lookback_dead_mask=window_dead,
    )
    window = stack.hash_state.advance_lookback(window, window_dead, tokens, starts)
    for layer_id in stack.config.layer_ids:
        hidden = stack(layer_id, hidden, batch)
    return hidden, *window


def abstract(tree):
    """The operands of a program that is compiled but not run."""
    return jax.tree.map(lambda x: operand(x.shape, x.dtype), tree)


def compile_step(stack, tokens: int):
    config = stack.config
    graph, state = nnx.split(stack)
    hidden = np.zeros((tokens, config.hc_mult, config.hidden_size), jnp.bfloat16)
    window, dead = stack.hash_state.init_lookback(tokens)
    ids = np.zeros(tokens, np.int32)
    operands = abstract((state, hidden, window, dead, ids, ids))
    return compile_for_hopper(
        lambda *operands: decode_step(graph, *operands), *operands
    )


def kernel_calls(compiled) -> list[str]:
    calls = re.findall(r'custom_call_target="(\w*mosaic_gpu\w*)"', text_of(compiled))
    assert calls, "no Mosaic kernel in the program"
    return calls


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_decode_step_hashes_and_reads_in_one_kernel(tokens):
    """One kernel for hash and rows of all layers, then two a layer."""
    stack = small_stack.make_stack(**WIDE)
    compiled = compile_step(stack, tokens)
    assert len(kernel_calls(compiled)) == 1 + 2 * len(stack.config.layer_ids)


def test_rows_too_narrow_for_that_kernel_take_the_others():
    stack = small_stack.make_stack(hidden_size=64)
    assert stack.config.head_dim == 32
    compiled = compile_step(stack, 16)
    assert len(kernel_calls(compiled)) == 1 + 3 * len(stack.config.layer_ids)


def test_many_tokens_multiply_the_expanded_projection():
    """The library's product reads the copy that is kept, and makes none."""
    stack = small_stack.make_stack(**WIDE)
    weight = stack.layers[1].wkv_weight
    bytes_of_a_copy = 2 * weight.size
    without = temporary_bytes(compile_step(stack, 512))
    stack.expand_projections()
    assert without - temporary_bytes(compile_step(stack, 512)) >= bytes_of_a_copy


def test_an_expanded_projection_changes_no_result():
    stack = small_stack.make_stack()
    hidden = small_stack.random_hidden(9)
    batch = stack.batch(small_stack.random_ids(9), np.arange(9), [0, 9])
    before = stack(1, hidden, batch)
    stack.expand_projections()
    assert stack.layers[1].wkv_expanded is not None
    np.testing.assert_array_equal(stack(1, hidden, batch), before)


def test_ordered_rows_project_like_rows_on_any_backend():
    layer = small_stack.make_stack(**WIDE).layers[1]
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(5, layer.wkv_weight.shape[1])), jnp.bfloat16)
    ordered = jnp.pad(wkv_pallas.permute_columns(rows), ((0, 3), (0, 0)))
    np.testing.assert_array_equal(
        layer.project(kernels.OrderedRows(ordered, 5)), layer.project(rows)
    )

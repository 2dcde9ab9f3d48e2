"""Windows that move with the batch: by the fused kernel, and by what stands in for it.

`NgramHashState.advance_lookback` is what all of them must equal.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_stack
from flax import nnx
from kernels import aot
from kernels.ragged_batches import PAD_ID, make_layout, random_batch
from kernels.simulated_threads import Memory, Word, simulate
from kernels.test_ngram_rows import abstract
from test_sharding_aot import steps_of

from engram_jax import NgramHashState
from engram_jax.kernels import decode_front_end_pallas, ngram_hash_pallas

HISTORIES = {
    "masks": (),
    "no masks": ("dead_mask", "lookback_dead_mask"),
    "of the batch": ("lookback_dead_mask",),
    "of the windows": ("dead_mask",),
}


def ragged(seed, tokens, requests, depth, history):
    """A random batch without a slot cache; some requests have no token."""
    batch = random_batch(seed, tokens, requests, depth, cache=False)
    for name in HISTORIES[history]:
        del batch[name]
    return batch


def advanced(batch, layout):
    """What `NgramHashState.advance_lookback` gives; jit takes ids of any value."""
    state = NgramHashState(layout, np.asarray(batch["token_map"]))
    names = "lookback_token_ids", "lookback_dead_mask", "input_ids", "query_start_loc"
    return jax.jit(state.advance_lookback)(
        *(batch.get(name) for name in names), dead_mask=batch.get("dead_mask")
    )


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    ("tokens", "requests", "depth"),
    [(1, 1, 4), (37, 3, 4), (50, 60, 3), (3, 150, 2), (5, 2, 7)],
)
def test_threads_move_windows(monkeypatch, tokens, requests, depth, history):
    """Each entry by one thread, of one layer; more threads than that do no harm."""
    layout = make_layout(1, depth, 2, smallest=40)
    batch = ragged(tokens, tokens, requests, depth, history)
    operands = ngram_hash_pallas.batch_operands(**batch)
    sizes = ngram_hash_pallas.batch_sizes(operands, layout, PAD_ID, None)
    shape = (requests, depth - 1)
    out: dict[str, Any] = {"advanced": np.full(shape, -777, np.int32)}
    if history != "no masks":
        out["advanced_dead"] = np.full(shape, 2, np.uint8)
    buffers = {name: np.asarray(array) for name, array in operands.items()}
    memory = Memory(buffers, out, threads=requests * (depth - 1) + 5)
    simulate(monkeypatch, memory, ngram_hash_pallas, decode_front_end_pallas)
    refs, moved = {name: name for name in memory.names}, []
    for layer in (0, 1):
        before = dict(memory.touched)
        decode_front_end_pallas._run_thread(
            refs,
            sizes,
            Word.of(layer),
            Word(np.arange(memory.threads)),
            lambda layer=layer: moved.append(layer),
        )
        assert (memory.touched == before) == (layer == 1)
    assert moved == [0, 1]
    ids, dead = advanced(batch, layout)
    np.testing.assert_array_equal(out["advanced"], ids)
    if "advanced_dead" in out:
        np.testing.assert_array_equal(out["advanced_dead"], dead)


def step(graph, state, hidden, tokens, positions, starts, *windows):
    """A decode step by windows, with a dead mask where one is given."""
    stack = nnx.merge(graph, state)
    names = "lookback_token_ids", "lookback_dead_mask"
    batch, moved = stack.batch(
        tokens,
        positions,
        starts,
        advance_lookback=True,
        **dict(zip(names, windows, strict=False)),
    )
    for layer_id in stack.config.layer_ids:
        hidden = stack(layer_id, hidden, batch)
    return hidden, *moved[: len(windows)]


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (16, 16), (1, 512)])
def test_a_decode_step_runs_its_kernels_and_nothing_else(tokens, requests, masks):
    # Wide enough that no operand of a kernel is padded.
    sizes = {"head_dim": 256, "hidden_size": 256, "num_embeddings": (900, 1000)}
    stack = small_stack.make_stack(**sizes)
    config, (graph, state) = stack.config, nnx.split(stack)
    hidden = np.zeros((tokens, config.hc_mult, config.hidden_size), jnp.bfloat16)
    ids, starts = np.zeros(tokens, np.int32), np.zeros(requests + 1, np.int32)
    windows = stack.hash_state.init_lookback(requests)[: 1 + masks]
    operands = abstract((state, hidden, ids, ids, starts, *windows))
    compiled = aot.compile_for_hopper(
        lambda *operands: step(graph, *operands), *operands
    )
    shapes = [(out.shape, out.dtype) for out in compiled.out_info[1:]]
    assert shapes == [(x.shape, x.dtype) for x in windows]
    kernels = 1 + 2 * len(config.layer_ids)
    assert steps_of(aot.text_of(compiled)) == ["custom-call"] * kernels


@pytest.mark.parametrize("history", HISTORIES)
def test_a_batch_of_any_backend_gives_the_windows(history):
    """Eager and inside jit; without tokens, or requests, they stay as they are."""
    stack = small_stack.make_stack()
    state = stack.hash_state
    rng = np.random.default_rng(3)
    for starts in ([0, 3, 3, 4, 9], [0, 0], [0]):
        tokens, requests = starts[-1] + 2 * (starts[-1] > 0), len(starts) - 1
        shape = requests, state.lookback
        masks = {
            "dead_mask": rng.random(tokens) < 0.3,
            "lookback_dead_mask": rng.random(shape) < 0.3,
        }
        masks = {n: x for n, x in masks.items() if n not in HISTORIES[history]}
        ids, windows = rng.integers(0, 120, tokens), rng.integers(-1, 120, shape)
        wanted = state.advance_lookback(
            windows,
            masks.get("lookback_dead_mask"),
            ids,
            starts,
            dead_mask=masks.get("dead_mask"),
        )
        arrays = {
            "input_ids": ids,
            "positions": np.arange(tokens) + 3,
            "query_start_loc": np.array(starts),
            "lookback_token_ids": windows,
            **masks,
        }
        for make in (
            stack.batch,
            jax.jit(stack.batch, static_argnames="advance_lookback"),
        ):
            found, moved = make(**arrays, advance_lookback=True)
            chex.assert_trees_all_equal(moved, wanted)
            chex.assert_trees_all_close(found, make(**arrays), rtol=0, atol=0)


def test_windows_that_are_not_there_do_not_move():
    stack = small_stack.make_stack()
    batch: dict[str, Any] = {
        "input_ids": [5, 6],
        "positions": [0, 1],
        "query_start_loc": [0, 2],
        "advance_lookback": True,
    }
    with pytest.raises(ValueError, match="lookback_token_ids is missing; hash_state"):
        stack.batch(**batch)
    windows = stack.hash_state.init_lookback(1)[0]
    cached = batch | {
        "slot_cache": stack.init_slot_cache(8),
        "slot_mapping": [0, 1],
        "block_table": [[0]],
        "block_size": 8,
    }
    with pytest.raises(ValueError, match="slot_cache is given, which remembers"):
        stack.batch(**cached, lookback_token_ids=windows)
    layout = make_layout(smallest=40)
    ragged_batch = ragged(1, 3, 2, layout.max_ngram_size, "masks")
    tables = [jnp.zeros((rows, 64), jnp.uint8) for rows in layout.num_rows]
    changes: dict[str, dict[str, Any]] = {
        "no window": {"lookback_token_ids": None, "lookback_dead_mask": None},
        "no token": {"num_tokens": 0},
    }
    for lacking, change in changes.items():
        with pytest.raises(NotImplementedError, match=lacking):
            decode_front_end_pallas.decode_front_end_pallas(
                tables,
                [table[:, :2] for table in tables],
                **ragged_batch | change,
                layout=layout,
                pad_id=PAD_ID,
                advance_lookback=True,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (16, 16), (61, 9), (2, 700)])
def test_kernel_moves_windows(tokens, requests, history):
    layout = make_layout(smallest=500)
    batch = ragged(tokens, tokens, requests, layout.max_ngram_size, history)
    tables = [jnp.zeros((rows, 256), jnp.uint8) for rows in layout.num_rows]
    *_, (ids, dead) = decode_front_end_pallas.decode_front_end_pallas(
        tables,
        [table[:, :8] for table in tables],
        **batch,
        layout=layout,
        pad_id=PAD_ID,
        advance_lookback=True,
    )
    wanted = advanced(batch, layout)
    np.testing.assert_array_equal(ids, wanted[0])
    assert (dead is None) == (history == "no masks")
    if dead is not None:
        np.testing.assert_array_equal(dead, wanted[1])

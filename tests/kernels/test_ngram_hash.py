"""The hash on every backend: golden ids, random ragged batches, transformations."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hash_cases import PAD_ID, TOKEN_MAP, oracle, reference_layout, small_state, tokens

from engram_jax import EngramConfig, EngramLayout, kernels


def operands(ids, positions=None, starts=None):
    """Puts one request, or a ragged batch, on the device."""
    positions = np.arange(len(ids)) if positions is None else positions
    starts = [0, len(ids)] if starts is None else starts
    return (
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(TOKEN_MAP, jnp.int32),
    )


def small(run):
    """Gives the hash of the small layout on the backend."""
    return functools.partial(
        run, kernels.ngram_hash, layout=small_state().layout, pad_id=PAD_ID
    )


@pytest.mark.parametrize("dead", [False, True])
def test_golden_ids_of_v41(run, golden, v41, v41_token_map, dead):
    """The published primes, multipliers and map, on a real text."""
    data = golden("hash_v41")
    ids = data["ids"].astype(np.int32)
    hashes = run(
        kernels.ngram_hash,
        *operands(ids)[:3],
        jnp.asarray(v41_token_map),
        layout=EngramLayout.from_config(EngramConfig.from_dict(v41["config"])),
        pad_id=v41["pad_compressed_id"],
        dead_mask=jnp.asarray(data["dead"]) if dead else None,
    )
    chex.assert_type(hashes, jnp.int32)
    expected = data["expected" if dead else "expected_no_dead"]
    np.testing.assert_array_equal(hashes, expected)


@pytest.mark.parametrize("length", [0, 1, 257])
def test_any_number_of_tokens(run, length):
    """T = 0, 1 and a prime beyond one block of threads."""
    ids = tokens(length)
    hashes = small(run)(*operands(ids))
    chex.assert_shape(hashes, (length, 2, 9))
    np.testing.assert_array_equal(hashes, oracle(ids))


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_batches(run, seed):
    """Windows, slots, masks, padding, ids outside of the vocabulary: all at once."""
    rng = np.random.default_rng(seed)
    requests, total = int(rng.integers(1, 9)), int(rng.integers(40, 200))
    starts = np.sort(np.r_[0, rng.integers(0, total, requests)])
    ids = np.where(
        rng.random(total) < 0.05,
        rng.choice([-1, 50, 2**31 - 1, -(2**31)], total),
        rng.integers(0, 50, total),
    )
    positions = rng.integers(-5, 300, total)
    for r in range(requests):
        length = starts[r + 1] - starts[r]
        positions[starts[r] : starts[r + 1]] = rng.integers(0, 90) + np.arange(length)
    window = (requests, 3)
    known = rng.random(window) < 0.6
    history = {
        "dead_mask": rng.random(total) < 0.1,
        "lookback_token_ids": np.where(known, rng.integers(0, 50, window), -1),
        "lookback_dead_mask": rng.random(window) < 0.1,
        "slot_cache": rng.integers(-2, 40, 64),
        "block_table": rng.integers(-1, 8, (requests, 10)),
    }
    hashes = small(run)(
        *operands(ids, positions, starts),
        **{
            name: jnp.asarray(part, None if part.dtype == bool else jnp.int32)
            for name, part in history.items()
        },
        block_size=8,
    )
    expected = reference.hash_batch(
        ids,
        positions,
        starts,
        layout=reference_layout(small_state().layout),
        token_map=TOKEN_MAP,
        pad_id=PAD_ID,
        **history,
        block_size=8,
    )
    np.testing.assert_array_equal(hashes, expected)


def test_transformations_equal_the_plain_call(run):
    """One trace under jit; vmap, scan and checkpoint give the same ids."""
    ids = tokens(60).reshape(4, 15)
    expected = np.stack([oracle(sequence) for sequence in ids])
    _, positions, starts, token_map = operands(ids[0])

    def call(ids):
        return small(run)(ids, positions, starts, token_map)

    call(jnp.asarray(ids[0]))
    once = jax.jit(chex.assert_max_traces(call, n=1))
    for sequence, wanted in zip(ids, expected, strict=True):
        np.testing.assert_array_equal(once(sequence), wanted)
    call = jax.checkpoint(call)
    np.testing.assert_array_equal(jax.vmap(call)(jnp.asarray(ids)), expected)
    _, scanned = jax.lax.scan(lambda n, ids: (n, call(ids)), 0, jnp.asarray(ids))
    np.testing.assert_array_equal(scanned, expected)


def test_x64_gives_equal_ids(run):
    """64 bits are used inside alone: ids come out as int32 in either mode."""
    ids = tokens(31)
    with jax.enable_x64(True):
        hashes = small(run)(*operands(ids))
    chex.assert_type(hashes, jnp.int32)
    np.testing.assert_array_equal(hashes, oracle(ids))


def test_an_unknown_backend_is_refused():
    """A typing error in its name does not fall back to another."""
    backend: Any = "triton"
    with pytest.raises((ValueError, TypeError), match="triton"):
        kernels.ngram_hash(
            *operands(tokens(3)),
            layout=small_state().layout,
            pad_id=PAD_ID,
            backend=backend,
        )

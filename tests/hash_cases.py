"""A small hash, its oracle, and streams of tokens: what the tests of the hash share."""

from __future__ import annotations

import functools

import jax
import numpy as np
import numpy_reference as reference

from engram_jax import EngramConfig, EngramLayout, NgramHashState

PAD_ID = 7
VOCAB_SIZE = 50
COMPRESSED_SIZE = 40
TOKEN_MAP = np.arange(VOCAB_SIZE) % COMPRESSED_SIZE


@functools.cache
def small_state() -> NgramHashState:
    """Hashes for 2 layers, n = 4 and 3 heads: 50 raw ids of 40 compressed ones."""
    config = EngramConfig(
        layer_ids=(1, 4),
        num_embeddings=(4000, 4000),
        max_ngram_size=4,
        vocab_base=211,
        n_heads=3,
        head_dim=32,
        pad_token_id=PAD_ID,
        hidden_size=64,
        hc_mult=2,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB_SIZE,
        compressed_vocab_size=COMPRESSED_SIZE,
    )
    return NgramHashState(EngramLayout.from_config(config), TOKEN_MAP)


class JittedState:
    """The small state with each method compiled whole, as a server runs it.

    Much faster to test with than operation by operation, which compiles every one of
    them for every shape.
    """

    def __init__(self):
        """Compiles on first use, for each shape once."""
        state = small_state()
        self.layout, self.token_map = state.layout, state.token_map
        self.hash = jax.jit(state.__call__, static_argnames="block_size")
        self.hash_sequence = jax.jit(state.hash_sequence)
        self.advance_lookback = jax.jit(state.advance_lookback)
        self.token_mask = jax.jit(state.token_mask)
        self.init_lookback = state.init_lookback
        self.init_slot_cache = state.init_slot_cache

    def __call__(self, *batch, **history):
        """Hashes a ragged batch."""
        return self.hash(*batch, **history)


def reference_layout(layout: EngramLayout) -> reference.Layout:
    """Gives the loops the same primes, offsets and multipliers."""
    return reference.Layout(layout.primes, layout.offsets, layout.multipliers)


def oracle(ids, dead=None) -> np.ndarray:
    """Hashes one whole sequence of the small vocabulary with the loops."""
    return reference.hash_sequence(
        np.asarray(ids),
        layout=reference_layout(small_state().layout),
        token_map=TOKEN_MAP,
        pad_id=PAD_ID,
        dead_mask=dead,
    )


def tokens(length: int, seed: int = 0) -> np.ndarray:
    """Makes raw ids of the small vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length, np.int32)


def decode(state: NgramHashState | JittedState, ids, lookback, position=0, **masks):
    """Hashes one request's chunk after its window; gives the hashes and the window."""
    starts = np.array([0, len(ids)], np.int32)
    positions = position + np.arange(len(ids), dtype=np.int32)
    hashes = state(
        ids,
        positions,
        starts,
        lookback_token_ids=lookback[0],
        lookback_dead_mask=lookback[1],
        **masks,
    )
    return hashes, state.advance_lookback(
        lookback[0], lookback[1], ids, starts, **masks
    )

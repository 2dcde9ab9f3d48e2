"""Hashes of random layouts, batches, cuts and histories against the loops.

Batches are padded to one shape each, so that a property compiles once per layout and
random padding is part of every example.
"""

from __future__ import annotations

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from hash_cases import reference_layout
from hypothesis import strategies as st

from engram_jax import EngramConfig, EngramLayout, NgramHashState

TOKENS, REQUESTS, SLOTS, BLOCKS, BLOCK_SIZE = 19, 4, 48, 6, 5
# n, heads, first prime above, layers, vocabulary, compressed vocabulary.
SIZES = {
    "smallest": (2, 1, 1, (0,), 5, 2),
    "tiny_primes": (3, 2, 2, (3, 1), 30, 11),
    "long_ngrams": (6, 2, 97, (2,), 60, 60),
    "published_primes": (4, 8, 16_000_000, (1, 14), 129_280, 99_092),
}


def make_state(sizes) -> NgramHashState:
    """Makes a hash whose map folds the vocabulary onto the compressed one."""
    n, heads, base, layer_ids, vocab_size, compressed = sizes
    config = EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=(2**31 - 1,) * len(layer_ids),
        max_ngram_size=n,
        vocab_base=base,
        n_heads=heads,
        head_dim=32,
        pad_token_id=vocab_size // 2,
        hidden_size=32,
        hc_mult=1,
        rms_norm_eps=1e-6,
        vocab_size=vocab_size,
    )
    token_map = np.arange(vocab_size) * 7 % compressed
    token_map[:compressed] = np.arange(compressed)
    return NgramHashState(EngramLayout.from_config(config, compressed), token_map)


@functools.cache
def named_state(name: str) -> NgramHashState:
    """Makes each of the sizes above once."""
    return make_state(SIZES[name])


def constants(state: NgramHashState) -> dict:
    """Gives the loops what the module holds."""
    return {
        "layout": reference_layout(state.layout),
        "token_map": np.asarray(state.token_map[...]),
        "pad_id": state.pad_id,
    }


@functools.cache
def jitted_call(name: str):
    """Compiles the hash of a padded batch with every optional part."""
    state = named_state(name)

    def call(ids, positions, starts, history, slots):
        return state(ids, positions, starts, **history, **slots, block_size=BLOCK_SIZE)

    return jax.jit(call)


@functools.cache
def jitted_plain_call(name: str):
    """Compiles the hash of a padded batch without history."""
    return jax.jit(named_state(name).__call__)


@functools.cache
def jitted_advance(name: str):
    """Compiles the step of the window."""
    return jax.jit(named_state(name).advance_lookback)


def token_ids(name: str) -> st.SearchStrategy[int]:
    """Draws ids of the vocabulary, few enough to repeat, and now and then others."""
    vocab_size = SIZES[name][4]
    inside = st.integers(0, min(vocab_size, 8) - 1) | st.integers(0, vocab_size - 1)
    # Hypothesis' bounds make the edges likely.
    outside = st.sampled_from([-1, -2, vocab_size, 2**31 - 1, -(2**31)])
    return st.one_of(inside, inside, inside, outside)


def array_of(draw, elements, *shape, dtype: type = np.int32) -> np.ndarray:
    """Draws an array of a fixed shape."""
    size = int(np.prod(shape))
    values = draw(st.lists(elements, min_size=size, max_size=size))
    return np.array(values, dtype).reshape(shape)


@st.composite
def ragged_batches(draw, name: str):
    """Draws a batch with all that may come with it."""
    window = SIZES[name][0] - 1
    ends = sorted(draw(st.lists(st.integers(0, TOKENS), min_size=4, max_size=4)))
    starts = np.array([0, *ends], np.int32)
    positions = array_of(draw, st.integers(-9, 99), TOKENS)
    for request in range(REQUESTS):
        first = draw(st.integers(0, BLOCKS * BLOCK_SIZE + 3))
        place = np.arange(starts[request + 1] - starts[request])
        positions[starts[request] : starts[request + 1]] = first + place
    booleans = functools.partial(array_of, draw, st.booleans(), dtype=bool)
    history = {
        "dead_mask": booleans(TOKENS) & booleans(TOKENS),
        "lookback_token_ids": array_of(
            draw, st.just(-1) | token_ids(name), REQUESTS, window
        ),
        "lookback_dead_mask": booleans(REQUESTS, window) & booleans(REQUESTS, window),
    }
    compressed = SIZES[name][5]
    slots = {
        "slot_cache": array_of(draw, st.integers(-2, compressed - 1), SLOTS),
        "block_table": array_of(draw, st.integers(-2, SLOTS // BLOCK_SIZE), 4, BLOCKS),
        # Each slot is written once at most, as engines do.
        "slot_mapping": np.where(
            booleans(TOKENS), draw(st.permutations(range(SLOTS)))[:TOKENS], -1
        ).astype(np.int32),
    }
    return array_of(draw, token_ids(name), TOKENS), positions, starts, history, slots


@pytest.mark.parametrize("name", SIZES)
@hypothesis.given(data=st.data())
def test_ragged_batches_with_windows_and_slots_match_the_loops(name, data):
    """Order of precedence, dead and unknown places, padding, writes before reads."""
    batch = data.draw(ragged_batches(name))
    ids, positions, starts, history, slots = batch
    state = named_state(name)
    rows, cache = jitted_call(name)(*batch)
    expected_cache = reference.write_slots(
        slots["slot_cache"],
        ids,
        starts,
        np.asarray(state.token_map[...]),
        slots["slot_mapping"],
        history["dead_mask"],
    )
    np.testing.assert_array_equal(cache, expected_cache)
    # The last block of a cache may be cut short; what it lacks is unknown.
    whole = np.full((SLOTS // BLOCK_SIZE + 1) * BLOCK_SIZE, -2, np.int32)
    whole[:SLOTS] = expected_cache
    expected = reference.hash_batch(
        ids,
        positions,
        starts,
        **constants(state),
        **history,
        slot_cache=whole,
        block_table=slots["block_table"],
        block_size=BLOCK_SIZE,
    )
    np.testing.assert_array_equal(rows, expected)
    # Padding is -1, every other row lies in its column's range.
    offsets = state.layout.offsets
    ends = offsets + state.layout.primes.reshape(offsets.shape)
    valid = np.arange(TOKENS) < starts[-1]
    assert ((expected[valid] >= offsets) & (expected[valid] < ends)).all()
    assert (expected[~valid] == -1).all()


@pytest.mark.parametrize("name", ["tiny_primes", "published_primes"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=10)
def test_parts_left_out_equal_parts_that_say_nothing(name, data):
    """No mask is an all-False one, no window an unknown one, no cache a fresh one."""
    ids, positions, starts, history, slots = data.draw(ragged_batches(name))
    state = named_state(name)
    neutral = {
        "dead_mask": np.zeros(TOKENS, bool),
        "lookback_token_ids": np.full_like(history["lookback_token_ids"], -1),
        "lookback_dead_mask": np.zeros_like(history["lookback_dead_mask"]),
    }
    fresh = {
        **slots,
        "slot_cache": np.asarray(state.init_slot_cache(SLOTS)),
        "slot_mapping": np.full(TOKENS, -1, np.int32),
    }
    expected, _ = jitted_call(name)(ids, positions, starts, neutral, fresh)
    got = jitted_plain_call(name)(ids, positions, starts)
    np.testing.assert_array_equal(got, expected)


def random_ids(rng: np.random.Generator, name: str, length: int) -> np.ndarray:
    """Makes ids that repeat often, a few of them outside of the vocabulary."""
    vocab_size = SIZES[name][4]
    ids = rng.integers(0, min(vocab_size, 6), length)
    ids = np.where(rng.random(length) < 0.3, rng.integers(0, vocab_size, length), ids)
    return np.where(rng.random(length) < 0.05, -1, ids).astype(np.int32)


@pytest.mark.parametrize("name", SIZES)
@hypothesis.given(seed=st.integers(0, 2**32), by_slots=st.booleans())
@hypothesis.settings(max_examples=10)
def test_requests_cut_anywhere_hash_like_whole_ones(name, seed, by_slots):
    """Requests advance by random chunks in shared batches; windows or slots carry on.

    Some tokens of a chunk are drafts that are rejected: other tokens come in their
    places with the next chunk.
    """
    rng = np.random.default_rng(seed)
    state, window = named_state(name), SIZES[name][0] - 1
    texts = [random_ids(rng, name, int(rng.integers(1, 21))) for _ in range(REQUESTS)]
    dead = [rng.random(len(text)) < 0.1 for text in texts]
    expected = [
        reference.hash_sequence(text, dead_mask=mask, **constants(state))
        for text, mask in zip(texts, dead, strict=True)
    ]
    # Every request owns blocks in a random order; 20 positions fit 4 blocks of 5.
    pages = rng.permutation(16).reshape(REQUESTS, 4)
    table = np.full((REQUESTS, BLOCKS), -1, np.int32)
    table[:, :4] = pages
    cache = jnp.full(16 * BLOCK_SIZE, -2, jnp.int32)
    lookback = unknown = state.init_lookback(REQUESTS)
    done = np.zeros(REQUESTS, int)
    while (left := [len(t) - at for t, at in zip(texts, done, strict=True)]) != [0] * 4:
        lengths = np.minimum(left, rng.integers(0, TOKENS // REQUESTS + 1, REQUESTS))
        accepted = rng.integers(np.minimum(lengths, 1), lengths + 1)
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        ids, positions, slots = (np.full(TOKENS, -7, np.int32) for _ in range(3))
        mask = np.zeros(TOKENS, bool)
        for r in range(REQUESTS):
            here = slice(starts[r], starts[r + 1])
            places = done[r] + np.arange(lengths[r])
            ids[here], mask[here], positions[here] = (
                texts[r][places],
                dead[r][places],
                places,
            )
            ids[starts[r] + accepted[r] : starts[r + 1]] = 0
            slots[here] = pages[r, places // BLOCK_SIZE] * BLOCK_SIZE
            slots[here] += places % BLOCK_SIZE
        known = unknown if by_slots else lookback
        rows, cache = jitted_call(name)(
            ids,
            positions,
            starts,
            {
                "dead_mask": mask,
                "lookback_token_ids": known[0],
                "lookback_dead_mask": known[1],
            },
            {
                "slot_cache": cache,
                "slot_mapping": slots if by_slots else np.full_like(slots, -1),
                "block_table": table,
            },
        )
        before_ids, before_dead = map(np.asarray, lookback)
        lookback = jitted_advance(name)(
            lookback[0],
            lookback[1],
            ids,
            starts,
            dead_mask=mask,
            num_accepted=accepted.astype(np.int32),
        )
        wanted = reference.advance_lookback(
            before_ids,
            before_dead,
            ids,
            starts,
            vocab_size=state.vocab_size,
            dead_mask=mask,
            num_accepted=accepted,
        )
        chex.assert_shape(lookback, (REQUESTS, window))
        chex.assert_trees_all_equal(tuple(map(np.asarray, lookback)), wanted)
        for r in range(REQUESTS):
            got = rows[starts[r] : starts[r] + accepted[r]]
            whole = expected[r][done[r] : done[r] + accepted[r]]
            np.testing.assert_array_equal(got, whole)
            done[r] += accepted[r]


@hypothesis.given(
    n=st.integers(2, 5),
    heads=st.integers(1, 3),
    base=st.integers(1, 2**13) | st.integers(2**20, 2**26),
    layer_ids=st.lists(st.integers(0, 60), min_size=1, max_size=3, unique=True),
    compressed=st.integers(1, 30) | st.integers(2**10, 2**17),
    data=st.data(),
)
@hypothesis.settings(max_examples=8)
def test_layouts_of_any_size_match_the_loops(
    n, heads, base, layer_ids, compressed, data
):
    """Primes, multipliers and hashes of a random configuration, each from scratch."""
    vocab_size = compressed + 3
    sizes = (n, heads, base, tuple(layer_ids), vocab_size, compressed)
    state = make_state(sizes)
    wide = reference.make_layout(list(layer_ids), n, heads, base, compressed)
    np.testing.assert_array_equal(state.layout.primes, wide.primes)
    np.testing.assert_array_equal(state.layout.offsets, wide.offsets)
    np.testing.assert_array_equal(state.layout.multipliers, wide.multipliers)
    ids = array_of(data.draw, st.integers(0, vocab_size - 1), 12)
    dead = np.isin(np.arange(12), list(data.draw(st.sets(st.integers(0, 11)))))
    expected = reference.hash_sequence(ids, dead_mask=dead, **constants(state))
    rows = state.hash_sequence(jnp.asarray(ids), jnp.asarray(dead))
    np.testing.assert_array_equal(rows, expected)

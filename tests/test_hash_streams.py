"""Hashes of chunks and streams: windows, slots, speculation, documents in one row.

Each fault that users of other implementations met has its test, named in words.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hash_cases import JittedState, decode, oracle, tokens

from engram_jax import NgramHashState


@pytest.fixture(scope="module")
def state() -> JittedState:
    """Small, with prime buckets, and compiled."""
    return JittedState()


# --- Chunks and streams ---------------------------------------------------------------


def test_every_cut_and_every_chunk_length_agree_with_the_whole(state):
    """Pitfall: a chunk cut inside a request loses what came before it."""
    ids = tokens(13)
    dead = np.zeros(13, bool)
    dead[4] = True
    whole = oracle(ids, dead)

    # One compiled function serves every chunk: it is padded to 13 tokens.
    @jax.jit
    @chex.assert_max_traces(n=1)
    def chunk(ids, dead, length, position, lookback):
        starts = jnp.array([0, length])
        hashes = state(
            ids,
            position + jnp.arange(13),
            starts,
            dead_mask=dead,
            lookback_token_ids=lookback[0],
            lookback_dead_mask=lookback[1],
        )
        return hashes, state.advance_lookback(*lookback, ids, starts, dead_mask=dead)

    cuts = [[at, 13 - at] for at in range(14)]
    lengths = [[size] * (13 // size) + [13 % size] for size in range(1, 14)]
    for sizes in cuts + lengths:
        lookback, done = state.init_lookback(1), 0
        for size in sizes:
            padded = np.full(13, 999, np.int32)
            padded[:size] = ids[done : done + size]
            mask = np.resize(dead[done : done + size], 13) if size else dead
            rows, lookback = chunk(padded, mask, size, done, lookback)
            np.testing.assert_array_equal(rows[:size], whole[done : done + size])
            assert (rows[size:] == -1).all()
            done += size


def test_ragged_lengths_in_one_batch_equal_separate_calls(state):
    """Pitfall: lengths [6, 1, 4] in one flat batch mix the requests."""
    requests = [tokens(20, seed) for seed in range(3)]
    done, lengths = [3, 10, 0], [6, 1, 4]
    lookback = np.full((3, 3), -1, np.int32)
    for r, (ids, start) in enumerate(zip(requests, done, strict=True)):
        before = ids[:start][::-1][:3]
        lookback[r, : len(before)] = before
    parts = [ids[s : s + n] for ids, s, n in zip(requests, done, lengths, strict=True)]
    rows = state(
        np.concatenate(parts),
        np.concatenate([s + np.arange(n) for s, n in zip(done, lengths, strict=True)]),
        np.array([0, 6, 7, 11]),
        lookback_token_ids=lookback,
    )
    expected = [
        oracle(ids)[s : s + n]
        for ids, s, n in zip(requests, done, lengths, strict=True)
    ]
    np.testing.assert_array_equal(rows, np.concatenate(expected))


def test_placeholders_of_tokens_not_sampled_yet_are_never_row_data(state):
    """Pitfall: whatever an async engine left in the buffer reaches the hash."""
    ids, dead = tokens(8), np.zeros(8, bool)
    dead[5:] = True
    expected = oracle(ids, dead)
    for placeholder in (-1, 49, 10**9, -(2**31)):
        filled = ids.copy()
        filled[5:] = placeholder
        rows = state.hash_sequence(filled, dead)
        np.testing.assert_array_equal(rows, expected)
    filled = ids.copy()
    filled[5:] = -1
    np.testing.assert_array_equal(state.hash_sequence(filled), expected)


def test_a_placeholder_stays_dead_in_the_window(state):
    """An id of -1 inside a chunk is dead, and must not turn into "unknown" later."""
    ids = tokens(8)
    ids[5] = -1
    first, lookback = decode(state, ids[:6], state.init_lookback(1))
    second, _ = decode(state, ids[6:], lookback, position=6)
    np.testing.assert_array_equal(np.concatenate([first, second]), oracle(ids))


def test_an_unknown_place_reads_as_pad_and_does_not_end_the_window(state):
    """Only the request's start and dead tokens end it."""
    ids = np.array([11], np.int32)
    arguments = (ids, np.array([9]), np.array([0, 1]))
    lookback = np.array([[-1, 12, 13]], np.int32)
    as_pad = state(*arguments, lookback_token_ids=np.array([[7, 12, 13]]))
    unknown = state(*arguments, lookback_token_ids=lookback)
    np.testing.assert_array_equal(unknown, as_pad)
    dead = state(
        *arguments,
        lookback_token_ids=lookback,
        lookback_dead_mask=np.array([[True, False, False]]),
    )
    ended = state(*arguments, lookback_token_ids=np.array([[7, 7, 7]]))
    np.testing.assert_array_equal(dead, ended)
    assert (dead != unknown).any()
    at_start = state(ids, np.array([0]), np.array([0, 1]), lookback_token_ids=lookback)
    np.testing.assert_array_equal(at_start, ended)


def test_history_moves_between_machines(state):
    """Pitfall: prefill here and decode there starts from an empty history."""
    ids = tokens(12)
    first, lookback = decode(state, ids[:7], state.init_lookback(1))
    carried = [np.asarray(part).tobytes() for part in lookback]
    arrived = (
        np.frombuffer(carried[0], np.int32).reshape(1, 3),
        np.frombuffer(carried[1], bool).reshape(1, 3),
    )
    elsewhere = NgramHashState(state.layout, np.asarray(state.token_map[...]))
    second, _ = decode(elsewhere, ids[7:], arrived, position=7)
    np.testing.assert_array_equal(np.concatenate([first, second]), oracle(ids))


def test_a_moved_slot_cache_goes_on(state):
    """The same with the slots that hold the history, under other block numbers."""
    ids = tokens(12)
    here = np.array([[3, 0, 2]])
    there = np.array([[1, 4, 0]])

    def chunk(cache, table, start, end):
        positions = np.arange(start, end)
        return state(
            ids[start:end],
            positions,
            np.array([0, end - start]),
            slot_cache=cache,
            slot_mapping=table[0, positions // 4] * 4 + positions % 4,
            block_table=table,
            block_size=4,
        )

    first, cache = chunk(state.init_slot_cache(16), here, 0, 7)
    blocks = np.asarray(cache).reshape(-1, 4)
    moved = np.full((5, 4), -2, np.int32)
    moved[there[0]] = blocks[here[0]]
    second, _ = chunk(jnp.asarray(moved.reshape(-1)), there, 7, 12)
    np.testing.assert_array_equal(np.concatenate([first, second]), oracle(ids))


@pytest.mark.parametrize("accepted", range(5))
def test_speculative_decoding_keeps_the_accepted_tokens_only(state, accepted):
    """Pitfall: verification freezes history, or leaves rejected drafts in it."""
    ids, drafts = tokens(12), tokens(4, seed=9)
    drafts[:accepted] = ids[5 : 5 + accepted]
    _, lookback = decode(state, ids[:5], state.init_lookback(1))
    verify, _ = decode(state, drafts, lookback, position=5)
    np.testing.assert_array_equal(verify[:accepted], oracle(ids)[5 : 5 + accepted])
    starts = np.array([0, 4])
    lookback = state.advance_lookback(
        *lookback, drafts, starts, num_accepted=np.array([accepted])
    )
    rest, _ = decode(state, ids[5 + accepted :], lookback, position=5 + accepted)
    np.testing.assert_array_equal(rest, oracle(ids)[5 + accepted :])


@pytest.mark.parametrize("accepted", range(5))
def test_slots_of_rejected_drafts_are_written_over(state, accepted):
    """Slots are fixed per position, so a roll-back needs nothing more."""
    ids, drafts = tokens(12), tokens(4, seed=9)
    table = np.array([[2, 0, 1]])
    cache = state.init_slot_cache(12)

    def chunk(cache, ids, start):
        positions = start + np.arange(len(ids))
        return state(
            ids,
            positions,
            np.array([0, len(ids)]),
            slot_cache=cache,
            slot_mapping=table[0, positions // 4] * 4 + positions % 4,
            block_table=table,
            block_size=4,
        )

    _, cache = chunk(cache, ids[:5], 0)
    drafts[:accepted] = ids[5 : 5 + accepted]
    _, cache = chunk(cache, drafts, 5)
    rest, _ = chunk(cache, ids[5 + accepted :], 5 + accepted)
    np.testing.assert_array_equal(rest, oracle(ids)[5 + accepted :])


def test_two_streams_never_share_state(state):
    """Pitfall: history kept on a shared module mixes the streams that use it."""
    streams = [tokens(9, 1), tokens(9, 2)]
    lookbacks = [state.init_lookback(1) for _ in streams]
    rows: list[list] = [[], []]
    for position in range(9):
        for i in (position % 2, 1 - position % 2):
            part, lookbacks[i] = decode(
                state, streams[i][position : position + 1], lookbacks[i], position
            )
            rows[i].append(part)
    for ids, parts in zip(streams, rows, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), oracle(ids))


def test_a_short_sequence_in_a_padded_batch_stays_alive(state):
    """Pitfall: liveness taken from the padded shape kills every real token."""
    ids = tokens(3)
    padded = np.r_[ids, np.full(29, -5)].astype(np.int32)
    rows = state(padded, np.arange(32), np.array([0, 3]))
    np.testing.assert_array_equal(rows[:3], oracle(ids))
    assert (rows[3:] == -1).all()
    mask = state.token_mask(padded, np.array([0, 3]))
    np.testing.assert_array_equal(mask, np.arange(32) < 3)


def test_tokens_after_a_dead_one_see_pad(state):
    """Pitfall: image spans take part in the n-grams of the text after them."""
    ids, dead = tokens(10), np.zeros(10, bool)
    dead[3:5] = True
    rows = np.asarray(state.hash_sequence(ids, dead))
    np.testing.assert_array_equal(rows, oracle(ids, dead))
    np.testing.assert_array_equal(rows[5:], oracle(ids[5:]))
    np.testing.assert_array_equal(rows[3], rows[4])
    changed = ids.copy()
    changed[:5] = (ids[:5] + 1) % 40
    np.testing.assert_array_equal(state.hash_sequence(changed, dead)[3:], rows[3:])


def test_documents_packed_in_one_row_are_cut(state):
    """Pitfall: documents packed for training bleed into each other."""
    documents = [tokens(5, 1), tokens(1, 2), tokens(7, 3)]
    segments = np.repeat([4, 9, 4], [5, 1, 7])
    rows = state.hash_sequence(np.concatenate(documents), segment_ids=segments)
    expected = np.concatenate([oracle(ids) for ids in documents])
    np.testing.assert_array_equal(rows, expected)
    batch = state.hash_sequence(
        np.stack([np.concatenate(documents), tokens(13, 4)]),
        segment_ids=np.stack([segments, np.zeros(13, np.int32)]),
    )
    np.testing.assert_array_equal(batch, [expected, oracle(tokens(13, 4))])


# --- The slot cache -------------------------------------------------------------------


def test_a_fresh_slot_cache_reads_as_unknown(state):
    """All slots are -2: nothing was written."""
    cache = state.init_slot_cache(8)
    np.testing.assert_array_equal(cache, np.full(8, -2))
    chex.assert_type(cache, jnp.int32)
    ids, positions, starts = np.array([11]), np.array([5]), np.array([0, 1])
    rows, cache = state(
        ids,
        positions,
        starts,
        slot_cache=cache,
        slot_mapping=np.array([5]),
        block_table=np.array([[0, 1]]),
        block_size=4,
    )
    np.testing.assert_array_equal(rows, state(ids, positions, starts))
    np.testing.assert_array_equal(cache, [-2] * 5 + [11, -2, -2])


def test_what_is_written_is_compressed_dead_or_nothing(state):
    """Padding writes no slot, a mapping of -1 neither, a dead token writes -1."""
    ids = np.array([45, 12, 13, -1, 14, 15], np.int32)
    dead = np.array([False, True, False, False, False, False])
    _, cache = state(
        ids,
        np.arange(6),
        np.array([0, 5]),
        dead_mask=dead,
        slot_cache=state.init_slot_cache(8),
        slot_mapping=np.array([0, 1, -1, 3, 4, 5]),
        block_table=np.array([[0]]),
        block_size=8,
    )
    np.testing.assert_array_equal(cache, [5, -1, -2, -1, 14, -2, -2, -2])


def test_lookback_wins_over_the_slots_where_it_knows(state):
    """Order: the batch itself, the window (its dead mask first), then the slots."""
    cache = jnp.array([21, 22, 23, 24, -2, -2], jnp.int32)
    arguments = (np.array([11]), np.array([4]), np.array([0, 1]))
    slots = {
        "slot_mapping": np.array([4]),
        "block_table": np.array([[0]]),
        "block_size": 6,
    }

    def window(ids):
        return state(*arguments, lookback_token_ids=np.array([ids]))

    for ids, dead, expected in (
        ([-1, -1, -1], [0, 0, 0], window([24, 23, 22])),
        ([12, -1, -1], [0, 0, 0], window([12, 23, 22])),
        ([-1, 12, -1], [0, 0, 0], window([24, 12, 22])),
        ([-1, -1, -1], [0, 1, 0], window([24, 7, 7])),
        ([12, 13, 14], [0, 0, 1], window([12, 13, 7])),
    ):
        rows, _ = state(
            *arguments,
            lookback_token_ids=np.array([ids]),
            lookback_dead_mask=np.array([dead], bool),
            slot_cache=cache,
            **slots,
        )
        np.testing.assert_array_equal(rows, expected)


def test_a_dead_token_in_the_slots_ends_the_window(state):
    """-1 ends it, -2 and places beyond the table read as pad."""
    arguments = (np.array([11]), np.array([4]), np.array([0, 1]))

    def rows(cache, table, block_size):
        return state(
            *arguments,
            slot_cache=jnp.array(cache, jnp.int32),
            slot_mapping=np.array([-1]),
            block_table=np.array(table).reshape(1, -1),
            block_size=block_size,
        )[0]

    def window(ids):
        return state(*arguments, lookback_token_ids=np.array([ids]))

    ended, holed = rows([0, 22, 23, -1], [0], 8), rows([0, 22, -2, 24], [0], 8)
    np.testing.assert_array_equal(ended, window([7, 7, 7]))
    np.testing.assert_array_equal(holed, window([24, 7, 22]))
    # Blocks of two: positions 2 and 3 are in block 1, position 1 in block 0.
    np.testing.assert_array_equal(rows([0, 22, 23, 24], [0, -1], 2), window([7, 7, 22]))
    np.testing.assert_array_equal(rows([0, 22, 23, 24], [0], 2), window([7, 7, 22]))
    np.testing.assert_array_equal(
        rows([23, 24, 0, 22], [1, 0], 2), window([24, 23, 22])
    )
    # A block that the cache does not have, near the end of int32.
    np.testing.assert_array_equal(
        rows([23, 24, 0, 22], [1, 2**30], 2), window([7, 7, 22])
    )


def test_a_prefix_hit_reads_what_another_request_wrote(state):
    """Two requests share their first block; the second starts behind it."""
    prefix, ends = tokens(4), [tokens(4, 1), tokens(4, 2)]
    cache, starts = state.init_slot_cache(16), np.array([0, 8])
    _, cache = state(
        np.r_[prefix, ends[0]],
        np.arange(8),
        starts,
        slot_cache=cache,
        slot_mapping=np.arange(8),
        block_table=np.array([[0, 1]]),
        block_size=4,
    )
    rows, _ = state(
        ends[1],
        4 + np.arange(4),
        np.array([0, 4]),
        slot_cache=cache,
        slot_mapping=8 + np.arange(4),
        block_table=np.array([[0, 2]]),
        block_size=4,
    )
    np.testing.assert_array_equal(rows, oracle(np.r_[prefix, ends[1]])[4:])

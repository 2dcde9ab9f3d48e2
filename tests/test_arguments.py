"""What callers pass for a batch: taken in every form, refused where it cannot be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engram_jax import EngramLayout, NgramHashState
from engram_jax.arguments import check_slots
from engram_jax.kernels import narrow_ids

LAYOUT = EngramLayout(
    layer_ids=(0,),
    primes=np.array([[[101], [103]]]),
    offsets=np.array([[0, 101]]),
    multipliers=np.array([[3, 5, 7]]),
    num_rows=(204,),
    pad_token_id=99,
    compressed_vocab_size=100,
    max_ngram_size=3,
    n_heads=1,
)


@pytest.fixture(scope="module")
def state():
    return NgramHashState(LAYOUT, np.arange(100))


def slots(state, number=32, mapping=(0,)):
    return {
        "slot_cache": state.init_slot_cache(number),
        "slot_mapping": np.array(mapping),
        "block_table": [[0]],
        "block_size": 16,
    }


def test_an_empty_list_is_a_mask_of_no_tokens(state):
    chex.assert_shape(state([], [], [0], dead_mask=[]), (0, 1, 2))


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([0, 5, 6], [0, 3]),
        ([3, 3, 4], [0, 3]),
        ([0, 1, 3], [0, 0, 3]),
        ([0, 1, 3], [0, 1, 1, 3]),
    ],
)
def test_positions_that_no_request_can_have_are_refused(state, positions, starts):
    """A batch cut wrongly would give wrong rows and no error."""
    with pytest.raises(ValueError, match=r"positions\[\d\] is \d after \d"):
        state([7, 9, 11], positions, starts)


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([4, 5, 6], [0, 3]),
        ([0, 1, 0], [0, 3]),
        ([4, 9, 0], [0, 1, 2, 3]),
        ([4, 5, 2], [0, 0, 2, 2, 3, 3]),
        ([4, 77, 2], [0, 1]),
        ([4, 77, 2], [0]),
    ],
)
def test_positions_that_requests_have_are_taken(state, positions, starts):
    chex.assert_shape(state([7, 9, 11], positions, starts), (3, 1, 2))


@pytest.mark.parametrize("make", [np.zeros, lambda n: jnp.zeros(n, jnp.float32)])
def test_a_slot_cache_is_what_init_slot_cache_makes(make):
    """A float one would take writes, and lose ids above 2^24."""
    with pytest.raises(TypeError, match=r"slot_cache is a .* of float"):
        check_slots(make(32), np.array([0]), np.array([0, 1]))


@pytest.mark.parametrize("slot", [32, 2**32])
def test_a_slot_beyond_the_cache_is_refused(state, slot):
    """Its token would be forgotten, and later rows be wrong."""
    with pytest.raises(ValueError, match=rf"slot_mapping holds {slot}.* 32 slots"):
        state([7], [0], [0, 1], **slots(state, mapping=[slot]))
    # Padding writes nothing, whatever it holds.
    state([7, 7], [0, 0], [0, 1], **slots(state, mapping=[31, slot]))


@pytest.mark.parametrize("method", ["token_mask", "advance_lookback"])
@pytest.mark.parametrize(
    ("ids", "starts", "message"),
    [
        ([[7, 9]], [0, 2], "input_ids has shape"),
        ([7, 9], [], "query_start_loc is empty"),
        ([7, 9], [[0, 2]], "query_start_loc has shape"),
    ],
)
def test_every_method_checks_the_shapes_of_a_batch(state, method, ids, starts, message):
    windows = state.init_lookback(1) if method == "advance_lookback" else ()
    with pytest.raises(ValueError, match=message):
        getattr(state, method)(*windows, ids, starts)


@pytest.mark.parametrize(
    ("ids", "starts", "message"),
    [
        ([7, 500], [0, 2], r"input_ids\[1\] is 500"),
        ([7, 2**32 + 5], [0, 2], r"input_ids\[1\] is 4294967301"),
        ([7, 9], [1, 9], "query_start_loc is"),
    ],
)
def test_a_window_takes_no_values_that_a_batch_cannot_have(state, ids, starts, message):
    with pytest.raises(ValueError, match=message):
        state.advance_lookback(*state.init_lookback(1), ids, starts)


def test_a_map_of_floats_or_negative_ids_is_refused():
    with pytest.raises(ValueError, match=r"token_map has .*from -1 up"):
        NgramHashState(LAYOUT, np.arange(100) - 1)
    with pytest.raises(ValueError, match=r"token_map has shape \(0,\)"):
        NgramHashState(LAYOUT, np.zeros(0, int))
    with pytest.raises((ValueError, TypeError), match="token_map"):
        NgramHashState(LAYOUT, np.arange(100) + 0.5)


def test_wide_segment_ids_keep_documents_apart(state):
    """Pitfall: documents packed in one row bleed into each other."""
    ids, documents = [7, 9, 7, 9], [2**40, 2**40, 2**41, 2**41]
    chex.assert_trees_all_equal(
        state.hash_sequence(ids, segment_ids=np.array(documents)),
        state.hash_sequence(ids, segment_ids=[0, 0, 1, 1]),
    )


def test_a_wide_id_in_a_window_is_dead_not_unknown(state):
    """Unknown would let the slot cache, or older places, speak for it."""
    with jax.enable_x64(True):
        wide = jnp.array([[2**32 + 9, 3]])
        chex.assert_trees_all_equal(
            jax.jit(lambda ids: state([7], [2], [0, 1], lookback_token_ids=ids))(wide),
            state(
                [7],
                [2],
                [0, 1],
                lookback_token_ids=[[-1, 3]],
                lookback_dead_mask=[[True, False]],
            ),
        )


def test_narrowing_keeps_unsigned_ids_apart():
    ids = np.array([3, 2**32 - 1], np.uint32)
    assert narrow_ids(ids).tolist() == [3, -1]
    assert narrow_ids(jnp.asarray(ids), outside=-2).tolist() == [3, -2]

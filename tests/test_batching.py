"""Padding: what fits is padded, what does not is refused and never guessed."""

import chex
import jax
import numpy as np
import pytest
from small_stack import make_stack

from engram_jax import pad_batch

BATCH = {"input_ids": [5, 6, 7], "positions": [0, 1, 0], "query_start_loc": [0, 2, 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [0]}, r"positions has shape \(1,\).* 3 tokens"),
        ({"positions": [0, 1, 0, 0]}, r"positions has shape \(4,\).* 3 tokens"),
        ({"dead_mask": [True]}, r"dead_mask has shape \(1,\).* 3 tokens"),
        ({"block_table": [[1]]}, r"block_table has shape \(1, 1\).* 2 requests"),
        ({"lookback_token_ids": [[1]] * 3}, r"lookback_token_ids .* 2 requests"),
        ({"query_start_loc": []}, "query_start_loc"),
        ({"query_start_loc": [0, 4]}, "query_start_loc is"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes, message):
    """Padding them would give wrong rows and no error."""
    with pytest.raises(ValueError, match=message):
        pad_batch(**BATCH | changes)


@pytest.mark.parametrize("name", ["input_ids", "positions", "slot_mapping"])
def test_wide_integers_are_refused(name):
    """Inside jit, without x64, 2**32 + 7 would read as token 7."""
    with pytest.raises(ValueError, match=f"{name} holds 4294967303"):
        pad_batch(**BATCH | {name: [5, 6, 2**32 + 7]})


def test_dtypes_are_those_that_the_hash_takes():
    padded = pad_batch(
        input_ids=np.array([5], np.uint32),
        positions=np.array([0], np.int64),
        query_start_loc=[0, 1],
        dead_mask=[False],
        token_buckets=(2,),
    )
    assert padded.pop("dead_mask").dtype == bool
    assert {array.dtype for array in padded.values()} == {np.dtype(np.int32)}
    assert padded["input_ids"].tolist() == [5, -1]
    for name, values in (("input_ids", [5.0, 6, 7]), ("dead_mask", [0, 1, 0])):
        with pytest.raises(TypeError, match=f"{name} has dtype"):
            pad_batch(**BATCH | {name: values})


def test_empty_lists_are_a_batch_of_no_tokens():
    padded = pad_batch(input_ids=[], positions=[], query_start_loc=[0], dead_mask=[])
    stack = make_stack()
    batch = jax.jit(lambda padded: stack.batch(**padded))(padded)
    chex.assert_trees_all_equal(batch, stack.dummy_batch(1))

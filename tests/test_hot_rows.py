"""The hot-row cache and its index against plain bookkeeping."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_jax import HotRowCache
from engram_jax.hot_rows import FetchCounters, LayerFetch, RowBudget
from engram_jax.row_index import HotRowIndex

PACKED = 8


def table_of(rows: int) -> np.ndarray:
    """Makes rows whose bytes tell their number."""
    number = np.arange(rows, dtype="<u8")[:, None] * 2654435761 + 12345
    return number.view(np.uint8).reshape(rows, PACKED)


def reader(table: np.ndarray):
    def read_into(ids, out):
        out[...] = np.where((ids >= 0)[:, None], table[np.maximum(ids, 0)], 0)

    return read_into


def put_together(fetch: LayerFetch, staged: np.ndarray):
    """Does in NumPy what `StagedRows.packed` does on the device."""
    assert fetch.index is not None
    rows = fetch.cache_rows()
    known = np.zeros((1, PACKED), np.uint8) if rows is None else np.asarray(rows)
    return np.where(
        (fetch.index >= 0)[..., None],
        staged[np.maximum(fetch.index, 0)],
        known[np.maximum(-1 - fetch.index, 0)],
    )


# --- The index ------------------------------------------------------------------------


@given(
    slots=st.integers(1, 70),
    batches=st.lists(st.lists(st.integers(-1, 60), max_size=40), max_size=12),
)
def test_index_never_mistakes_a_row(slots, batches):
    index = HotRowIndex(slots)
    assert 0 < index.slots <= slots
    held: dict[int, int] = {}
    for batch in batches:
        ids, counts = np.unique(np.array(batch, np.int32), return_counts=True)
        where = index.lookup(ids)
        assert {int(i): int(s) for i, s in zip(ids, where, strict=True) if s >= 0} == {
            row: slot for row, slot in held.items() if row in set(ids.tolist())
        }
        chosen, given_slots = index.update(ids, counts, where)
        assert len(set(given_slots.tolist())) == len(given_slots)
        for row, slot in zip(ids[chosen].tolist(), given_slots.tolist(), strict=True):
            assert row >= 0
            assert 0 <= slot < index.slots
            held = {r: s for r, s in held.items() if s != slot} | {row: slot}


def test_frequent_rows_drive_rare_ones_out_and_not_the_other_way():
    index = HotRowIndex(4, min_count=2)
    frequent = np.arange(4, dtype=np.int32)
    placed, _ = index.fill(frequent, np.full(4, 10))
    assert len(placed) == 4
    others = np.arange(100, 104, dtype=np.int32)
    for _ in range(5):  # seen ten times in all, as often as those that are there
        chosen, _ = index.update(others, np.full(4, 2), index.lookup(others))
        assert not len(chosen)
    chosen, _ = index.update(others, np.full(4, 2), index.lookup(others))
    assert len(chosen) == 1  # one in a set and batch
    assert (index.lookup(frequent) >= 0).sum() == 3


def test_a_row_seen_once_is_not_admitted():
    index = HotRowIndex(64)
    ids = np.arange(50, dtype=np.int32)
    once = np.ones(50, np.int64)
    assert not len(index.update(ids, once, index.lookup(ids))[0])
    assert len(index.update(ids, once, index.lookup(ids))[0])


def test_most_admitted_bounds_the_copies_of_a_batch():
    index = HotRowIndex(1 << 12, most_admitted=7)
    ids = np.arange(500, dtype=np.int32)
    chosen, _ = index.update(ids, np.full(500, 3), index.lookup(ids))
    assert len(chosen) == 7


def test_old_frequencies_fade():
    index = HotRowIndex(1)
    index.fill(np.array([5]), np.array([1000]))
    for _ in range(12):
        index._age(1 << 21)
    other = np.array([6], np.int32)
    assert len(index.update(other, np.array([3]), index.lookup(other))[0]) == 1


def test_filling_prefers_the_first_and_keeps_what_is_there():
    index = HotRowIndex(16)
    ids = np.arange(40)
    placed, slots = index.fill(ids)
    np.testing.assert_array_equal(placed, np.arange(16))
    again, _ = index.fill(np.arange(50, 60))
    assert not len(again)
    np.testing.assert_array_equal(index.lookup(ids[:16].astype(np.int32)), slots)


@pytest.mark.parametrize("name", ["slots", "min_count", "most_admitted"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        HotRowIndex(**({"slots": 4} | {name: 0}))


# --- Fetches --------------------------------------------------------------------------


def test_each_distinct_row_is_read_once():
    ids = np.array([[5, 3, 5], [-1, 3, -1]], np.int32)
    fetch = LayerFetch.of_distinct(ids, PACKED, None, RowBudget())
    assert sorted(fetch.ids[fetch.ids >= 0].tolist()) == [3, 5]
    assert (fetch.rows, fetch.hits, fetch.rows_from_host) == (4, 0, 2)
    table = table_of(9)
    staged = np.empty((fetch.ids.size, PACKED), np.uint8)
    reader(table)(fetch.ids, staged)
    wanted = np.where((ids >= 0)[..., None], table[np.maximum(ids, 0)], 0)
    np.testing.assert_array_equal(put_together(fetch, staged), wanted)
    counters = FetchCounters()
    counters.add(fetch)
    assert (counters.rows, counters.duplicates, counters.hit_rate) == (4, 2, 0)
    assert counters.bytes_from_host == 2 * PACKED
    assert counters.host_share == 0.5


@given(
    batches=st.lists(
        st.lists(st.integers(-3, 40), min_size=4, max_size=4), min_size=1, max_size=20
    ),
    ahead=st.integers(0, 3),
    data=st.data(),
)
def test_rows_are_exact_while_the_cache_changes(batches, ahead, data):
    """Batches are fetched ahead of the one that is taken, and some never are."""
    table, budget = table_of(41), RowBudget()
    cache = HotRowCache(6, PACKED, index=HotRowIndex(6, min_count=1, most_admitted=3))
    fetched = []
    for batch in [*batches, *[None] * ahead]:
        if batch is not None:
            ids = np.array(batch, np.int32).reshape(2, 2)
            fetch = LayerFetch.of_distinct(ids, PACKED, cache, budget)
            staged = np.empty((fetch.ids.size, PACKED), np.uint8)
            reader(table)(fetch.ids, staged)
            fetch.admit(staged)
            fetched.append((ids, fetch, staged))
        if len(fetched) > ahead or (batch is None and fetched):
            ids, fetch, staged = fetched.pop(0)
            wanted = np.where((ids >= 0)[..., None], table[np.maximum(ids, 0)], 0)
            if data.draw(st.booleans()):
                np.testing.assert_array_equal(put_together(fetch, staged), wanted)
            staged[...] = 255  # the buffer is filled anew


def test_filled_cache_holds_the_rows():
    table = table_of(300_000)
    cache = HotRowCache(70_000, PACKED)
    order = np.random.default_rng(0).permutation(200_000)
    cache.fill(order, reader(table))
    slots = cache.index.lookup(order[:60_000].astype(np.int32))
    found = slots >= 0
    assert found.mean() > 0.85  # sets are not equally full
    rows = np.asarray(cache.rows_after(0))[slots[found]]
    np.testing.assert_array_equal(rows, table[order[:60_000][found]])


def test_admissions_wait_for_the_next_batch():
    cache = HotRowCache(4, PACKED)
    row = np.full((1, PACKED), 7, np.uint8)
    cache.admit(np.array([2], np.int32), row)
    cache.admit(np.array([2], np.int32), 2 * row)
    before = cache.rows_after(0)
    assert not np.asarray(before).any()
    after = cache.rows_after(1)
    assert before.is_deleted()
    assert cache.rows_after(1) is after
    np.testing.assert_array_equal(np.asarray(after)[2], row[0])
    assert jnp.count_nonzero(after) == PACKED
    np.testing.assert_array_equal(np.asarray(cache.rows_after(2))[2], 2 * row[0])
    assert cache.admissions == 2


def test_budget_settles_on_few_sizes():
    budget = RowBudget()
    assert budget.choose(0, 3200) == 100
    assert budget.choose(101, 3200) == 200
    assert budget.choose(3200, 3200) == 3200
    sizes = {budget.choose(1000 + 7 * n, 3200) for n in range(40)}
    assert len(sizes) <= 5
    assert budget.choose(1300, 3200) == 1300  # the large one is forgotten
    assert budget.choose(3, 5) == 3

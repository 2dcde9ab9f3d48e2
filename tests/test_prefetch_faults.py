"""What `EngramPrefetch` does when its caller or its threads do not play along."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prefetch_cases import random_batch, random_hashes, same, warmed, with_storage
from small_stack import make_stack

import engram_jax
from engram_jax.host_storage import PinnedHostTable
from engram_jax.hot_rows import FetchCounters
from engram_jax.prefetch import EngramPrefetch
from engram_jax.row_fetcher import Gathering
from engram_jax.staging import StagingBuffer


@pytest.fixture(scope="module")
def stacks() -> dict[str, engram_jax.EngramStack]:
    device = make_stack()
    pinned = with_storage(
        device, lambda layer_id, values, scales: PinnedHostTable(values, scales)
    )
    return {"device": device, "pinned_host": pinned}


def rows_of(batch) -> list[np.ndarray]:
    return [np.array(rows.packed()) for rows in batch.rows]


@pytest.mark.parametrize("given", ["tokens", "hashes", "lists"])
def test_arguments_may_be_written_over_at_once(stacks, given):
    """A decode loop has one set of arrays, and fills it again after `start`."""
    arguments = random_batch(300, seed=1)
    if given == "hashes":
        arguments = {"hashes": random_hashes(300, 1), "token_mask": np.ones(300, bool)}
    if given == "lists":
        arguments = {k: np.asarray(v).tolist() for k, v in arguments.items()}
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        wanted = rows_of(prefetch.start(**arguments).result())
        gate = threading.Event()
        # A slow thread: it gets to the batch when `start` has long returned.
        prefetch._thread.submit(gate.wait)
        prefetch._fetcher._gatherers.submit(gate.wait)
        pending = prefetch.start(**arguments)
        for values in arguments.values():
            values[:] = values[:1] * len(values) if given == "lists" else 0
        gate.set()
        batch = pending.result()
        for actual, expected in zip(rows_of(batch), wanted, strict=True):
            same(actual, expected)
        if given == "hashes":
            assert np.asarray(batch.token_mask).all()


def test_hashes_for_the_device_may_be_written_over(stacks):
    hashes = random_hashes(4, 2)
    wanted = hashes.copy()
    with EngramPrefetch(stacks["device"], threads=1) as prefetch:
        pending = prefetch.start(hashes)
        hashes[:] = -1
        same(pending.result().hash_ids, wanted)


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64])
def test_hashes_for_the_device_are_narrowed(stacks, dtype):
    """Kernels read ids as 32 bits: of wider ones they would see the halves."""
    with jax.enable_x64(True), EngramPrefetch(stacks["device"], threads=1) as prefetch:
        hashes = jnp.asarray(random_hashes(4, 2).astype(dtype))
        if dtype == np.int64:
            hashes = hashes.at[0].set(2**32 + 5)
        found = prefetch.start(hashes).result().hash_ids
        assert found.dtype == jnp.int32
        same(found[1:], np.asarray(hashes)[1:].astype(np.int32))
        assert (found[0] == (-1 if dtype == np.int64 else hashes[0])).all()


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "i8", ">i8", "u8"])
def test_hashes_have_any_integer_dtype(stacks, dtype, unique):
    """Pitfall: NumPy has no -1 for an id that does not fit, in an unsigned dtype."""
    hashes = (random_hashes(9, 2) % 100).astype(dtype)
    if hashes.itemsize == 8:
        hashes[0] = 2**32 + 5 if dtype != "u8" else 2**63 + 5
    mixed = engram_jax.EngramStack(
        stacks["device"].config,
        stacks["device"].hash_state,
        {1: stacks["device"].layers[1], 3: stacks["pinned_host"].layers[3]},
    )
    table = stacks["device"].layers[3].embedding
    wanted = np.where(hashes < 850, hashes, 0).astype(np.int32)
    wanted[hashes >= 850] = -1
    with EngramPrefetch(mixed, threads=1, unique=unique) as prefetch:
        warmed(prefetch, hashes)  # in turn by a thread and by `start`
        batch = prefetch.start(hashes).result()
        assert batch.hash_ids.dtype == jnp.int32
        same(batch.hash_ids, wanted)
        same(batch.rows[1].packed(), table.lookup_packed(jnp.asarray(wanted[:, 1])))


def test_tokens_may_be_unsigned(stacks):
    tokens = random_batch(30, 1)
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        wanted = rows_of(prefetch.start(**tokens).result())
        tokens["input_ids"] = tokens["input_ids"].astype(np.uint32)
        found = rows_of(prefetch.start(**tokens).result())
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def test_a_batch_that_has_its_rows_is_refused(stacks):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        batch = prefetch.start(random_hashes(4, 0)).result()
        with pytest.raises(ValueError, match="has its rows already"):
            prefetch.start(batch)


class WatchedCounters(FetchCounters):
    """Counters that see two threads at once."""

    busy = together = False

    def add(self, layer):
        self.together |= self.busy
        self.busy = True
        time.sleep(0.05)  # what a thread may be interrupted for
        super().add(layer)
        self.busy = False


def test_two_threads_do_not_count_at_once(stacks):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        warmed(prefetch, random_hashes(9, 0))
        prefetch.start(**random_batch(30, 1)).result()
        watched = prefetch._fetcher.counters = WatchedCounters()
        first = prefetch.start(**random_batch(30, 1))  # by the thread
        second = started_here(prefetch, random_hashes(9, 5))
        first.result()
        second.result()
        assert watched.batches == 2 * 2  # layers
        assert not watched.together


def test_a_buffer_lost_with_its_step_is_replaced(stacks, monkeypatch, caplog):
    """A step that failed surfaces as an error of the buffers that it read."""
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        warmed(prefetch, random_hashes(9, 0))
        good, failed = StagingBuffer.wait_for_readers, []

        def wait(buffer):
            if not failed:
                failed.append(buffer)
                raise jax.errors.JaxRuntimeError("the step ran out of memory")
            good(buffer)

        monkeypatch.setattr(StagingBuffer, "wait_for_readers", wait)
        wanted = random_hashes(9, 7)
        batch = prefetch.start(wanted).result()
        assert failed
        assert batch.rows[0].rows[0] is not failed[0].arrays["rows0.0"]
        assert "ran out of memory" in caplog.text
        monkeypatch.undo()
        again = prefetch.start(wanted).result()
        for one, other in zip(rows_of(batch), rows_of(again), strict=True):
            same(one, other)


def test_a_buffer_is_unread_when_all_its_arrays_are():
    """What `start` asks, so that it waits for no step."""
    buffer = object.__new__(StagingBuffer)  # no array here could be made to wait
    for states in ((True, True), (True, False), (False, False)):
        arrays = [
            SimpleNamespace(is_ready=lambda ready=ready: ready) for ready in states
        ]
        buffer.arrays = dict(zip("ab", arrays, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
        assert buffer.is_unread() is all(states)


def started_here(prefetch: EngramPrefetch, hashes):
    """Starts a batch whose gathering `start` itself begins, not a thread."""
    pending = prefetch.start(hashes)
    assert isinstance(pending._future, Gathering)
    return pending


def test_who_takes_a_batch_gathers_what_no_thread_has_begun(stacks):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        wanted = rows_of(prefetch.start(random_hashes(300, 7)).result())
        warmed(prefetch, random_hashes(300, 0))
        gate = threading.Event()
        prefetch._fetcher._gatherers.submit(gate.wait)  # its only thread
        try:
            pending = started_here(prefetch, random_hashes(300, 7))
            assert not pending.done()
            batch = pending.result()
        finally:
            gate.set()
        for one, other in zip(rows_of(batch), wanted, strict=True):
            same(one, other)


def test_its_errors_are_those_of_a_thread(stacks, monkeypatch):
    storages = [
        layer.embedding.storage for layer in stacks["pinned_host"].layers.values()
    ]
    with EngramPrefetch(stacks["pinned_host"], threads=2) as prefetch:
        warmed(prefetch, random_hashes(2000, 0))  # enough for both threads
        gate = threading.Event()
        for _ in "ab":
            prefetch._fetcher._gatherers.submit(gate.wait)

        def read_into(storage, ids, out):
            raise ValueError("the table is gone")

        try:
            pending = started_here(prefetch, random_hashes(2000, 7))
            monkeypatch.setattr(type(storages[0]), "read_into", read_into)
            with pytest.raises(ValueError, match="the table is gone"):
                pending.result()
        finally:
            gate.set()
        monkeypatch.undo()
        prefetch.start(random_hashes(2000, 7)).result()


def test_start_waits_for_no_step(stacks, monkeypatch):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        warmed(prefetch, random_hashes(9, 0))
        read = threading.Event()
        good = StagingBuffer.wait_for_readers

        def wait(buffer):
            assert threading.current_thread() is not threading.main_thread()
            assert read.wait(20)
            good(buffer)

        monkeypatch.setattr(StagingBuffer, "is_unread", lambda buffer: False)
        monkeypatch.setattr(StagingBuffer, "wait_for_readers", wait)
        hashes = random_hashes(9, 5)
        pending = prefetch.start(hashes)
        assert not pending.done()
        read.set()
        rows = rows_of(pending.result())
        monkeypatch.undo()
        for one, other in zip(
            rows, rows_of(prefetch.start(hashes).result()), strict=True
        ):
            same(one, other)


@pytest.mark.parametrize("early_copies", [0, 2])
def test_threads_that_cannot_start_are_no_hang(stacks, monkeypatch, early_copies):
    with EngramPrefetch(
        stacks["pinned_host"], threads=1, early_copies=early_copies
    ) as prefetch:

        def refuse(*_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(prefetch._fetcher._gatherers, "submit", refuse)
        pending = prefetch.start(**random_batch(30, 1))
        raised = []

        def take():
            try:
                pending.result()
            except RuntimeError as error:
                raised.append(str(error))

        taker = threading.Thread(target=take, daemon=True)
        taker.start()
        taker.join(20)
        if taker.is_alive():  # so that the test ends
            for piece in range(early_copies):
                pending._progress._filled[piece].set()
            taker.join()
            pytest.fail("result() waits for threads that never started")
        assert raised == ["can't start new thread"]
        monkeypatch.undo()
        assert prefetch.start(**random_batch(30, 1)).result().rows is not None


def test_a_cache_without_distinct_rows_is_refused(stacks):
    with pytest.raises(ValueError, match="hot_rows needs unique"):
        EngramPrefetch(stacks["pinned_host"], hot_rows=10**5, unique=False)


@pytest.mark.parametrize("early_copies", [0, 2])
@pytest.mark.parametrize("how", ["result", "join"])
def test_an_error_of_a_batch_without_its_thread_surfaces(
    stacks, monkeypatch, early_copies, how
):
    with EngramPrefetch(
        stacks["pinned_host"], threads=2, early_copies=early_copies
    ) as prefetch:
        warmed(prefetch, random_hashes(300, 0))

        def fail(*_):
            raise ValueError("the row was not there")

        monkeypatch.setattr(PinnedHostTable, "read_into", fail)
        first = started_here(prefetch, random_hashes(300, 5))
        second = prefetch.start(random_hashes(300, 6))
        with pytest.raises(ValueError, match="the row was not there"):
            first.result() if how == "result" else prefetch.join()
        # `join` drops all of them, and gives the first one's error.
        said = "the row was not there" if how == "result" else "dropped by join"
        with pytest.raises((ValueError, RuntimeError), match=said):
            second.result()
        monkeypatch.undo()
        # The next ones are right, whatever buffer they get.
        for seed in range(3):
            hashes = random_hashes(300, seed)
            rows = rows_of(prefetch.start(hashes).result())
            tables = [x.embedding for x in stacks["device"].layers.values()]
            for layer, table in enumerate(tables):
                same(rows[layer], table.lookup_packed(jnp.asarray(hashes[:, layer])))

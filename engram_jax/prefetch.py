"""Rows of tables outside device memory, fetched while an earlier step runs."""

import collections
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Int

from .config import QUANT_BLOCK
from .exchange import fetch_rows
from .host_hash import HostHash, narrow
from .hot_rows import FetchCounters, HotRowCache, LayerFetch, RowBudget
from .stack import EngramBatch, EngramStack
from .staged_rows import StagedRows
from .staging import StagingBuffer, host_sharding

_log = logging.getLogger(__name__)

_THREADS = 8
"""Beyond 8 threads an H200's host gathered no faster: 7.5 ms with 1, 2.9 with 4, 1.7
with 8, 1.6 to 2.1 with 10 to 14."""
_ROWS_PER_TASK = 512
_SHAPES_KEPT = 8


class EngramPrefetch:
    """Fetch rows from the host while the device works on an earlier step.

    Host threads gather every layer's rows into pinned memory, and the step that uses
    them copies them to the device beside its other work:

        with EngramPrefetch(stack) as prefetch:
            pending = prefetch.start(**batches[0])
            for following in batches[1:]:
                batch = pending.result()
                pending = prefetch.start(**following)
                hidden = step(hidden, batch)  # jitted; calls stack(layer_id, ..)
            hidden = step(hidden, pending.result())

    Rows are those of the direct lookup, bit for bit, for any T, ragged batches, dead
    tokens and stacks on a mesh. Layers whose tables lie in device memory read their
    own, as they would without this.

    A batch may be used until the next one's `result`; a step that still runs then is
    waited for before its buffer is filled again, and one that is started later with
    the old batch raises "Array has been deleted".

    Use it from one thread. `close`, or leaving the ``with`` block, ends its threads.

    Attributes:
        counters: `FetchCounters` of everything fetched so far.
        hot_rows: each layer's `HotRowCache`, or None.

    Args:
        stack: whose rows to fetch.
        threads: host threads that gather; None takes 8, or the CPUs if these are fewer.
        depth: batches that may be started and not yet taken.
        unique: fetch each distinct row of a batch once. That costs the host some time,
            and pays where rows are few or the link is slow. None does so with
            `hot_rows` alone. Not on a mesh.
        hot_rows: bytes of device memory for a cache of frequent rows, of all layers
            together; or the caches, one a layer. Not on a mesh.
        direct_tokens: up to this many tokens the GPU reads pinned tables itself, which
            starts sooner. None takes what was measured.

    Raises:
        MemoryError: the cache does not fit into the device's memory.
        NotImplementedError: `unique` or `hot_rows` on a mesh.
        ValueError: a number is below 1, or caches do not fit the layers.
    """

    def __init__(
        self,
        stack: EngramStack,
        *,
        threads: int | None = None,
        depth: int = 2,
        unique: bool | None = None,
        hot_rows: int | Sequence[HotRowCache] | None = None,
        direct_tokens: int | None = None,
    ) -> None:
        threads = min(_THREADS, os.cpu_count() or 1) if threads is None else threads
        for name, number in (("threads", threads), ("depth", depth)):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        if stack.sharding is not None and (unique or hot_rows is not None):
            raise NotImplementedError(
                "unique and hot_rows are not available on a mesh; leave them out"
            )
        self._stack = stack
        self._tables = [layer.embedding for layer in stack.layers.values()]
        self._layout = _Layout.of(stack)
        self.hot_rows = self._caches(hot_rows)
        self._unique = self.hot_rows is not None if unique is None else unique
        self._budgets = [RowBudget() for _ in self._tables]
        self._direct_tokens = direct_tokens
        self._hash: HostHash | None = None
        self.counters = FetchCounters()
        self._threads = threads
        self._depth = depth
        self._gatherers = futures.ThreadPoolExecutor(threads, "engram-gather")
        # One after the other: a cache must see batches in order.
        self._fetcher = futures.ThreadPoolExecutor(1, "engram-fetch")
        self._pending: collections.deque[PendingBatch] = collections.deque()
        self._free = _FreeBuffers()
        self._handed_over: StagingBuffer | None = None
        self._closed = False

    def start(
        self,
        hashes: EngramBatch | Int[Any, "T L C"] | None = None,
        *,
        token_mask: Any = None,
        **tokens: Any,
    ) -> "PendingBatch":
        """Begin to fetch a batch's rows; does not wait.

        Args:
            hashes: rows of each token [T, L, C], or what `EngramStack.batch` gave. On a
                device they are waited for by a thread, and come when the device has
                finished what it was given before.
            token_mask: with hashes: False where the gate is shut.
            **tokens: instead of hashes, the arguments of `EngramStack.batch`, or of
                `replica_batch` on a mesh, without a slot cache. They are hashed on the
                CPU, so that no step has to end first.

        Returns:
            The batch to come. Batches are taken in the order in which they started.

        Raises:
            RuntimeError: `depth` batches wait to be taken, or this is closed.
            ValueError: both hashes and tokens are given, or neither, or a slot cache.
        """
        if self._closed:
            raise RuntimeError("this EngramPrefetch is closed; make a new one")
        if len(self._pending) >= self._depth:
            raise RuntimeError(
                f"{len(self._pending)} batches are started and none of them was taken; "
                "call result() of the first, or join(), or give a larger depth"
            )
        if (hashes is None) == (not tokens):
            raise ValueError(
                "start takes hashes or tokens (input_ids=, positions=, "
                "query_start_loc=): one of the two"
            )
        if tokens.get("slot_cache") is not None:
            raise ValueError(
                "a slot cache lives on the device: hash with EngramStack.batch, and "
                "start with the batch that it gives"
            )
        if hashes is None and self._hash is None:
            self._hash = HostHash(self._stack.hash_state)
        pending = PendingBatch(
            self, self._fetcher.submit(self._fetch, hashes, token_mask, tokens)
        )
        self._pending.append(pending)
        return pending

    def join(self) -> None:
        """Wait for all batches that were started and not taken, and drop them.

        Raises:
            Exception: what went wrong while fetching one of them.
        """
        errors = []
        while self._pending:
            future = self._pending.popleft()._future
            error = future.exception()
            if error is not None:
                errors.append(error)
                continue
            fetched = future.result()
            self._admit(fetched)
            if fetched.buffer is not None:
                self._free.put(fetched.buffer)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for what is under way and end all threads; batches not taken are lost.

        An error of such a batch is logged.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.join()
        except Exception as error:
            _log.warning("A batch that was not taken had failed: %s", error)
        finally:
            self._fetcher.shutdown()
            self._gatherers.shutdown()
            self._free.clear()
            self._handed_over = None

    def __enter__(self) -> "EngramPrefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _caches(self, hot_rows) -> list[HotRowCache] | None:
        if hot_rows is None:
            return None
        if not isinstance(hot_rows, int):
            caches = list(hot_rows)
            widths = [_packed_width(table) for table in self._tables]
            if [cache.row_bytes for cache in caches] != widths:
                raise ValueError(
                    f"hot_rows has caches of rows of "
                    f"{[cache.row_bytes for cache in caches]} bytes; the layers' rows "
                    f"have {widths}: one cache a layer"
                )
            return caches
        share = hot_rows // len(self._tables)
        return [
            HotRowCache(share // _packed_width(table), _packed_width(table))
            for table in self._tables
        ]

    # --- In the fetching thread ------------------------------------------------------

    def _fetch(self, given, token_mask, tokens) -> "_Fetched":
        if given is None:
            assert self._hash is not None
            hashes, token_mask = self._hash(tokens)
        elif isinstance(given, EngramBatch):
            hashes, token_mask = np.asarray(given.hash_ids), given.token_mask
        else:
            hashes = np.asarray(given)
        self._check(hashes)
        hashes = narrow(hashes)
        count = hashes.shape[0]
        staged = [
            index
            for index, table in enumerate(self._tables)
            if self._host(table, count)
        ]
        whole = self._layout.sharding is None or len(staged) == len(self._tables)
        if not staged or not count or not whole:
            return _Fetched(hashes, token_mask)
        layers = {index: self._plan(index, hashes[:, index]) for index in staged}
        shapes = {
            name: self._layout.shape(name, array.shape, array.dtype)
            for index, layer in layers.items()
            for name, array in layer.shapes(index).items()
        }
        buffer = self._free.take(shapes)
        buffer.wait_for_readers()
        self._fill(buffer, layers)
        admissions = {}
        for index, layer in layers.items():
            rows = buffer.views(f"rows{index}")[0][1] if layer.cached else None
            admissions[index] = layer.admit(rows)
            self.counters.add(layer)
        return _Fetched(hashes, token_mask, buffer, layers, admissions)

    def _check(self, hashes) -> None:
        wanted = (len(self._tables), self._stack.layout.n_hash_cols)
        if hashes.ndim != 3 or hashes.shape[1:] != wanted:
            raise ValueError(
                f"hashes have shape {hashes.shape}; they must be [T, {wanted[0]}, "
                f"{wanted[1]}]: rows of each token, layer and column"
            )
        if hashes.dtype.kind not in "iu":
            raise TypeError(f"hashes have dtype {hashes.dtype}; they must be integers")

    def _host(self, table, count) -> bool:
        """Tell whether a table's rows are to be gathered on the host."""
        storage = table.storage
        if storage is None or not hasattr(storage, "read_into"):
            return False
        most = self._direct_tokens
        if most is None:
            most = getattr(storage, "direct_tokens", 0)
        direct = getattr(storage, "reads_on_device", False)
        return self._layout.sharding is not None or not direct or count > most

    def _plan(self, index, ids) -> LayerFetch:
        padded = self._layout.pad(ids)
        width = _packed_width(self._tables[index])
        cache = None if self.hot_rows is None else self.hot_rows[index]
        if not self._unique:
            return LayerFetch.of_all(padded, width)
        return LayerFetch.of_distinct(padded, width, cache, self._budgets[index])

    def _fill(self, buffer, layers) -> None:
        jobs, copies = [], []
        for index, layer in layers.items():
            storage = self._tables[index].storage
            first: dict[str, Any] = {}
            for part, view in buffer.views(f"rows{index}"):
                done = first.setdefault(str(part), view)
                if done is not view:  # another device has the same tokens
                    copies.append((view, done))
                    continue
                ids = layer.ids[part[: layer.ids.ndim]].reshape(-1)
                jobs.append(
                    (storage, ids, view.reshape(-1, view.shape[-1])[: ids.size])
                )
            if layer.index is not None:
                for part, view in buffer.views(f"index{index}"):
                    view[...] = layer.index[part]
        total = sum(ids.size for _, ids, _ in jobs)
        tasks = max(1, min(self._threads, total // _ROWS_PER_TASK))
        work = [
            self._gatherers.submit(_gather, jobs, i, tasks) for i in range(1, tasks)
        ]
        try:
            # One task a thread: more only fight over Python's lock.
            _gather(jobs, 0, tasks)
        finally:
            # The buffer is not anybody else's while a thread may write to it.
            futures.wait(work)
        for task in work:
            task.result()
        for view, source in copies:
            view[...] = source

    # --- In the caller's thread ------------------------------------------------------

    def _hand_over(self, pending: "PendingBatch") -> EngramBatch:
        if not self._pending or self._pending[0] is not pending:
            raise RuntimeError(
                "batches are taken in the order in which they started, each once; this "
                "one was dropped by join() or close(), or an earlier one waits"
            )
        try:
            fetched: _Fetched = pending._future.result()
        finally:
            self._pending.popleft()
        if self._handed_over is not None:
            # Its step has been dispatched by now.
            self._free.put(self._handed_over)
        self._handed_over = fetched.buffer
        batch = self._batch(fetched)
        self._admit(fetched)
        return batch

    def _batch(self, fetched: "_Fetched") -> EngramBatch:
        hashes, mask = fetched.hashes, fetched.token_mask
        mask = None if mask is None else jnp.asarray(mask)
        if fetched.buffer is None:
            hashes, rows = jnp.asarray(hashes), None
            if self._layout.sharding is not None:
                rows = fetch_rows(self._layout.sharding, self._tables, hashes)
            return EngramBatch(hashes, mask, rows)
        arrays = fetched.buffer.arrays
        rows = tuple(
            StagedRows(
                arrays[f"rows{index}"],
                arrays.get(f"index{index}"),
                None if self.hot_rows is None else self.hot_rows[index].rows,
            )
            if index in fetched.layers
            else None
            for index in range(len(self._tables))
        )
        # Where nobody reads them they need not travel.
        return EngramBatch(jnp.asarray(hashes) if None in rows else None, mask, rows)

    def _admit(self, fetched: "_Fetched") -> None:
        for index, admission in fetched.admissions.items():
            if admission is not None and self.hot_rows is not None:
                self.hot_rows[index].schedule(admission)


class PendingBatch:
    """Stand for a batch whose rows are being fetched."""

    def __init__(self, prefetch: EngramPrefetch, future: futures.Future[Any]) -> None:
        self._prefetch = prefetch
        self._future = future

    def done(self) -> bool:
        """Tell whether `result` would not wait."""
        return self._future.done()

    def result(self) -> EngramBatch:
        """Wait for the rows, and end the use of the batch that was taken before.

        Returns:
            The batch, for the jitted step: `stack(layer_id, hidden, batch)`. Its
            `hash_ids` are None where no layer needs them any more.

        Raises:
            Exception: what went wrong while fetching.
            RuntimeError: an earlier batch was not taken, or this one was, already.
        """
        return self._prefetch._hand_over(self)


@dataclasses.dataclass(frozen=True)
class _Fetched:
    hashes: npt.NDArray[Any]
    token_mask: Any
    buffer: StagingBuffer | None = None
    layers: dict[int, LayerFetch] = dataclasses.field(default_factory=dict)
    admissions: dict[int, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where staged rows lie: in one device's pinned memory, or in a mesh's."""

    sharding: Any
    host: jax.sharding.Sharding

    @classmethod
    def of(cls, stack: EngramStack) -> "_Layout":
        sharding = stack.sharding
        if sharding is not None:
            return cls(sharding, host_sharding(sharding.named(sharding.rows)))
        weight = next(iter(stack.layers.values())).q_weight[...]
        return cls(None, host_sharding(weight.sharding))

    def shape(self, name, shape, dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.host)

    def pad(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.sharding is None:
            return ids
        missing = self.sharding.pad_tokens(len(ids)) - len(ids)
        return np.pad(ids, ((0, missing), (0, 0)), constant_values=-1)


class _FreeBuffers:
    """Buffers that no batch has, by shape; those of rare shapes are let go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[Any, list[StagingBuffer]] = {}

    def take(self, shapes) -> StagingBuffer:
        key = _key(shapes)
        with self._lock:
            free = self._buffers.pop(key, [])
            buffer = free.pop() if free else None
            self._buffers[key] = free  # now the shape used last
            while len(self._buffers) > _SHAPES_KEPT:
                del self._buffers[next(iter(self._buffers))]
        return StagingBuffer(shapes) if buffer is None else buffer

    def put(self, buffer: StagingBuffer) -> None:
        if any(array.is_deleted() for array in buffer.arrays.values()):
            return  # a step took them as donated: they are its own
        buffer.retire()
        with self._lock:
            self._buffers.setdefault(_key(buffer.arrays), []).append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._buffers.clear()


def _key(arrays) -> tuple[Any, ...]:
    return tuple((name, x.shape, str(x.dtype)) for name, x in sorted(arrays.items()))


def _gather(jobs, task: int, tasks: int) -> None:
    """Do one thread's share of every layer's rows."""
    for storage, ids, out in jobs:
        start, stop = (ids.size * i // tasks for i in (task, task + 1))
        if stop > start:
            storage.read_into(ids[start:stop], out[start:stop])


def _packed_width(table: Any) -> int:
    return table.head_dim + table.head_dim // QUANT_BLOCK

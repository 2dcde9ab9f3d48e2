"""Rows of tables outside device memory, fetched while an earlier step runs."""

import collections
import copy
import logging
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Integer

from .exchange import fetch_rows
from .hot_rows import FetchCounters, HotRowCache
from .row_fetcher import (
    Fetched,
    FillProgress,
    Gathering,
    RowFetcher,
    packed_width,
)
from .stack import EngramBatch, EngramStack
from .staged_rows import StagedRows
from .staging import StagingBuffer, to_device

_log = logging.getLogger(__name__)

_THREADS = 8
"""Beyond 8 threads an H200's host gathered no faster: 7.5 ms with 1, 2.9 with 4, 1.7
with 8, 1.6 to 2.1 with 10 to 14."""


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

    A batch may be used until the `result` of the next but one; a step that still runs
    then is waited for before its buffer is filled again, and one that is started later
    with the old batch raises "Array has been deleted".

    Use it from one thread. `close`, or leaving the ``with`` block, ends its threads.

    Attributes:
        hot_rows: each layer's `HotRowCache`, or None.

    Args:
        stack: whose rows to fetch.
        threads: host threads that gather; None takes 8, or the CPUs if these are fewer.
            Who takes a batch gathers what they have not begun.
        depth: batches that may be started and not yet taken.
        unique: read each distinct row of a batch once. That costs the host some time,
            and pays where rows are few or the link is slow. None does so with
            `hot_rows` alone. Not on a mesh.
        hot_rows: bytes of device memory for a cache of frequent rows, of all layers
            together; or the caches, one a layer. Not on a mesh.
        direct_tokens: up to this many tokens the GPU reads host memory itself, which
            starts sooner. None takes what was measured.
        early_copies: 0 leaves the copy to the step. Otherwise `result` copies the rows
            in this many pieces, each half as large as the one before, as soon as it is
            gathered: for a device that has nothing else to do meanwhile. 1 at most with
            `hot_rows`. Not on a mesh.

    Raises:
        MemoryError: the cache does not fit into the device's memory.
        NotImplementedError: an option that does not work on a mesh, there.
        ValueError: a number is too small, or caches do not fit the layers.
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
        early_copies: int = 0,
    ) -> None:
        threads = min(_THREADS, os.cpu_count() or 1) if threads is None else threads
        for name, number, least in (
            ("threads", threads, 1),
            ("depth", depth, 1),
            ("early_copies", early_copies, 0),
        ):
            if number < least:
                raise ValueError(f"{name} is {number}; it must be at least {least}")
        if unique is False and hot_rows is not None:
            raise ValueError(
                "hot_rows needs unique: what a cache has is told apart by distinct "
                "rows. Leave unique=False out, or hot_rows"
            )
        if stack.sharding is not None and (
            unique or hot_rows is not None or early_copies
        ):
            raise NotImplementedError(
                "unique, hot_rows and early_copies are not available on a mesh; leave "
                "them out"
            )
        self._tables = [layer.embedding for layer in stack.layers.values()]
        self.hot_rows = self._caches(hot_rows)
        if self.hot_rows is not None:
            early_copies = min(early_copies, 1)
        self._early_copies = early_copies
        self._depth = depth
        self._fetcher = RowFetcher(
            stack,
            threads=threads,
            unique=self.hot_rows is not None if unique is None else unique,
            hot_rows=self.hot_rows,
            direct_tokens=direct_tokens,
            pieces=max(1, early_copies),
        )
        self._thread = futures.ThreadPoolExecutor(1, "engram-fetch")
        self._pending: collections.deque[PendingBatch] = collections.deque()
        self._handed_over: collections.deque[StagingBuffer] = collections.deque()
        self._closed = False

    @property
    def counters(self) -> FetchCounters:
        """Count everything fetched so far."""
        return self._fetcher.counters

    def start(
        self,
        hashes: EngramBatch | Integer[Any, "T L C"] | None = None,
        *,
        token_mask: Any = None,
        **tokens: Any,
    ) -> "PendingBatch":
        """Begin to fetch a batch's rows; does not wait.

        Arguments are copied where they are not JAX arrays: they may be written over.

        Args:
            hashes: rows of each token [T, L, C], or what `EngramStack.batch` gave. On a
                device they are waited for by a thread, and come when the device has
                finished what it was given before.
            token_mask: with hashes [T, L, C]: False where the gate is shut.
            **tokens: instead of hashes, the arguments of `EngramStack.batch`, or of
                `replica_batch` on a mesh, without a slot cache. They are hashed on the
                CPU, so that no step has to end first.

        Returns:
            The batch to come. Batches are taken in the order in which they started.

        Raises:
            RuntimeError: `depth` batches wait to be taken, or this is closed.
            TypeError: hashes are no integers.
            ValueError: both hashes and tokens are given, or neither, or a slot cache,
                or a second mask, or a batch that has its rows; or hashes have another
                shape.
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
        if token_mask is not None and (tokens or isinstance(hashes, EngramBatch)):
            raise ValueError(
                "token_mask goes with hashes; tokens (by dead_mask=) and batches have "
                "a mask of their own: leave it out"
            )
        if isinstance(hashes, EngramBatch):
            hashes, token_mask = hashes.hash_ids, hashes.token_mask
            if hashes is None:
                raise ValueError(
                    "the batch has its rows already, and no hash_ids to fetch others "
                    "by; give it to the step as it is"
                )
        token_mask = _own(token_mask)
        progress = FillProgress(self._fetcher.pieces)
        future: futures.Future[Fetched] | Gathering | None = None
        if hashes is not None:
            future = self._fetcher.begin(progress, hashes, token_mask)
        if future is None:
            # One after the other: a cache must see batches in order.
            hashes = _own(hashes)
            tokens = {name: _own(values) for name, values in tokens.items()}
            future = self._thread.submit(
                self._fetcher.fetch, progress, hashes, token_mask, tokens
            )
        pending = PendingBatch(self, future, progress)
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
            buffer = future.result().buffer
            if buffer is not None:
                self._fetcher.give_back(buffer)
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
            self._thread.shutdown()
            self._fetcher.close()
            self._handed_over.clear()

    def __enter__(self) -> "EngramPrefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _caches(self, hot_rows) -> list[HotRowCache] | None:
        if hot_rows is None:
            return None
        widths = [packed_width(table) for table in self._tables]
        if isinstance(hot_rows, int):
            share = hot_rows // len(widths)
            return [HotRowCache(share // width, width) for width in widths]
        caches = list(hot_rows)
        found = [cache.row_bytes for cache in caches]
        if found != widths:
            raise ValueError(
                f"hot_rows has caches of rows of {found} bytes; the layers' rows have "
                f"{widths}: one cache a layer"
            )
        return caches

    def _hand_over(self, pending: "PendingBatch") -> EngramBatch:
        if not self._pending or self._pending[0] is not pending:
            raise RuntimeError(
                "batches are taken in the order in which they started, each once; this "
                "one was dropped by join() or close(), or an earlier one waits"
            )
        future = pending._future
        try:
            if isinstance(future, Gathering):
                self._give_back()
                future.help()
            early = self._copy_early(pending._progress)
            fetched: Fetched = future.result()
        finally:
            self._pending.popleft()
        # After `fetch` chose a buffer: it would wait for one that was just given back,
        # and the next batch would find none that is ready.
        self._give_back()
        if fetched.buffer is not None:
            self._handed_over.append(fetched.buffer)
        return self._batch(fetched, early)

    def _give_back(self) -> None:
        """Give back all buffers but those of the last batch and the one being taken.

        The step of the batch before the last has been dispatched, and has mostly ended,
        or else this waits for it. Before the next step is dispatched: the device gives
        a buffer back in its turn.
        """
        while len(self._handed_over) > 1:
            self._fetcher.give_back(self._handed_over.popleft())

    def _copy_early(self, progress: FillProgress) -> dict[str, Any]:
        """Copy pieces to the device, each when it is filled."""
        copied: dict[str, Any] = {}
        if not self._early_copies:
            return copied
        progress.started.wait()
        if progress.buffer is None:
            return copied
        for piece in range(self._fetcher.pieces):
            progress.wait(piece)
            filled = {
                name: array
                for name, array in progress.buffer.arrays.items()
                if name.endswith(f".{piece}")
            }
            copied |= _copy_all(filled)
        return copied

    def _batch(self, fetched: Fetched, early: dict[str, Any]) -> EngramBatch:
        hashes, mask = fetched.hashes, fetched.token_mask
        mask = None if mask is None else jnp.asarray(mask)
        if fetched.buffer is None:
            hashes, rows = jnp.asarray(hashes), None
            if self._fetcher.sharding is not None:
                rows = fetch_rows(self._fetcher.sharding, self._tables, hashes)
            return EngramBatch(hashes, mask, rows)
        arrays = fetched.buffer.arrays | early
        rows = tuple(
            StagedRows(
                tuple(
                    arrays[f"rows{index}.{piece}"]
                    for piece in range(self._fetcher.pieces)
                ),
                arrays.get(f"index{index}"),
                fetched.layers[index].cache_rows(),
            )
            if index in fetched.layers
            else None
            for index in range(len(self._tables))
        )
        # Where nobody reads them they need not travel.
        return EngramBatch(jnp.asarray(hashes) if None in rows else None, mask, rows)


class PendingBatch:
    """Stand for a batch whose rows are being fetched."""

    def __init__(
        self,
        prefetch: EngramPrefetch,
        future: futures.Future[Fetched] | Gathering,
        progress: FillProgress,
    ) -> None:
        self._prefetch = prefetch
        self._future = future
        self._progress = progress

    def done(self) -> bool:
        """Tell whether `result` would not wait."""
        return self._future.done()

    def result(self) -> EngramBatch:
        """Wait for the rows, and end the use of the batch before the last one taken.

        Returns:
            The batch, for the jitted step: `stack(layer_id, hidden, batch)`. Its
            `hash_ids` are None where no layer needs them any more.

        Raises:
            Exception: what went wrong while fetching.
            RuntimeError: an earlier batch was not taken, or this one was, already.
        """
        return self._prefetch._hand_over(self)


def _own(values: Any) -> Any:
    """Copy what the caller may write to while a thread reads it."""
    return values if isinstance(values, jax.Array) else copy.deepcopy(values)


@jax.jit
def _copy_all(arrays):
    return {name: to_device(array) for name, array in arrays.items()}

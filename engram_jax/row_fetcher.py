"""The host's side of a prefetch: which rows, gathered by which threads, into what."""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from .config import QUANT_BLOCK
from .host_hash import HostHash, narrow
from .hot_rows import FetchCounters, HotRowCache, LayerFetch, RowBudget
from .kernels import narrow_ids
from .stack import EngramStack
from .staging import StagingBuffer, host_sharding

_log = logging.getLogger(__name__)

_ROWS_PER_SHARE = 512
_SHAPES_KEPT = 8


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A batch whose rows are in host memory.

    Attributes:
        hashes: int32 [T, L, C], on the host where rows are staged; None where nobody
            needs them.
        token_mask: bool [T], or None.
        buffer: the rows, or None where none are staged.
        layers: what each staged layer reads from where.
    """

    hashes: Any
    token_mask: Any
    buffer: StagingBuffer | None = None
    layers: dict[int, LayerFetch] = dataclasses.field(default_factory=dict)


class Gathering:
    """A batch that threads are gathering, with the methods of a future.

    Args:
        fetched: what it will be.
        shares: of the batch's rows: the future of each, and what gathers it.
    """

    def __init__(
        self,
        fetched: Fetched,
        shares: Mapping[futures.Future[None], Callable[[], None]] | None = None,
    ) -> None:
        self._fetched = fetched
        self._shares = dict(shares or {})
        self._error: Exception | None = None

    def done(self) -> bool:
        """Tell whether `result` would not wait."""
        return all(future.done() for future in self._shares)

    def help(self) -> None:
        """Gather the shares that no thread has begun: one takes long to wake.

        An error of one is for `exception`; what is no error, as Ctrl-C, ends this at
        once, and with it the batch.
        """
        for future, gather in reversed([*self._shares.items()]):
            if future.cancel():
                del self._shares[future]
                try:
                    gather()
                except Exception as error:
                    self._error = error

    def result(self) -> Fetched:
        """Wait for all threads; raises what one of them raised."""
        error = self.exception()
        if error is not None:
            raise error
        return self._fetched

    def exception(self) -> BaseException | None:
        """Wait for all threads; give what one of them raised, or None."""
        # For all of them: none may write to the buffer any more.
        raised = [self._error, *(future.exception() for future in self._shares)]
        return next((error for error in raised if error is not None), None)


class FillProgress:
    """Tell another thread which pieces of a buffer are filled.

    Attributes:
        buffer: what is being filled, once `started` is set; None where nothing is.
        started: set when it is known what is filled.

    Args:
        pieces: how many there are.
    """

    def __init__(self, pieces: int) -> None:
        self.buffer: StagingBuffer | None = None
        self.started = threading.Event()
        self._lock = threading.Lock()
        self._left = [0] * pieces
        self._filled = [threading.Event() for _ in range(pieces)]

    def begin(self, buffer: StagingBuffer, shares: int) -> None:
        """Say that a buffer is being filled, in shares."""
        self.buffer = buffer
        self._left = [shares] * len(self._left)
        self.started.set()

    def finish(self, piece: int) -> None:
        """Say that a share has all rows of a piece that are its own."""
        with self._lock:
            self._left[piece] -= 1
            if not self._left[piece]:
                self._filled[piece].set()

    def give_up(self) -> None:
        """Say that nothing more is filled: nobody shall wait."""
        self.started.set()
        for filled in self._filled:
            filled.set()

    def wait(self, piece: int) -> None:
        """Wait until a piece is filled, or given up."""
        self._filled[piece].wait()


class RowFetcher:
    """Gather batches' rows into staging buffers.

    Attributes:
        sharding: how the stack lies on a mesh, or None.
        counters: of everything fetched so far.
        pieces: arrays that a layer's rows are staged in.

    Args:
        stack: whose rows.
        threads: that gather.
        unique: whether each distinct row is read once.
        hot_rows: each layer's cache, or None.
        direct_tokens: as of `EngramPrefetch`.
        pieces: arrays to stage a layer's rows in.
    """

    def __init__(
        self,
        stack: EngramStack,
        *,
        threads: int,
        unique: bool,
        hot_rows: Sequence[HotRowCache] | None,
        direct_tokens: int | None,
        pieces: int,
    ) -> None:
        self.sharding = stack.sharding
        self.counters = FetchCounters()
        self.pieces = pieces
        self._hash_state = stack.hash_state
        self._n_hash_cols = stack.layout.n_hash_cols
        self._tables = [layer.embedding for layer in stack.layers.values()]
        self._memory = _host_memory(stack)
        self._unique = unique
        self._hot_rows = hot_rows
        self._direct_tokens = direct_tokens
        self._budgets = [RowBudget() for _ in self._tables]
        self._hash: HostHash | None = None
        self._threads = threads
        self._gatherers = futures.ThreadPoolExecutor(threads, "engram-gather")
        self._free = _FreeBuffers()
        self._known_shapes: dict[Any, dict[str, jax.ShapeDtypeStruct]] = {}
        self._counting = threading.Lock()

    def fetch(
        self,
        progress: FillProgress,
        given: Any,
        token_mask: Any,
        tokens: Mapping[str, Any],
    ) -> Fetched:
        """Fetch one batch; run it in one thread, since caches see batches in order.

        Args:
            progress: told what is filled.
            given: hashes, or None for `tokens`. They stay as they are.
            token_mask: with hashes.
            tokens: arguments of `EngramStack.batch`.

        Returns:
            The batch.
        """
        try:
            return self._fetch(progress, given, token_mask, tokens)
        finally:
            progress.give_up()

    def begin(
        self, progress: FillProgress, given: Any, token_mask: Any
    ) -> Gathering | None:
        """Begin to fetch a batch without a thread of its own, which takes time to wake.

        Args:
            progress: told what is filled.
            given: hashes. They stay as they are.
            token_mask: with hashes.

        Returns:
            The batch to come; None where something has to be waited for or computed
            first (`fetch`).
        """
        on_host = not isinstance(given, jax.Array)
        if on_host:
            given = np.asarray(given)
        self._check(given)
        staged = self._staged(len(given))
        if not staged:  # hashes stay where they are; kernels read them as int32
            progress.started.set()
            return Gathering(Fetched(_narrowed(given), token_mask))
        if self._unique or self.sharding is not None or not on_host:
            return None
        # In the width that NumPy indexes by, or each thread would convert its part.
        layers = {
            index: self._plan(index, np.array(given[:, index], np.intp, order="C"))
            for index in staged
        }
        size = len(given), tuple(staged)  # all that their shapes depend on
        if size not in self._known_shapes:
            if len(self._known_shapes) == _SHAPES_KEPT:
                self._known_shapes.clear()
            self._known_shapes[size] = self._shapes(layers)
        buffer = self._free.take_ready(self._known_shapes[size])
        if buffer is None:
            return None
        jobs, _ = self._jobs(buffer, layers)
        shares = self._submit(progress, buffer, jobs)
        some_read_their_own = len(staged) < len(self._tables)
        hashes = _narrowed(given) if some_read_their_own else None
        self._count(layers)
        return Gathering(Fetched(hashes, token_mask, buffer, layers), shares)

    def give_back(self, buffer: StagingBuffer) -> None:
        """Take a buffer back whose step was dispatched, or that no step will read.

        Waits for that step where it has not ended.
        """
        self._free.put(buffer)

    def close(self) -> None:
        """End the threads."""
        self._gatherers.shutdown()
        self._free.clear()

    def _fetch(self, progress, given, token_mask, tokens) -> Fetched:
        if given is None:
            if self._hash is None:
                self._hash = HostHash(self._hash_state)
            hashes, token_mask = self._hash(tokens)
        else:
            hashes = np.asarray(given)
        self._check(hashes)
        hashes = narrow(hashes)
        staged = self._staged(hashes.shape[0])
        if not staged:
            return Fetched(hashes, token_mask)
        layers = {index: self._plan(index, hashes[:, index]) for index in staged}
        buffer = self._free.take(self._shapes(layers))
        jobs, copies = self._jobs(buffer, layers)
        shares = self._submit(progress, buffer, jobs)
        gathering = Gathering(Fetched(hashes, token_mask, buffer, layers), shares)
        gathering.help()
        fetched = gathering.result()
        for view, source in copies:
            view[...] = source
        for index, layer in layers.items():
            if layer.cached:
                layer.admit(buffer.views(f"rows{index}.0")[0][1])
        self._count(layers)
        return fetched

    def _count(self, layers: Mapping[int, LayerFetch]) -> None:
        with self._counting:  # `begin` and `fetch` are of two threads
            for layer in layers.values():
                self.counters.add(layer)

    def _check(self, hashes) -> None:
        wanted = (len(self._tables), self._n_hash_cols)
        if hashes.ndim != 3 or hashes.shape[1:] != wanted:
            raise ValueError(
                f"hashes have shape {hashes.shape}; they must be [T, {wanted[0]}, "
                f"{wanted[1]}]: rows of each token, layer and column"
            )
        if hashes.dtype.kind not in "iu":
            raise TypeError(f"hashes have dtype {hashes.dtype}; they must be integers")

    def _staged(self, count: int) -> list[int]:
        """List the tables of which a batch's rows are gathered on the host."""
        tables = enumerate(self._tables)
        staged = [index for index, table in tables if self._on_host(table, count)]
        whole = self.sharding is None or len(staged) == len(self._tables)
        return staged if count and whole else []

    def _on_host(self, table, count) -> bool:
        """Tell whether a table's rows are to be gathered on the host."""
        storage = table.storage
        if storage is None or not hasattr(storage, "read_into"):
            return False
        if self.sharding is not None or not getattr(storage, "reads_on_device", False):
            return True
        most = self._direct_tokens
        return count > (storage.direct_tokens if most is None else most)

    def _plan(self, index, ids) -> LayerFetch:
        if self.sharding is not None:
            missing = self.sharding.pad_tokens(len(ids)) - len(ids)
            ids = np.pad(ids, ((0, missing), (0, 0)), constant_values=-1)
        width = packed_width(self._tables[index])
        if not self._unique:
            return LayerFetch(ids, None, width)
        cache = None if self._hot_rows is None else self._hot_rows[index]
        return LayerFetch.of_distinct(ids, width, cache, self._budgets[index])

    def _shapes(self, layers) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._memory)
            for index, layer in layers.items()
            for name, array in layer.shapes(index, self.pieces).items()
        }

    def _jobs(self, buffer, layers) -> tuple[list[list[Any]], list[Any]]:
        """Say which rows go where, for each piece, and what is copied afterwards."""
        jobs: list[list[Any]] = [[] for _ in range(self.pieces)]
        copies = []
        for index, layer in layers.items():
            storage = self._tables[index].storage
            for piece, ids in enumerate(layer.cut(self.pieces)):
                first: dict[str, Any] = {}
                for part, view in buffer.views(f"rows{index}.{piece}"):
                    done = first.setdefault(str(part), view)
                    if done is not view:  # another device has the same tokens
                        copies.append((view, done))
                        continue
                    some = ids[part[: ids.ndim]].reshape(-1)
                    out = view.reshape(-1, view.shape[-1])
                    jobs[piece].append((storage, some, out))
            if layer.index is not None:
                for part, view in buffer.views(f"index{index}"):
                    view[...] = layer.index[part]
        return jobs, copies

    def _submit(self, progress, buffer, jobs) -> dict[futures.Future[None], Any]:
        total = sum(ids.size for piece in jobs for _, ids, _ in piece)
        # One share a thread: more only fight over Python's lock.
        count = max(1, min(self._threads, total // _ROWS_PER_SHARE))
        progress.begin(buffer, count)
        gather = functools.partial(_gather, progress, jobs)
        shares = [functools.partial(gather, number, count) for number in range(count)]
        return {self._gatherers.submit(share): share for share in shares}


class _FreeBuffers:
    """Buffers that no batch has, by shape; those of rare shapes are let go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[Any, list[StagingBuffer]] = {}

    def take(self, shapes) -> StagingBuffer:
        """Give a buffer that may be filled; waits for the step that still reads it."""
        buffer = _unless_lost(self._pop(shapes, lambda _: True))
        if buffer is None:
            buffer = StagingBuffer(shapes)
            buffer.wait_for_readers()
        return buffer

    def take_ready(self, shapes) -> StagingBuffer | None:
        """Give a buffer that may be filled at once, if there is one."""
        return _unless_lost(self._pop(shapes, StagingBuffer.is_unread))

    def put(self, buffer: StagingBuffer) -> None:
        if any(array.is_deleted() for array in buffer.arrays.values()):
            return  # a step took them as donated: they are its own
        try:
            buffer.retire()
        except jax.errors.JaxRuntimeError as error:
            _log.warning("A staging buffer could not be used again: %s", error)
            return
        with self._lock:
            self._buffers.setdefault(_key(buffer.arrays), []).append(buffer)

    def _pop(self, shapes, suits) -> StagingBuffer | None:
        key = _key(shapes)
        with self._lock:
            free = self._buffers.pop(key, [])
            buffer = next(filter(suits, free), None)
            if buffer is not None:
                free.remove(buffer)
            self._buffers[key] = free  # now the shape used last
            while len(self._buffers) > _SHAPES_KEPT:
                del self._buffers[next(iter(self._buffers))]
        return buffer

    def clear(self) -> None:
        with self._lock:
            self._buffers.clear()


def _unless_lost(buffer: StagingBuffer | None) -> StagingBuffer | None:
    """Wait for a buffer's readers; None where one of them failed."""
    try:
        if buffer is not None:
            buffer.wait_for_readers()
    except jax.errors.JaxRuntimeError as error:
        # Its memory is lost, and freed when nothing reads it any more.
        _log.warning("A staging buffer could not be used again: %s", error)
        return None
    return buffer


def _key(arrays) -> tuple[Any, ...]:
    return tuple((name, x.shape, x.dtype) for name, x in sorted(arrays.items()))


def _narrowed(hashes: Any) -> Any:
    """Bring hashes to int32 where they are; on the host, in a copy."""
    if isinstance(hashes, np.ndarray):
        return narrow(np.array(hashes))
    return hashes if hashes.dtype == np.int32 else narrow_ids(hashes)


def _gather(progress: FillProgress, jobs, share: int, shares: int) -> None:
    """Gather one share of every layer's rows, piece after piece."""
    done = 0
    try:
        for piece in jobs:
            for storage, ids, out in piece:
                start, stop = (ids.size * i // shares for i in (share, share + 1))
                if stop > start:
                    storage.read_into(ids[start:stop], out[start:stop])
            progress.finish(done)
            done += 1
    finally:
        for piece in range(done, len(jobs)):  # given up: nobody shall wait
            progress.finish(piece)


def _host_memory(stack: EngramStack) -> jax.sharding.Sharding:
    """Name the memory that rows are staged in: one device's, or a mesh's."""
    if stack.sharding is not None:
        return host_sharding(stack.sharding.named(stack.sharding.rows))
    return host_sharding(next(iter(stack.layers.values())).q_weight[...].sharding)


def packed_width(table: Any) -> int:
    """Count the bytes of a table's packed row, D + D/32."""
    return table.head_dim + table.head_dim // QUANT_BLOCK

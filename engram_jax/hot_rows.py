"""Rows of a batch fetched once, and frequent rows kept in device memory."""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int32, UInt8

from .host_storage import available_host_memory
from .row_index import HotRowIndex

_FILL_ROWS = 1 << 16
_BUDGET_STEPS = 32
_BUDGET_MEMORY = 16


@dataclasses.dataclass
class FetchCounters:
    """Count what was fetched.

    Attributes:
        batches: layers' parts of batches.
        rows: rows that tokens asked for; dead ones do not count.
        hits: of these, rows that were in the cache.
        duplicates: of these, rows that the same batch fetched already.
        rows_from_host: rows read from the host's table.
        bytes_from_host: their bytes.
        bytes_copied: bytes that the device copies: those, padding to a few sizes, and
            rows admitted to the cache.
        admitted: rows admitted to the cache.
        bytes_without: bytes from the host without cache and unique ids.
    """

    batches: int = 0
    rows: int = 0
    hits: int = 0
    duplicates: int = 0
    rows_from_host: int = 0
    bytes_from_host: int = 0
    bytes_copied: int = 0
    admitted: int = 0
    bytes_without: int = 0

    def add(self, layer: "LayerFetch") -> None:
        """Count one layer's part of a batch."""
        self.batches += 1
        self.rows += layer.rows
        self.hits += layer.hits
        self.rows_from_host += layer.rows_from_host
        self.duplicates += layer.duplicates
        self.bytes_from_host += layer.rows_from_host * layer.row_bytes
        self.bytes_copied += (layer.ids.size + layer.admitted) * layer.row_bytes
        self.admitted += layer.admitted
        self.bytes_without += layer.rows * layer.row_bytes

    @property
    def hit_rate(self) -> float:
        """Give the share of rows that the cache had."""
        return self.hits / max(self.rows, 1)

    @property
    def host_share(self) -> float:
        """Give bytes read from the host, over those without cache and unique ids."""
        return self.bytes_from_host / max(self.bytes_without, 1)


class HotRowCache:
    """Keep a table's frequent rows in device memory; results stay exact.

    A row is admitted when it was seen at least twice and more often than the rarest
    row of its set of 16 slots (`HotRowIndex`). What is in the cache is a copy, so that
    a row is the same from either place.

    Attributes:
        index: which row each slot holds.
        row_bytes: bytes of a packed row, D + D/32.
        admissions: how often rows were admitted so far.

    Args:
        slots: rows that it holds, at least 1.
        row_bytes: bytes of a packed row.
        device: which; None takes JAX's default.
        index: how rows are admitted; None takes `HotRowIndex(slots)`.

    Raises:
        MemoryError: the rows do not fit into the memory that the device has free.
        ValueError: `slots` is below 1, or the index has another size.

    Example:
        >>> cache = HotRowCache(2, 4)
        >>> cache.fill(np.array([7, 9]), lambda ids, out: out.fill(1))
        >>> cache.index.lookup(np.array([9, 8], np.int32)) >= 0
        array([ True, False])
    """

    def __init__(
        self,
        slots: int,
        row_bytes: int,
        *,
        device: Any = None,
        index: HotRowIndex | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(
                f"a cache of {slots} rows holds nothing; a row takes {row_bytes} bytes "
                "of device memory in each layer's cache. Give more, or hot_rows=None"
            )
        device = device or next(iter(jnp.zeros(()).devices()))
        _check_memory(device, slots if index is None else index.slots, row_bytes)
        self.index = HotRowIndex(slots) if index is None else index
        self.row_bytes = row_bytes
        shape = (self.index.slots, row_bytes)
        with jax.default_device(device):
            self._rows: UInt8[Array, "S P"] = jnp.zeros(shape, jnp.uint8)
        self.admissions = 0
        self._scheduled: collections.deque[tuple[int, Any, Any]] = collections.deque()

    def rows_after(self, admissions: int) -> UInt8[Array, "S P"]:
        """Give the rows by slot, as a number of admissions leaves them.

        Arrays given before are donated, unless rows were admitted between.

        Args:
            admissions: `admissions` when a batch's rows were looked up in the index; no
                fewer than at the last call.
        """
        while self._scheduled and self._scheduled[0][0] <= admissions:
            _, slots, rows = self._scheduled[0]
            self._write(slots, rows)
            self._scheduled.popleft()
        return self._rows

    def admit(self, slots: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]) -> None:
        """Write rows into slots for the batches that are looked up from now on.

        The thread that asks the index calls this, and another may call `rows_after`.

        Args:
            slots: where each goes, int32 [n], as the index says from now on.
            rows: uint8 [n, D + D/32].
        """
        self._scheduled.append((self.admissions + 1, slots, rows))
        self.admissions += 1

    def fill(
        self,
        ids: npt.NDArray[Any],
        read_into: Any,
        counts: npt.NDArray[Any] | None = None,
    ) -> None:
        """Put rows in, the most frequent first, as far as there is room.

        Args:
            ids: rows of the table, distinct, in order of falling frequency.
            read_into: reads them: `read_into(ids, out)` of a table's storage.
            counts: how often each was seen; None counts each once.
        """
        placed, slots = self.index.fill(np.asarray(ids), counts)
        for start in range(0, len(placed), _FILL_ROWS):
            some = np.asarray(ids)[placed[start : start + _FILL_ROWS]]
            out = np.empty((len(some), self.row_bytes), np.uint8)
            read_into(some, out)
            self._write(slots[start : start + _FILL_ROWS], out)

    def _write(self, slots, rows) -> None:
        # Padded to a few sizes, so that few programs are compiled.
        room = 1 << max(0, math.ceil(math.log2(max(len(slots), 1))))
        missing = room - len(slots)
        slots = np.pad(slots, (0, missing), constant_values=self.index.slots)
        rows = np.pad(rows, ((0, missing), (0, 0)))
        self._rows = _put_rows(self._rows, slots.astype(np.int32), rows)


def _check_memory(device: Any, slots: int, row_bytes: int) -> None:
    """Refuse a cache that cannot fit, with the figures."""
    wanted = slots * row_bytes
    stats = device.memory_stats() or {}
    if device.platform == "cpu":
        free = available_host_memory()
    elif "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    else:
        return
    if wanted > free:
        raise MemoryError(
            f"a cache of {slots} rows of {row_bytes} bytes takes {wanted / 1e9:.3f} "
            f"GB, but {device} has {free / 1e9:.3f} GB free. Give hot_rows fewer bytes"
        )


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(
    cache: UInt8[Array, "S P"], slots: Int32[Array, " n"], rows: UInt8[Array, "n P"]
) -> UInt8[Array, "S P"]:
    return cache.at[slots].set(rows, mode="drop")


@dataclasses.dataclass
class LayerFetch:
    """Say what one layer's part of a batch reads from where.

    Attributes:
        ids: rows to read from the table, [T, C] or [U]; one outside reads as zeros.
        index: int32 [T, C], as of `StagedRows`; None reads every row where it is asked
            for.
        row_bytes: bytes of a packed row.
        hits: rows that tokens asked for and the cache has.
        duplicates: rows that tokens asked for and others had asked for already.
        admitted: rows that `admit` admitted.
    """

    ids: npt.NDArray[Any]
    index: npt.NDArray[np.int32] | None
    row_bytes: int
    hits: int = 0
    duplicates: int = 0
    admitted: int = 0
    _cache: HotRowCache | None = None
    _seen: Any = None
    _admissions: int = 0

    @functools.cached_property
    def rows_from_host(self) -> int:
        """Count the rows that are read from the table."""
        return int(np.count_nonzero(self.ids >= 0))

    @property
    def rows(self) -> int:
        """Count the rows that tokens asked for."""
        return self.rows_from_host + self.hits + self.duplicates

    @classmethod
    def of_distinct(
        cls,
        ids: npt.NDArray[Any],
        row_bytes: int,
        cache: HotRowCache | None,
        budget: "RowBudget",
    ) -> "LayerFetch":
        """Read each distinct row once, and none that the cache has."""
        flat = np.maximum(ids.reshape(-1), -1).astype(np.int32, copy=False)
        distinct, inverse, counts = np.unique(
            flat, return_inverse=True, return_counts=True
        )
        slots = np.full(len(distinct), -1, np.int32)
        if cache is not None:
            slots = cache.index.lookup(distinct)
        missing = np.flatnonzero(slots < 0)
        place = -1 - slots
        place[missing] = np.arange(len(missing), dtype=np.int32)
        wanted = np.full(budget.choose(len(missing), flat.size), -1, np.int32)
        wanted[: len(missing)] = distinct[missing]
        fetched = slots < 0
        return cls(
            wanted,
            place[inverse].reshape(ids.shape).astype(np.int32, copy=False),
            row_bytes,
            hits=int(counts[~fetched].sum()),
            duplicates=int((counts[fetched & (distinct >= 0)] - 1).sum()),
            _cache=cache,
            _seen=(distinct, counts, slots),
            _admissions=0 if cache is None else cache.admissions,
        )

    @property
    def cached(self) -> bool:
        """Tell whether there is a cache."""
        return self._cache is not None

    def cache_rows(self) -> UInt8[Array, "S P"] | None:
        """Give the cache's rows, as `index` refers to them; None without a cache.

        Of the batches, in the order in which they were looked up.
        """
        return self._cache and self._cache.rows_after(self._admissions)

    def cut(self, pieces: int) -> list[npt.NDArray[Any]]:
        """Cut the rows to read into pieces along the first axis.

        Each has half as many as the one before, so that little is left to be copied
        when the last is there.
        """
        count, parts = len(self.ids), 2**pieces - 1
        ends = [count * (parts - parts // 2**i) // parts for i in range(1, pieces)]
        return np.split(self.ids, ends) if ends else [self.ids]

    def shapes(self, layer: int, pieces: int) -> dict[str, Any]:
        """Give the arrays that are staged for it, by name, without their contents."""
        staged = {
            f"rows{layer}.{piece}": jax.ShapeDtypeStruct(
                (*ids.shape, self.row_bytes), np.uint8
            )
            for piece, ids in enumerate(self.cut(pieces))
        }
        if self.index is not None:
            staged[f"index{layer}"] = jax.ShapeDtypeStruct(self.index.shape, np.int32)
        return staged

    def admit(self, rows: npt.NDArray[np.uint8]) -> None:
        """Count this batch's rows, and admit some of those that were read.

        Args:
            rows: what was read, in the order of `ids`; it may be written over later.
        """
        if self._cache is None:
            return
        distinct, counts, slots = self._seen
        chosen, where = self._cache.index.update(distinct, counts, slots)
        self.admitted = len(chosen)
        if self.admitted:
            place = np.cumsum(slots < 0) - 1  # of a missing row among those read
            self._cache.admit(where, rows[place[chosen]])


class RowBudget:
    """Round the number of fetched rows up, so that few programs are compiled.

    The largest need of the last 16 batches, in steps of 1/32 of the rows that tokens
    ask for.
    """

    def __init__(self) -> None:
        self._recent: dict[int, collections.deque[int]] = {}

    def choose(self, needed: int, total: int) -> int:
        """Give the rows to stage.

        Args:
            needed: how many are needed.
            total: how many tokens ask for.

        Returns:
            A number of rows, at least `needed`.
        """
        step = max(1, total // _BUDGET_STEPS)
        recent = self._recent.setdefault(
            total, collections.deque(maxlen=_BUDGET_MEMORY)
        )
        recent.append(max(1, -(-needed // step)) * step)
        return max(recent)

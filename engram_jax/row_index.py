"""Which rows are frequent: the index of a cache."""

import math

import numpy as np
import numpy.typing as npt

_WAYS = 16
_EMPTY = -2
_GOLDEN = 0x9E3779B1
_OTHER = 0x85EBCA6B
_MOST_COUNTED = np.iinfo(np.uint16).max


class HotRowIndex:
    """Decide which rows a cache holds: sets of 16 slots, admission by frequency.

    An id has one set, by its hash, and may lie in any of the set's slots. Frequencies
    of rows that are not in the cache are kept in a sketch (one counter for several
    ids), and all are halved from time to time, so that what was frequent long ago
    makes room.

    Attributes:
        slots: rows that the cache holds: the number asked for, rounded down to sets.

    Args:
        slots: rows that the cache shall hold, at least 1.
        min_count: a row is admitted from this number of times seen on.
        most_admitted: rows admitted per batch at most.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(
        self, slots: int, *, min_count: int = 2, most_admitted: int = 4096
    ) -> None:
        for name, number in (
            ("slots", slots),
            ("min_count", min_count),
            ("most_admitted", most_admitted),
        ):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        ways = min(_WAYS, slots)
        self._sets = slots // ways
        self.slots = self._sets * ways
        self._min_count = min_count
        self._most_admitted = most_admitted
        self._tags = np.full((self._sets, ways), _EMPTY, np.int32)
        self._counts = np.zeros((self._sets, ways), np.uint16)
        self._sketch_bits = max(10, math.ceil(math.log2(4 * self.slots)))
        self._sketch = np.zeros(1 << self._sketch_bits, np.uint16)
        self._seen = 0

    def lookup(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Find the slots of rows.

        Args:
            ids: int32 [n].

        Returns:
            int32 [n], -1 for a row that the cache does not have.
        """
        place = self._set(ids)
        match = self._tags[place] == ids[:, None]
        way = match.argmax(1)
        slot = place * self._tags.shape[1] + way
        return np.where(match[np.arange(len(ids)), way], slot, -1).astype(np.int32)

    def fill(
        self,
        ids: npt.NDArray[np.integer],
        counts: npt.NDArray[np.integer] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Give rows the free slots of their sets, first come first served.

        Args:
            ids: distinct rows, the most frequent first.
            counts: how often each was seen; None counts each once.

        Returns:
            Which of `ids` found room, and their slots.
        """
        narrow = ids.astype(np.int32)
        place = self._set(narrow)
        ways = self._tags.shape[1]
        used = (self._tags != _EMPTY).sum(1)
        # The rank of each id among those of its set.
        order = np.argsort(place, kind="stable")
        start = np.searchsorted(place[order], np.arange(self._sets))
        rank = np.empty(len(ids), np.int64)
        rank[order] = np.arange(len(ids)) - start[place[order]]
        way = rank + used[place]
        room = np.flatnonzero((way < ways) & (narrow >= 0))
        self._tags[place[room], way[room]] = narrow[room]
        known = np.ones(len(ids), np.int64) if counts is None else np.asarray(counts)
        self._counts[place[room], way[room]] = np.minimum(known[room], _MOST_COUNTED)
        return room, (place[room] * ways + way[room]).astype(np.int32)

    def update(
        self,
        ids: npt.NDArray[np.int32],
        counts: npt.NDArray[np.integer],
        slots: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Count a batch's rows, and admit some of those that the cache did not have.

        Args:
            ids: distinct rows.
            counts: how often the batch has each.
            slots: what `lookup` gave for them.

        Returns:
            Which of `ids` are admitted, and the slots that they get; what was there is
            forgotten.
        """
        self._age(int(counts.sum()))
        hit = slots >= 0
        known = self._counts.reshape(-1)
        known[slots[hit]] = _add(known[slots[hit]], counts[hit])
        missing = np.flatnonzero(~hit & (ids >= 0))
        cell = _hash(ids[missing], _OTHER) >> np.uint32(32 - self._sketch_bits)
        seen = _add(self._sketch[cell], counts[missing])
        self._sketch[cell] = seen
        place = self._set(ids[missing])
        way = self._counts[place].argmin(1)
        better = np.flatnonzero(
            (seen >= self._min_count) & (seen > self._counts[place, way])
        )
        # The most frequent first, and one in each set.
        better = better[np.argsort(-seen[better].astype(np.int64), kind="stable")]
        _, first = np.unique(place[better], return_index=True)
        chosen = better[np.sort(first)][: self._most_admitted]
        place, way = place[chosen], way[chosen]
        self._tags[place, way] = ids[missing[chosen]]
        self._counts[place, way] = seen[chosen]
        slots = (place * self._tags.shape[1] + way).astype(np.int32)
        return missing[chosen], slots

    def _set(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        mixed = _hash(ids, _GOLDEN).astype(np.uint64)
        return (mixed * np.uint64(self._sets) >> np.uint64(32)).astype(np.int64)

    def _age(self, rows: int) -> None:
        self._seen += rows
        if self._seen > 16 * self.slots + (1 << 20):
            self._seen = 0
            self._counts >>= 1
            self._sketch >>= 1


def _hash(ids: npt.NDArray[np.int32], multiplier: int) -> npt.NDArray[np.uint32]:
    """Spread ids over 32 bits; the upper ones depend on all of an id's."""
    return ids.view(np.uint32) * np.uint32(multiplier)


def _add(
    known: npt.NDArray[np.uint16], more: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint16]:
    return np.minimum(known.astype(np.int64) + more, _MOST_COUNTED).astype(np.uint16)

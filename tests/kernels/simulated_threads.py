"""Runs the per-thread code of the Mosaic GPU kernels on a CPU.

The kernels' inline code is written against `Word`, `Predicate` and the memory functions
of `mosaic_pallas`. Here are twins of these that hold one NumPy element per thread.
`simulate` puts them in place of the real ones in a kernel's module. Memory is a set of
named buffers: a read or write outside its buffer, or of a misaligned address, fails the
test, and so does a read of what the kernel has written itself.

All threads of a call advance together, statement by statement. That finds wrong
arithmetic and wrong addresses; races it cannot find.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engram_jax.kernels import mosaic_pallas

_BUFFER_BITS = 44  # an address is the buffer's number above, the offset below


class Predicate(mosaic_pallas.Predicate):
    """One truth value per thread."""

    def __init__(self, value):
        self.value: Any = np.asarray(value, bool)

    def __and__(self, other):
        return Predicate(self.value & other.value)

    def __or__(self, other):
        return Predicate(self.value | other.value)

    def __invert__(self):
        return Predicate(~self.value)

    def select(self, yes, no):
        kind: Any = yes if isinstance(yes, Word) else no
        return kind._new(np.where(self.value, kind._other(yes), kind._other(no)))


class Word(mosaic_pallas.Word):
    """One unsigned number per thread, 32 or 64 bits wide, that wraps around."""

    def __init__(self, value: Any, bits: int = 32):
        self.width = bits
        self.value: Any = np.asarray(value).astype(self.dtype)

    @classmethod
    def of(cls, number: int, bits: int = 32):
        return cls(np.array(number % (1 << bits), np.uint64), bits)

    @property
    def bits(self) -> int:
        return self.width

    @property
    def dtype(self):
        return np.uint64 if self.bits == 64 else np.uint32

    @property
    def signed(self):
        return self.value.astype(self.dtype).view(
            np.dtype(self.dtype).str.replace("u", "i")
        )

    def _new(self, value):
        return Word(value, self.bits)

    def _other(self, other: Any) -> Any:
        if isinstance(other, Word):
            assert other.bits == self.bits, "registers of different width"
            return other.value
        return Word.of(other, self.bits).value

    def __add__(self, other):
        return self._new(self.value + self._other(other))

    def __sub__(self, other):
        return self._new(self.value - self._other(other))

    def __mul__(self, other):
        return self._new(self.value * self._other(other))

    def __floordiv__(self, other):
        return self._new(self.value // self._other(other))

    def __mod__(self, other):
        return self._new(self.value % self._other(other))

    def __and__(self, other):
        return self._new(self.value & self._other(other))

    def __or__(self, other):
        return self._new(self.value | self._other(other))

    def __xor__(self, other):
        return self._new(self.value ^ self._other(other))

    def __lshift__(self, other):
        return self._new(self.value << self._other(other))

    def __rshift__(self, other):
        return self._new(self.value >> self._other(other))

    def minimum(self, other):
        return self._new(np.minimum(self.value, self._other(other)))

    def mul_high(self, other):
        product = self.value.astype(object) * self._other(other).astype(object)
        return self._new(np.asarray(product >> self.bits))

    def widen(self):
        return Word(self.value, 64)

    def low(self):
        return Word(self.value & np.uint64(0xFFFFFFFF))

    def permute_bytes(self, other, selector):
        pair = Word(other.value, 64) << 32 | Word(self.value, 64)
        picked = Word.of(0)
        for place in range(4):
            byte = pair >> 8 * (selector >> 4 * place & 7) & 255
            picked = picked | byte.low() << 8 * place
        return picked

    def _halves(self):
        """The two bfloat16 of each word, in float32."""
        value = np.ascontiguousarray(np.atleast_1d(self.value))
        halves = value.view(ml_dtypes.bfloat16).reshape(*value.shape, 2)
        return halves.astype(np.float32)

    @staticmethod
    def _from_halves(halves):
        rounded = np.ascontiguousarray(halves.astype(ml_dtypes.bfloat16))
        return Word(rounded.view(np.uint32)[..., 0])

    def bf16x2_mul(self, other):
        with np.errstate(over="ignore", invalid="ignore"):
            other = Word(self._other(other))
            return self._from_halves(self._halves() * other._halves())

    def bf16x2_fma(self, factor, term):
        factor, term = Word(self._other(factor)), Word(self._other(term))
        with np.errstate(over="ignore", invalid="ignore"):
            return self._from_halves(self._halves() * factor._halves() + term._halves())

    def compare(self, relation, other):
        other = self._new(self._other(other))
        function = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
        }[relation[-2:]]
        if relation[0] == "s":
            return Predicate(function(self.signed, other.signed))
        return Predicate(function(self.value, other.value))


class Memory:
    """Named buffers, and the functions of `mosaic_pallas` that touch memory.

    Args:
      inputs: arrays that the kernel may read.
      outputs: arrays that it may write.
      threads: how many threads there are; `thread_index` counts them.
    """

    def __init__(self, inputs, outputs, threads: int = 128):
        self.threads = threads
        self.names = [*inputs, *outputs]
        self.bytes = [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for array in (*inputs.values(), *outputs.values())
        ]
        self.written = set(range(len(inputs), len(self.names)))
        self.touched = dict.fromkeys(self.names, 0)
        self.shared = {}

    def functions(self):
        return {
            "Word": Word,
            "Predicate": Predicate,
            "thread_index": lambda: Word(np.arange(self.threads)),
            "address": self.address,
            "load": self.load,
            "store": self.store,
            "read_shared": self.read_shared,
            "write_shared": self.write_shared,
            "wait_for_threads": lambda: None,
        }

    def address(self, name):
        return Word.of(self.names.index(name) << _BUFFER_BITS, 64)

    def _places(self, where, size, only_if, *, write):
        active = np.ones(self.threads, bool) if only_if is None else only_if.value
        active = np.broadcast_to(active, (self.threads,))
        address = np.broadcast_to(where.value, (self.threads,))[active].astype(np.int64)
        buffers, offsets = address >> _BUFFER_BITS, address & ((1 << _BUFFER_BITS) - 1)
        assert not (offsets % size).any(), "misaligned access"
        for number in np.unique(buffers):
            name, chosen = self.names[number], offsets[buffers == number]
            assert (number in self.written) == write, f"{name}: read or written wrongly"
            assert chosen.max() + size <= len(self.bytes[number]), f"outside {name}"
            self.touched[name] += len(chosen)
        return active, buffers, offsets

    def load(self, where, count=1, *, width=32, only_if=None):
        size = width // 8
        active, buffers, offsets = self._places(
            where, size * count, only_if, write=False
        )
        out = np.zeros((count, self.threads), np.uint64)
        for number in np.unique(buffers):
            mine = buffers == number
            at = offsets[mine, None] + np.arange(size * count)
            raw = self.bytes[number][at].reshape(-1, count, size).astype(np.uint64)
            value = (raw << (8 * np.arange(size, dtype=np.uint64))).sum(-1, np.uint64)
            out[:, np.flatnonzero(active)[mine]] = value.T
        return [Word(row, max(width, 32)) for row in out]

    def store(self, where, words, *, width=32, only_if=None):
        size = width // 8
        active, buffers, offsets = self._places(
            where, size * len(words), only_if, write=True
        )
        for place, word in enumerate(words):
            value = np.broadcast_to(word.value, (self.threads,))[active]
            for byte in range(size):
                for number in np.unique(buffers):
                    mine = buffers == number
                    at = offsets[mine] + place * size + byte
                    shift = np.array(8 * byte, value.dtype)
                    self.bytes[number][at] = (value[mine] >> shift) & 255

    def read_shared(self, name, index):
        return Word(np.array(self.shared[name])[index.value])

    def write_shared(self, name, index, word):
        shape = (self.threads,)
        index = np.broadcast_to(index.value, shape)
        self.shared[name][index] = np.broadcast_to(word.value, shape)


def simulate(monkeypatch, memory: Memory, *modules) -> None:
    """Lets the inline code of kernels' modules run on `memory`."""
    for module in modules:
        for name, function in memory.functions().items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)

"""Bit arithmetic and per-thread pieces that the Mosaic GPU kernels share.

Pallas' own operations move whole tiles; they have no per-thread gather, no access to
the bytes of a word and no conversion from e4m3 to bfloat16 that keeps up with memory
(the compiler's goes through float16 and float32, one element at a time). Kernels that
need those write that part as inline Mosaic code, with the pieces below.

The arithmetic (`e4m3_pairs` to `decode_e4m3`, `remainder`) is written against the
operators of `Word` alone. The tests run the same functions on a NumPy twin of `Word`
over all 65,536 pairs of value and scale byte, without a GPU.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

WARPGROUP = 128  # threads that run one inline Mosaic function
BF16_2_POW_120 = 0x7B807B80  # the bfloat16 2**120, in both halves of a word


class Word:
    """One 32-bit or 64-bit register of a thread, as an unsigned number.

    It takes Python's operators, each one machine instruction or two, and wraps
    around. A number on the right-hand side becomes a constant of the same width.
    """

    def __init__(self, value: ir.Value):
        self.value = value

    @classmethod
    def of(cls, number: int, bits: int = 32) -> "Word":
        """Make a constant."""
        number %= 1 << bits
        number -= (number >> (bits - 1)) << bits  # MLIR wants it signed
        return cls(arith.constant(ir.IntegerType.get_signless(bits), number))

    @property
    def bits(self) -> int:
        """Give the width: 32 or 64."""
        return ir.IntegerType(self.value.type).width

    def _other(self, other: "Word | int") -> ir.Value:
        word = other if isinstance(other, Word) else type(self).of(other, self.bits)
        return word.value

    def __add__(self, other: "Word | int") -> "Word":
        return type(self)(arith.addi(self.value, self._other(other)))

    def __sub__(self, other: "Word | int") -> "Word":
        return type(self)(arith.subi(self.value, self._other(other)))

    def __mul__(self, other: "Word | int") -> "Word":
        return type(self)(arith.muli(self.value, self._other(other)))

    def __floordiv__(self, other: "Word | int") -> "Word":
        return type(self)(arith.divui(self.value, self._other(other)))

    def __mod__(self, other: "Word | int") -> "Word":
        return type(self)(arith.remui(self.value, self._other(other)))

    def __and__(self, other: "Word | int") -> "Word":
        return type(self)(arith.andi(self.value, self._other(other)))

    def __or__(self, other: "Word | int") -> "Word":
        return type(self)(arith.ori(self.value, self._other(other)))

    def __xor__(self, other: "Word | int") -> "Word":
        return type(self)(arith.xori(self.value, self._other(other)))

    def __lshift__(self, other: int) -> "Word":
        return type(self)(arith.shli(self.value, self._other(other)))

    def __rshift__(self, other: int) -> "Word":
        return type(self)(arith.shrui(self.value, self._other(other)))

    def minimum(self, other: "Word | int") -> "Word":
        """Give the smaller of two unsigned numbers."""
        return type(self)(arith.minui(self.value, self._other(other)))

    def mul_high(self, other: "Word | int") -> "Word":
        """Give the upper half of the double-width product."""
        return type(self)(arith.mului_extended(self.value, self._other(other))[1])

    def widen(self) -> "Word":
        """Give the same number in 64 bits."""
        return type(self)(arith.extui(ir.IntegerType.get_signless(64), self.value))

    def low(self) -> "Word":
        """Give the lower 32 bits."""
        return type(self)(arith.trunci(ir.IntegerType.get_signless(32), self.value))

    def permute_bytes(self, other: "Word", selector: int) -> "Word":
        """Pick four bytes of `self` (0 to 3) and `other` (4 to 7), lowest first."""
        i32 = ir.IntegerType.get_signless(32)
        ptx = f"prmt.b32 $0, $1, $2, 0x{selector:04x};"
        return type(self)(
            mgpu_utils.inline_ptx(ptx, self.value, other.value, result_types=i32)
        )

    # PTX spells out what must not change: round to nearest, subnormals kept.
    def bf16x2_mul(self, other: "Word | int") -> "Word":
        """Multiply two pairs of bfloat16."""
        i32 = ir.IntegerType.get_signless(32)
        ptx = "mul.rn.bf16x2 $0, $1, $2;"
        args = (self.value, self._other(other))
        return type(self)(mgpu_utils.inline_ptx(ptx, *args, result_types=i32))

    def bf16x2_fma(self, factor: "Word | int", term: "Word | int") -> "Word":
        """Multiply pairs of bfloat16 and add a third, rounding once."""
        i32 = ir.IntegerType.get_signless(32)
        ptx = "fma.rn.bf16x2 $0, $1, $2, $3;"
        args = (self.value, self._other(factor), self._other(term))
        return type(self)(mgpu_utils.inline_ptx(ptx, *args, result_types=i32))

    def compare(self, relation: str, other: "Word | int") -> "Predicate":
        """Compare by one of MLIR's relations: eq, ne, ult, ule, uge, slt, sge, .."""
        predicate = getattr(arith.CmpIPredicate, relation)
        return Predicate(arith.cmpi(predicate, self.value, self._other(other)))


class Predicate:
    """One truth value of a thread."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __and__(self, other: "Predicate") -> "Predicate":
        return Predicate(arith.andi(self.value, other.value))

    def __or__(self, other: "Predicate") -> "Predicate":
        return Predicate(arith.ori(self.value, other.value))

    def __invert__(self) -> "Predicate":
        true = arith.constant(ir.IntegerType.get_signless(1), 1)
        return Predicate(arith.xori(self.value, true))

    def select(self, yes: "Word | int", no: "Word | int") -> Word:
        """Give `yes` where true, else `no`; at most one of them may be a number."""
        kind = yes if isinstance(yes, Word) else no
        assert isinstance(kind, Word)
        return Word(arith.select(self.value, kind._other(yes), kind._other(no)))


def pick(index: Word, values: Sequence[Word]) -> Word:
    """Give ``values[index]`` by comparing with each number: for a few values."""
    picked = values[0]
    for number, value in enumerate(values[1:], start=1):
        picked = index.compare("eq", number).select(value, picked)
    return picked


# ---- numbers -------------------------------------------------------------------------


def e4m3_pairs(word: Any) -> tuple[Any, Any]:
    """Turn bytes 0, 2 and bytes 1, 3 of a word into two bfloat16 pairs.

    ``pair = value * 2**-120``, exact, subnormals included: e4m3's exponent field is
    moved into bfloat16's, whose bias is 120 larger. The NaN codes come out as
    +-480 * 2**-120; `restore_nan` or a caller that has no NaN takes it from there.
    """
    magnitude, sign = 0x07F007F0, 0x80008000
    even = ((word << 4) & magnitude) | ((word << 8) & sign)
    odd = ((word >> 4) & magnitude) | (word & sign)
    return even, odd


def e4m3_pairs_in_order(word: Any) -> tuple[Any, Any]:
    """Do as `e4m3_pairs` for bytes 0, 1 and bytes 2, 3: the order of memory."""
    pairs = []
    for selector in (0x1404, 0x3424):  # byte 4 is a zero
        spread = word.permute_bytes(word ^ word, selector)
        pairs.append(((spread >> 4) & 0x07F007F0) | (spread & 0x80008000))
    return pairs[0], pairs[1]


def restore_nan(pair: Any) -> Any:
    """Turn +-480 in a bfloat16 pair into NaN and leave all e4m3 numbers as they are.

    ``pair * 1.125 * 2**119`` is infinite for 480 and finite up to 448, the largest
    e4m3 number. Times zero that gives NaN, or a zero of the number's sign, which
    changes nothing when added, not even -0.
    """
    return pair.bf16x2_mul(0x7B107B10).bf16x2_fma(0, pair)


def e8m0_pair(byte: Any) -> Any:
    """Turn an E8M0 byte (0..255 in a word) into ``2**(byte - 127)`` as a bfloat16 pair.

    Byte 0 is the subnormal 2**-127 and byte 255 NaN: both need the bit below the
    exponent field, and no other byte has it.
    """
    edge = (((byte + 1) & 0xFF) - 2) >> 31  # 1 for bytes 255 and 0
    half = (byte << 7) | (edge << 6)
    return half | (half << 16)


def decode_e4m3(word: Any, scale: Any, *, in_order: bool = True) -> tuple[Any, Any]:
    """Turn four e4m3 values and their scale pair into two bfloat16 pairs.

    ``value * scale``, rounded once, NaN codes and NaN scales as NaN. Two products,
    because 2**120 times the scale need not be a bfloat16 number.

    Args:
      word: Four e4m3 bytes.
      scale: What `e8m0_pair` gave.
      in_order: Pairs are bytes (0, 1), (2, 3); otherwise (0, 2), (1, 3), one
        instruction a pair cheaper.
    """
    split = e4m3_pairs_in_order if in_order else e4m3_pairs
    first, second = (
        restore_nan(pair.bf16x2_mul(BF16_2_POW_120)).bf16x2_mul(scale)
        for pair in split(word)
    )
    return first, second


def reciprocal(divisor: int) -> int:
    """Give the 64-bit factor with which `remainder` divides."""
    return min((1 << 64) // divisor, (1 << 64) - 1)


def remainder(number: Any, factor: Any, divisor: Any) -> Any:
    """Give ``number % divisor`` in 32 bits, for number < 2**63 and divisor < 2**31.

    The upper half of ``number * factor`` is the quotient or one less: factor is short
    of 2**64 / divisor by less than 1, so the product is short by less than
    number / 2**64 < 1/2. Hence the remainder is below 2 * divisor < 2**32, needs 32
    bits only, and the smaller of it and itself less divisor (which wraps around if
    negative) is right.
    """
    rest = number.low() - number.mul_high(factor).low() * divisor
    return rest.minimum(rest - divisor)


# ---- memory --------------------------------------------------------------------------


def thread_index() -> Word:
    """Give this thread's number in its warpgroup, 0 to 127."""
    return Word(mgpu_utils.thread_idx()) % WARPGROUP


def address(ref: ir.Value) -> Word:
    """Give the address of a reference's first element, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    return Word(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref)))


def load(
    where: Word, count: int = 1, *, width: int = 32, only_if: Predicate | None = None
) -> list[Word]:
    """Read memory that nothing writes while the kernel runs.

    Args:
      where: Address, aligned to the whole access.
      count: How many consecutive elements: 1, 2 or 4, at most 16 bytes together.
      width: Bits of an element: 8, 16, 32 or 64.
      only_if: Where false, no memory is touched and zeros come back.

    Returns:
      Words of 32 bits (or 64, if that is the width), zero extended.
    """
    kind = ir.IntegerType.get_signless(max(width, 32))
    results = ", ".join(f"${i}" for i in range(count))
    vector, results = (f".v{count}", f"{{{results}}}") if count > 1 else ("", results)
    ptx = f"ld.global.nc{vector}.{'u' if width < 32 else 'b'}{width} {results}, "
    args = [where.value]
    if only_if is None:
        ptx += f"[${count}];"
    else:
        zeros = " ".join(f"mov.b{max(width, 32)} ${i}, 0;" for i in range(count))
        # The outputs are written before the address is read: "=&", as LLVM says it.
        ptx = f"{{ {zeros} @${count + 1} {ptx}[${count}]; }}"
        args.append(only_if.value)
    out = "=&" if only_if is not None else "="
    letter = "l" if width == 64 else "r"
    constraints = ",".join([out + letter] * count + ["l", "b"][: len(args)])
    struct = llvm.StructType.get_literal([kind] * count) if count > 1 else kind
    result = llvm.inline_asm(struct, args, ptx, constraints, has_side_effects=False)
    if count == 1:
        return [Word(result)]
    return [Word(llvm.extractvalue(kind, result, [i])) for i in range(count)]


def store(
    where: Word,
    words: Sequence[Word],
    *,
    width: int = 32,
    only_if: Predicate | None = None,
) -> None:
    """Write 1, 2 or 4 words (their lower `width` bits) to an aligned address."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
    mgpu_utils.inline_ptx(
        f"st.global{vector}.b{width} [$0], {names};",
        where.value,
        *(word.value for word in words),
        predicate=None if only_if is None else only_if.value,
    )


def read_shared(ref: ir.Value, index: Word) -> Word:
    """Read one element of a 1-D reference to shared memory."""
    at = arith.index_cast(ir.IndexType.get(), index.value)
    return Word(memref.load(ref, [at]))


def write_shared(ref: ir.Value, index: Word, word: Word) -> None:
    """Write one element of a 1-D reference to shared memory."""
    at = arith.index_cast(ir.IndexType.get(), index.value)
    memref.store(word.value, ref, [at])


def wait_for_threads() -> None:
    """Wait until every thread of the warpgroup is here and its writes are visible."""
    mgpu_utils.warpgroup_barrier()

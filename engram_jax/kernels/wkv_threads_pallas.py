"""The per-thread pieces of the FP8 projection's kernel, as inline Mosaic code.

Each function here makes one piece for given sizes; `wkv_interpret_pallas` has the same
functions in operations that the interpreter can run.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector

from .mosaic_pallas import Word, thread_index
from .wkv_fragments_pallas import exceeds_folded, piece_at, scale_at, scaled_pairs

SLAB = 64  # rows of the weight per warpgroup: the M of the instruction
TILE = 128  # columns, and bytes, of a swizzled tile of the weight
# Tiles of 8 rows by 128 bytes, swizzled so that neither the threads' 16-byte reads nor
# the tensor cores' meet in a bank.
_SWIZZLE: Any = plgpu.SwizzleTransform  # abstract only to a type checker
_TILING: Any = plgpu.TilingTransform
WEIGHT_TILE = (_TILING((8, TILE)), _SWIZZLE(128))
TOKEN_TILE = (_TILING((8, 64)), _SWIZZLE(128))
_SPLAT = plgpu.Layout.WG_SPLAT


def staging(warpgroups: int, columns: int) -> list:
    """Say what shared memory `multiply` needs: none."""
    del warpgroups, columns
    return []


def multiply(sums, values, rows) -> None:
    """Start adding decoded values [64, columns] times rows [T, columns] to the sums."""
    plgpu.wgmma(sums, values, rows.transpose((1, 0)))


def copy_where(predicate, source, target, barrier) -> None:
    """Start a copy to shared memory, or arrive at its barrier without one."""
    plgpu.copy_gmem_to_smem(source, target, barrier, predicate=predicate)


def _index(number: Word | int) -> ir.Value:
    if isinstance(number, int):
        return arith.constant(ir.IndexType.get(), number)
    return arith.index_cast(ir.IndexType.get(), number.value)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _lanes() -> tuple[Word, Word, Word]:
    """Give a thread's warp, and its place there: row of 8, quarter of 64 columns."""
    thread = thread_index()
    return thread // 32, thread % 32 // 4, thread % 4


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(WEIGHT_TILE),))
def fill_with_ones(ctx, tile):
    """Write e4m3 ones to shared memory [8, 128]; all are alike, so any order does."""
    del ctx
    thread = thread_index()
    two, eight = ((2,), _i32()), ((8,), ir.MemRefType(tile.type).element_type)
    word = Word.of(0x38383838).value
    ones = vector.from_elements(ir.VectorType.get(*two), [word, word])
    ones = vector.bitcast(ir.VectorType.get(*eight), ones)
    at = (0, 0, thread // 16, thread % 16 * 8)
    vector.store(ones, tile, [_index(i) for i in at])


def make_finds_large_scale(row_bytes: int) -> Callable[..., Any]:
    """Make (scales [2, row_bytes]) -> nonzero if one of them exceeds 134."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SPLAT),
    )
    def finds_large_scale(ctx, scales):
        del ctx
        lane = thread_index() % 32
        four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
        found = Word.of(0)
        # Every warp reads all of them, so that no warp has to ask another.
        for row in range(2):
            for start in range(0, row_bytes // 4, 32):
                at = (lane + start).minimum(row_bytes // 4 - 1) * 4
                word = vector.load(four, scales, [_index(row), _index(at)])
                word = Word(mgpu_utils.bitcast(word, _i32()))
                found = found | exceeds_folded(word)
        # A vote, since the compiler must know that all threads take the same branch.
        everybody = arith.constant(_i32(), -1)
        any_found = nvvm.vote_sync(everybody, found.compare("ne", 0).value, "any")
        any_found = arith.extui(_i32(), any_found)
        return mgpu.FragmentedArray.splat(any_found, (), is_signed=True)

    return finds_large_scale


def make_decode(first: int, columns: int, any_scale: bool) -> Callable[..., Any]:
    """Make (slab, scales, block) -> bfloat16 [64, columns] in registers.

    Args:
      first: Where in the slab's columns to begin, in parts of 64.
      columns: How many to decode.
      any_scale: Whether scales may be any byte; else they are at most 134.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(WEIGHT_TILE), plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct(
            (SLAB, columns), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def decode(ctx, slab, scales, block):
        del ctx
        warp, row, quarter = _lanes()
        f8 = ir.MemRefType(slab.type).element_type
        sixteen, four = ir.VectorType.get((16,), f8), ir.VectorType.get((4,), _i32())
        words = {}
        for part in range(columns // 64):
            for upper in range(2):
                at = piece_at(warp, row, quarter, first + part, upper)
                loaded = vector.load(sixteen, slab, [_index(i) for i in at])
                words[part, upper] = vector.bitcast(four, loaded)
        scale_bytes = []
        for part in range(columns // 64):
            scale_row, scale_column = scale_at(warp, quarter, part)
            scale_column = scale_column + Word(block.registers.item())
            at = [_index(scale_row), _index(scale_column)]
            scale_bytes.append(Word(arith.extui(_i32(), memref.load(scales, at))))

        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((SLAB, columns)), dtype=object)
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        for (part, upper), loaded in words.items():
            for i in range(4):
                word = Word(vector.extract(loaded, [], [i]))
                pairs = scaled_pairs(word, scale_bytes[part], any_scale=any_scale)
                for parity, pair in enumerate(pairs):
                    at = (0, 8 * part + 2 * i + parity, 0, 0, upper, 0, 0, 0, 0)
                    registers[at] = mgpu_utils.bitcast(pair.value, two)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )

    return decode


def make_store(tokens: int, out_width: int, tile_tokens: int) -> Callable[..., Any]:
    """Make (sums [64, tokens], nans [64, 8], out, first_row, first_token) -> ()."""
    sums_layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(sums_layout, sums_layout, plgpu.RefType(), _SPLAT, _SPLAT)
    )
    def store(ctx, sums, nans, out, first_row, first_token):
        del ctx
        warp, row, quarter = _lanes()
        first_row = Word(first_row.registers.item()) + warp * 16 + row
        first_token = Word(first_token.registers.item()) + quarter * 2
        for upper in range(2):
            nan = vector.extract(nans.registers[0, 0, 0, 0, upper, 0, 0, 0, 0], [], [0])
            is_nan = arith.cmpf(arith.CmpFPredicate.UNO, nan, nan)
            out_column = first_row + 8 * upper
            column_exists = out_column.compare("ult", out_width)
            for j in range(tile_tokens // 8):
                pair = sums.registers[0, j, 0, 0, upper, 0, 0, 0, 0]
                for i in range(2):
                    token = first_token + (8 * j + i)
                    value = vector.extract(pair, [], [i])
                    value = arith.select(is_nan, nan, value)
                    exists = column_exists & token.compare("ult", tokens)
                    with mgpu_utils.when(exists.value):
                        value = arith.truncf(ir.BF16Type.get(), value)
                        memref.store(value, out, [_index(token), _index(out_column)])

    return store

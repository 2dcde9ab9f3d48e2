"""The FP8 projection as a Mosaic GPU kernel: small T at the speed of memory.

``out[T, N] = rows[T, K] @ (weight[N, K] * 2**(scale - 127)).T``. At small T its time is
that of reading `weight` once, so everything else has to hide behind that read:

1. A warpgroup owns 64 rows of the weight, a slab. Slabs are dealt out evenly, all at
   once, over one CTA per multiprocessor: with a second wave the last would run alone.
   The warpgroups of a CTA share the rows of the tokens, which come from the L2 cache.
   One more warpgroup keeps the copy engine (TMA) a few steps ahead of them.
2. Each thread takes 16 consecutive bytes of a weight row at a time, decodes them to
   bfloat16 with integer operations and one product for the scale, and the tensor cores
   multiply from there: A is the weight, in registers, B the rows of the tokens, in
   shared memory, so that T is the N of the instruction and pads to 8 only.
3. An instruction wants 2 + 2 values of A per thread and 16 columns. So the columns are
   permuted within each 64, for the weight by the way it is read, for the tokens by
   `permute_columns`, which a kernel that writes the rows can do for nothing.

Two rarities take next to no time from the rest. A scale above 2**7, or NaN, does not
fit the folded factor (`folded_scale`): a warpgroup that finds one among its scales
multiplies twice instead. NaN codes decode as +-480; an FP8 product of the raw bytes
with ones, which the tensor cores have time for, is NaN for just the rows that have one.

Why inline Mosaic code: `astype` goes e4m3 -> float16 -> float32 -> bfloat16 one element
at a time, 67 us at T = 16 on an H200 where this takes less than 45; Pallas has no bytes
of a word. The interpreter does not run such code; the arithmetic is tested apart.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector

from engram_jax import mxfp8

from . import block_sizes
from .mosaic_pallas import Word, thread_index
from .wkv_fragments_pallas import (
    exceeds_folded,
    permute_columns,
    piece_at,
    scale_at,
    scaled_pairs,
    unpermute_columns,
)

__all__ = [
    "permute_columns",
    "unpermute_columns",
    "unsupported_reason",
    "wkv_pallas",
    "wkv_permuted",
]

INTERPRET_REASON = "it decodes bytes per thread, which the interpreter cannot do"

_SLAB = 64  # rows of the weight per warpgroup: the M of the instruction
_TILE = 128  # columns, and bytes, of a swizzled tile of the weight
_SCALE_ALIGN = 16  # bytes of a row in memory: what the copy engine wants
_SMEM_ALIGN = 128  # and of a row in shared memory
_COPY_MAX = 256  # elements of one dimension in one copy
# Tiles of 8 rows by 128 bytes, swizzled so that neither the threads' 16-byte reads nor
# the tensor cores' meet in a bank.
_SWIZZLE: Any = plgpu.SwizzleTransform  # abstract only to a type checker
_TILING: Any = plgpu.TilingTransform
_WEIGHT_TILE = (_TILING((8, 128)), _SWIZZLE(128))
_TOKEN_TILE = (_TILING((8, 64)), _SWIZZLE(128))
_SPLAT = plgpu.Layout.WG_SPLAT
# Registers a thread can have once the copying warpgroup has given up most of its own.
_COPY_REGISTERS = 24
_REGISTERS = {1: 232, 2: 232, 3: 152, 4: 112}


def unsupported_reason(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, *, interpret: bool = False
) -> str | None:
    """Say why `wkv_pallas` cannot take these operands, or give None."""
    del rows, scale
    if interpret:
        return INTERPRET_REASON
    if weight.shape[0] % 8:
        return f"the weight has {weight.shape[0]} rows, not a multiple of 8"
    return None


# ---- per-thread code -----------------------------------------------------------------


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


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(_WEIGHT_TILE),))
def _fill_with_ones(ctx, tile):
    """Write e4m3 ones to shared memory [8, 128]; all are alike, so any order does."""
    del ctx
    thread = thread_index()
    two, eight = ((2,), _i32()), ((8,), ir.MemRefType(tile.type).element_type)
    word = Word.of(0x38383838).value
    ones = vector.from_elements(ir.VectorType.get(*two), [word, word])
    ones = vector.bitcast(ir.VectorType.get(*eight), ones)
    at = (0, 0, thread // 16, thread % 16 * 8)
    vector.store(ones, tile, [_index(i) for i in at])


def _make_finds_large_scale(row_bytes: int) -> Callable[..., Any]:
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


def _make_decode(first: int, columns: int, any_scale: bool) -> Callable[..., Any]:
    """Make (slab, scales, block) -> bfloat16 [64, columns] in registers.

    Args:
      first: Where in the slab's columns to begin, in parts of 64.
      columns: How many to decode.
      any_scale: Whether scales may be any byte; else they are at most 134.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_WEIGHT_TILE), plgpu.RefType(), _SPLAT),
        return_type=plgpu.ShapeDtypeStruct(
            (_SLAB, columns), jnp.bfloat16, layout=plgpu.Layout.WGMMA
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
        registers = np.empty(layout.registers_shape((_SLAB, columns)), dtype=object)
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


def _make_store(tokens: int, out_width: int, tile_tokens: int) -> Callable[..., Any]:
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


# ---- the kernel ----------------------------------------------------------------------


def _pad_columns(array: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % multiple)))


def _product(rows, weight, scale, tokens: int, sizes: block_sizes.WkvSizes):
    """Multiply permuted rows [T or more, K] by the weight; the module says how."""
    out_width = weight.shape[0]
    # What the copy engine wants: whole tiles. Both are, for any usual C and D.
    weight = _pad_columns(mxfp8.value_bytes(weight), _TILE)
    weight = lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
    scale = _pad_columns(scale, _SCALE_ALIGN)
    if rows.shape[0] > 8:
        rows = jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))
    columns, chunk, stages = sizes.columns, sizes.chunk, sizes.stages
    tile_tokens = sizes.tokens
    steps = -(-weight.shape[1] // columns)
    scale_width = -(-steps * columns // (32 * _SMEM_ALIGN)) * _SMEM_ALIGN

    slabs = -(-out_width // _SLAB)
    ctas = min(slabs, sizes.ctas or block_sizes.multiprocessors())
    per_cta, rest = divmod(slabs, ctas)  # the first `rest` CTAs have one more
    rounds = -(-(per_cta + (rest > 0)) // 4)
    warpgroups = -(-(per_cta + (rest > 0)) // rounds)
    # So many that a round's scales outlast the steps in flight.
    turns = min(rounds, -(-stages // steps) + 1)
    decoders = {
        any_scale: [
            _make_decode(start // 64, chunk, any_scale)
            for start in range(0, columns, chunk)
        ]
        for any_scale in (False, True)
    }
    store = _make_store(tokens, out_width, tile_tokens)
    finds_large_scale = _make_finds_large_scale(scale_width)

    def wkv(
        rows_ref, weight_ref, scale_ref, out_ref,
        weight_ring, rows_ring, ones, scales, filled, read, scaled, ones_filled,
    ):  # fmt: skip
        cta, wg = lax.axis_index("cta"), lax.axis_index("warpgroup")
        first_token = lax.axis_index("tokens") * tile_tokens
        first_slab = cta * per_cta + jnp.minimum(cta, rest)
        slabs_here = per_cta + (cta < rest).astype(jnp.int32)

        def copy_all():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

            @pl.loop(0, rounds)
            def _(r):
                # Rows, columns and tokens beyond the ends arrive as zeros.
                turn, round_slab = lax.rem(r, turns), first_slab + r * warpgroups
                for w, half, start in itertools.product(
                    range(warpgroups), range(2), range(0, scale_width, _COPY_MAX)
                ):
                    part = pl.ds(start, min(_COPY_MAX, scale_width - start))
                    plgpu.copy_gmem_to_smem(
                        scale_ref.at[(round_slab + w) * 2 + half, part],
                        scales.at[turn, w, half, part],
                        scaled.at[turn],
                    )

                @pl.loop(0, steps)
                def _(k):
                    i, at = r * steps + k, pl.ds(k * columns, columns)
                    slot = lax.rem(i, stages)
                    pl.when(i >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                    for w in range(warpgroups):
                        plgpu.copy_gmem_to_smem(
                            weight_ref.at[pl.ds((round_slab + w) * _SLAB, _SLAB), at],
                            weight_ring.at[slot, pl.ds(w * _SLAB, _SLAB)],
                            filled.at[slot],
                            predicate=r * warpgroups + w < slabs_here,
                        )
                    plgpu.copy_gmem_to_smem(
                        rows_ref.at[pl.ds(first_token, tile_tokens), at],
                        rows_ring.at[slot],
                        filled.at[slot],
                    )

        def multiply(r, any_scale):
            def all_steps(sums, nans):
                @pl.loop(0, steps)
                def _(k):
                    slot = lax.rem(r * steps + k, stages)
                    mine = pl.ds(wg * _SLAB, _SLAB)
                    plgpu.barrier_wait(filled.at[slot])
                    for start in range(0, columns, _TILE):
                        tile = weight_ring.at[slot, mine, pl.ds(start, _TILE)]
                        plgpu.wgmma(nans, tile, ones.transpose((1, 0)))
                    for i, decode in enumerate(decoders[any_scale]):
                        block = k * (columns // 32) + i * (chunk // 32)
                        slab, turn = weight_ring.at[slot, mine], lax.rem(r, turns)
                        values = decode(slab, scales.at[turn, wg], block)
                        part = rows_ring.at[slot, :, pl.ds(i * chunk, chunk)]
                        plgpu.wgmma(sums, values, part.transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(read.at[slot])

                return sums[...], nans[...]

            sums, nans = pl.run_scoped(
                all_steps,
                plgpu.WGMMAAccumulatorRef((_SLAB, tile_tokens), jnp.float32),
                plgpu.WGMMAAccumulatorRef((_SLAB, 8), jnp.float32),
            )
            first_row = (first_slab + r * warpgroups + wg) * _SLAB
            store(sums, nans, out_ref, first_row, first_token)

        def pass_by(r):
            """Let the others have the ring: no slab is left for this warpgroup."""

            @pl.loop(0, steps)
            def _(k):
                slot = lax.rem(r * steps + k, stages)
                plgpu.barrier_wait(filled.at[slot])
                plgpu.barrier_arrive(read.at[slot])

        def multiply_all():
            plgpu.set_max_registers(_REGISTERS[warpgroups], action="increase")

            @pl.when(wg == 0)
            def _():
                _fill_with_ones(ones)  # pyright: ignore[reportCallIssue]
                plgpu.commit_smem()  # the tensor cores read it next
                plgpu.barrier_arrive(ones_filled)

            plgpu.barrier_wait(ones_filled)

            @pl.loop(0, rounds)
            def _(r):
                turn = lax.rem(r, turns)
                plgpu.barrier_wait(scaled.at[turn])
                exists = r * warpgroups + wg < slabs_here
                is_large = finds_large_scale(scales.at[turn, wg]) != 0
                pl.when(exists & ~is_large)(functools.partial(multiply, r, False))
                pl.when(exists & is_large)(functools.partial(multiply, r, True))
                pl.when(~exists)(functools.partial(pass_by, r))

        pl.when(wg == warpgroups)(copy_all)
        pl.when(wg < warpgroups)(multiply_all)

    f8 = jnp.float8_e4m3fn
    return plgpu.kernel(
        wkv,
        out_type=jax.ShapeDtypeStruct((tokens, out_width), jnp.bfloat16),
        # Tokens run fastest: CTAs that share rows of the weight run together.
        grid=(ctas, -(-tokens // tile_tokens)),
        grid_names=("cta", "tokens"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(
                (stages, _SLAB * warpgroups, columns), f8, transforms=_WEIGHT_TILE
            ),
            plgpu.SMEM(
                (stages, tile_tokens, columns), jnp.bfloat16, transforms=_TOKEN_TILE
            ),
            plgpu.SMEM((8, _TILE), f8, transforms=_WEIGHT_TILE),
            plgpu.SMEM((turns, warpgroups, 2, scale_width), jnp.uint8),
            plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups + 1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups),
            plgpu.Barrier(
                num_barriers=turns,
                num_arrivals=2 * warpgroups * -(-scale_width // _COPY_MAX),
            ),
            plgpu.Barrier(),
        ],
    )(rows, weight, scale)


@functools.partial(jax.jit, static_argnames=("tokens", "sizes"))
def wkv_permuted(
    rows: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    tokens: int,
    sizes: block_sizes.WkvSizes | None = None,
) -> jax.Array:
    """Project rows that are already in the order of `permute_columns`.

    Args:
      rows: bfloat16 [T or more, K rounded up to 64]; what lies beyond T is not used.
      weight: e4m3 or uint8 [N, K].
      scale: uint8 [ceil(N/32), K/32].
      tokens: T, at least 1.
      sizes: Block sizes that override the tuned ones.

    Returns:
      bfloat16 [T, N].
    """
    if sizes is None:
        sizes = block_sizes.wkv_sizes(tokens, *weight.shape)
    with jax.enable_x64(False):  # indices in the kernel are 32 bits wide
        return _product(rows, weight, scale, tokens, sizes)


@functools.partial(jax.jit, static_argnames=("interpret", "sizes"))
def wkv_pallas(
    rows: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    interpret: bool = False,
    sizes: block_sizes.WkvSizes | None = None,
) -> jax.Array:
    """Project rows; `kernels.wkv` says what.

    Args:
      rows: bfloat16 [T, K] or [T, C, D], or packed uint8 [T, C, D + D/32].
      weight: e4m3 or uint8 [N, K], N a multiple of 8. K a multiple of 128 is taken as
        it is; any other K is padded, which copies the weight.
      scale: uint8 [ceil(N/32), K/32].
      interpret: Must be False; see `INTERPRET_REASON`.
      sizes: Block sizes that override the tuned ones.

    Returns:
      bfloat16 [T, N].
    """
    reason = unsupported_reason(rows, weight, scale, interpret=interpret)
    if reason is not None:
        raise NotImplementedError(f"wkv_pallas: {reason}")
    tokens = rows.shape[0]
    if tokens == 0 or weight.shape[0] == 0:
        return jnp.zeros((tokens, weight.shape[0]), jnp.bfloat16)
    if rows.dtype == jnp.uint8:
        rows = mxfp8.dequantize(*mxfp8.unpack(rows))
    rows = permute_columns(rows.reshape(tokens, -1))
    return wkv_permuted(rows, weight, scale, tokens=tokens, sizes=sizes)

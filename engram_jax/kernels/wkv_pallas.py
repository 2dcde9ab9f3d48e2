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
of a word. `wkv_threads_pallas` holds those pieces, and `wkv_interpret_pallas` what
stands in for them in the interpreter, so that all the rest can be run on a CPU.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from engram_jax import mxfp8

from . import block_sizes, wkv_interpret_pallas, wkv_threads_pallas
from .wkv_fragments_pallas import permute_columns, unpermute_columns
from .wkv_threads_pallas import SLAB, TILE, TOKEN_TILE, WEIGHT_TILE

__all__ = [
    "permute_columns",
    "unpermute_columns",
    "unsupported_reason",
    "wkv_pallas",
    "wkv_permuted",
]

# The kernel as such can be interpreted, which its tests do; as a way to compute that
# would be a slow mixture, and say nothing about the GPU's numbers.
INTERPRET_REASON = "in the interpreter, other code stands in for its arithmetic"

_SCALE_ALIGN = 16  # bytes of a row in memory: what the copy engine wants
_SMEM_ALIGN = 128  # and of a row in shared memory
_COPY_MAX = 256  # elements of one dimension in one copy
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


def _pad_columns(array: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % multiple)))


def _product(rows, weight, scale, tokens, sizes: block_sizes.WkvSizes, interpret):
    """Multiply permuted rows [T or more, K] by the weight; the module says how."""
    out_width = weight.shape[0]
    # What the copy engine wants: whole tiles. Both are, for any usual C and D.
    weight = _pad_columns(mxfp8.value_bytes(weight), TILE)
    weight = lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
    scale = _pad_columns(scale, _SCALE_ALIGN)
    if rows.shape[0] > 8:
        rows = jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))
    columns, chunk, stages = sizes.columns, sizes.chunk, sizes.stages
    tile_tokens = sizes.tokens
    steps = -(-weight.shape[1] // columns)
    scale_width = -(-steps * columns // (32 * _SMEM_ALIGN)) * _SMEM_ALIGN

    slabs = -(-out_width // SLAB)
    ctas = min(slabs, sizes.ctas or block_sizes.multiprocessors())
    per_cta, rest = divmod(slabs, ctas)  # the first `rest` CTAs have one more
    rounds = -(-(per_cta + (rest > 0)) // 4)
    warpgroups = -(-(per_cta + (rest > 0)) // rounds)
    # So many that a round's scales outlast the steps in flight.
    turns = min(rounds, -(-stages // steps) + 1)
    threads: Any = wkv_interpret_pallas if interpret else wkv_threads_pallas
    decoders = {
        any_scale: [
            threads.make_decode(start // 64, chunk, any_scale)
            for start in range(0, columns, chunk)
        ]
        for any_scale in (False, True)
    }
    store = threads.make_store(tokens, out_width, tile_tokens)
    finds_large_scale = threads.make_finds_large_scale(scale_width)

    def wkv(
        rows_ref, weight_ref, scale_ref, out_ref,
        weight_ring, rows_ring, ones, scales, filled, read, scaled, ones_filled,
        *staging,
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
                    # Traced, since JAX 0.12 refuses known slices past the end.
                    source = pl.ds(start + 0 * r, part.size)
                    plgpu.copy_gmem_to_smem(
                        scale_ref.at[(round_slab + w) * 2 + half, source],
                        scales.at[turn, w, half, part],
                        scaled.at[turn],
                    )

                @pl.loop(0, steps)
                def _(k):
                    i, at = r * steps + k, pl.ds(k * columns, columns)
                    slot = lax.rem(i, stages)
                    pl.when(i >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
                    for w in range(warpgroups):
                        threads.copy_where(
                            r * warpgroups + w < slabs_here,
                            weight_ref.at[pl.ds((round_slab + w) * SLAB, SLAB), at],
                            weight_ring.at[slot, pl.ds(w * SLAB, SLAB)],
                            filled.at[slot],
                        )
                    plgpu.copy_gmem_to_smem(
                        rows_ref.at[pl.ds(first_token, tile_tokens), at],
                        rows_ring.at[slot],
                        filled.at[slot],
                    )

            # No completion may be left unobserved.
            @pl.loop(max(0, rounds * steps - stages), rounds * steps)
            def _(i):
                plgpu.barrier_wait(read.at[lax.rem(i, stages)])

        def multiply(r, any_scale):
            def all_steps(sums, nans):
                @pl.loop(0, steps)
                def _(k):
                    slot = lax.rem(r * steps + k, stages)
                    mine = pl.ds(wg * SLAB, SLAB)
                    plgpu.barrier_wait(filled.at[slot])
                    for start in range(0, columns, TILE):
                        tile = weight_ring.at[slot, mine, pl.ds(start, TILE)]
                        plgpu.wgmma(nans, tile, ones.transpose((1, 0)))
                    for i, decode in enumerate(decoders[any_scale]):
                        block = k * (columns // 32) + i * (chunk // 32)
                        slab, turn = weight_ring.at[slot, mine], lax.rem(r, turns)
                        values = decode(slab, scales.at[turn, wg], block)
                        part = rows_ring.at[slot, :, pl.ds(i * chunk, chunk)]
                        threads.multiply(
                            sums, values, part, *(x.at[wg] for x in staging)
                        )
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(read.at[slot])

                return sums[...], nans[...]

            sums, nans = pl.run_scoped(
                all_steps,
                plgpu.WGMMAAccumulatorRef((SLAB, tile_tokens), jnp.float32),
                plgpu.WGMMAAccumulatorRef((SLAB, 8), jnp.float32),
            )
            first_row = (first_slab + r * warpgroups + wg) * SLAB
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
                threads.fill_with_ones(ones)
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
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        scratch_types=[
            plgpu.SMEM(
                (stages, SLAB * warpgroups, columns), f8, transforms=WEIGHT_TILE
            ),
            plgpu.SMEM(
                (stages, tile_tokens, columns), jnp.bfloat16, transforms=TOKEN_TILE
            ),
            plgpu.SMEM((8, TILE), f8, transforms=WEIGHT_TILE),
            plgpu.SMEM((turns, warpgroups, 2, scale_width), jnp.uint8),
            plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups + 1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=warpgroups),
            plgpu.Barrier(
                num_barriers=turns,
                num_arrivals=2 * warpgroups * -(-scale_width // _COPY_MAX),
            ),
            plgpu.Barrier(),
            *threads.staging(warpgroups, chunk),
        ],
    )(rows, weight, scale)


@functools.partial(jax.jit, static_argnames=("tokens", "interpret", "sizes"))
def wkv_permuted(
    rows: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    tokens: int,
    interpret: bool = False,
    sizes: block_sizes.WkvSizes | None = None,
) -> jax.Array:
    """Project rows that are already in the order of `permute_columns`.

    Args:
      rows: bfloat16 [T or more, K rounded up to 64]; what lies beyond T is not used.
      weight: e4m3 or uint8 [N, K].
      scale: uint8 [ceil(N/32), K/32].
      tokens: T, at least 1.
      interpret: Run in Pallas' GPU interpreter, on a CPU, for tests of the structure.
      sizes: Block sizes that override the tuned ones.

    Returns:
      bfloat16 [T, N].
    """
    if sizes is None:
        sizes = block_sizes.wkv_sizes(tokens, *weight.shape)
    with jax.enable_x64(False):  # indices in the kernel are 32 bits wide
        return _product(rows, weight, scale, tokens, sizes, interpret)


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
      interpret: Run in Pallas' GPU interpreter, on a CPU, for tests of the structure.
      sizes: Block sizes that override the tuned ones.

    Returns:
      bfloat16 [T, N].
    """
    reason = unsupported_reason(rows, weight, scale)
    if reason is not None:
        raise NotImplementedError(f"wkv_pallas: {reason}")
    tokens = rows.shape[0]
    if tokens == 0 or weight.shape[0] == 0:
        return jnp.zeros((tokens, weight.shape[0]), jnp.bfloat16)
    if rows.dtype == jnp.uint8:
        rows = mxfp8.dequantize(*mxfp8.unpack(rows))
    rows = permute_columns(rows.reshape(tokens, -1))
    return wkv_permuted(
        rows, weight, scale, tokens=tokens, interpret=interpret, sizes=sizes
    )

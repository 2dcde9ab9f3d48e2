"""What stands in for the inline code of `wkv_threads_pallas` in Pallas' interpreter.

The same pieces in plain operations, so that the rest of the kernel runs on a CPU: who
takes which rows, the ring and its barriers, ends that do not fill a tile, NaN marks.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from engram_jax import mxfp8

from .wkv_fragments_pallas import permute_columns
from .wkv_threads_pallas import SLAB, TOKEN_TILE

_EIGHT = 8  # rows of the weight come in multiples of this


def staging(warpgroups, columns):
    """Say what shared memory `multiply` needs."""
    shape = (warpgroups, SLAB, columns)
    return [plgpu.SMEM(shape, jnp.bfloat16, transforms=TOKEN_TILE)]


def multiply(sums, values, rows, stage):
    """Add decoded values [64, columns] times rows [T, columns] to the sums.

    The interpreter takes both factors from shared memory only.
    """
    stage[...] = values
    plgpu.commit_smem()
    plgpu.wgmma(sums, stage, rows.transpose((1, 0)))
    plgpu.wgmma_wait(0)


def copy_where(predicate, source, target, barrier):
    """Start a copy to shared memory, or arrive at its barrier without one."""
    pl.when(predicate)(lambda: plgpu.copy_gmem_to_smem(source, target, barrier))
    pl.when(~predicate)(lambda: plgpu.barrier_arrive(barrier))


def fill_with_ones(tile):
    """Write e4m3 ones to shared memory [8, 128]."""
    tile[...] = jnp.ones(tile.shape, tile.dtype)


def make_finds_large_scale(row_bytes):
    """Make (scales [2, row_bytes]) -> nonzero if one of them exceeds 134."""
    del row_bytes
    return lambda scales: jnp.any(scales[...] > 134).astype(jnp.int32)


def make_decode(first, columns, any_scale):
    """Make (slab, scales, block) -> bfloat16 [64, columns]."""
    del any_scale

    def decode(slab, scales, block):
        values = slab[...][:, first * 64 : first * 64 + columns]
        numbers = lax.bitcast_convert_type(values, jnp.uint8)
        is_nan = (numbers & 0x7F) == 0x7F
        scale = lax.dynamic_slice_in_dim(scales[...], block, columns // 32, axis=1)
        dense = mxfp8.dequantize(values, jnp.repeat(scale, SLAB // 2, axis=0))
        # NaN codes are the marks' part, as on the GPU.
        return permute_columns(jnp.where(is_nan, jnp.bfloat16(480), dense))

    return decode


def make_store(tokens, out_width, tile_tokens):
    """Make (sums [64, tokens], nans [64, 8], out, first_row, first_token) -> ()."""

    def store(sums, nans, out, first_row, first_token):
        marked = jnp.where(jnp.isnan(nans[:, :1]), jnp.nan, sums)
        rounded = marked.astype(jnp.bfloat16).T
        for token in range(tile_tokens):
            for row in range(0, SLAB, _EIGHT):
                exists = (first_token + token < tokens) & (first_row + row < out_width)

                @pl.when(exists)
                def _(token=token, row=row):
                    at = pl.ds(first_row + row, _EIGHT)
                    out[first_token + token, at] = rounded[token, row : row + _EIGHT]

    return store

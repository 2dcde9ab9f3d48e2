"""How the FP8 projection's threads read the weight and decode it, as plain functions.

They are written against the operators of `mosaic_pallas.Word` alone, so that the tests
can put the matrix that the tensor cores see together on a CPU.
"""

import jax
import jax.numpy as jnp

from .mosaic_pallas import BF16_2_POW_120, e4m3_pairs, e8m0_pair

_PERMUTED = 64  # columns within which `permute_columns` works


def folded_scale(byte):
    """Turn an E8M0 byte up to 134 into the factor that `e4m3_pairs` lacks, as a pair.

    ``2**(byte - 127) * 2**120``: one product then decodes, where any byte takes two.
    For larger bytes the factor would be no bfloat16 number.
    """
    half = (byte + 120) << 7
    return half | (half << 16)


def exceeds_folded(word):
    """Mark the bytes of a word that are above 134 in their bit 7."""
    return ((word & 0x7F7F7F7F) + 0x79797979) & word & 0x80808080


def scaled_pairs(word, byte, *, any_scale: bool):
    """Decode four e4m3 bytes under one E8M0 byte, as pairs (0, 2) and (1, 3).

    ``value * 2**(byte - 127)`` in bfloat16, rounded once; NaN codes as +-480. Bytes
    above 134 need `any_scale`.
    """
    factor = e8m0_pair(byte) if any_scale else folded_scale(byte)
    for pair in e4m3_pairs(word):
        value = pair.bf16x2_mul(BF16_2_POW_120) if any_scale else pair
        yield value.bf16x2_mul(factor)


def permute_columns(rows: jax.Array) -> jax.Array:
    """Put the columns of [T, K] in the order in which the kernel reads the weight.

    Of 64 columns, thread t of four has bytes 16 t to 16 t + 15. Each instruction takes
    one word of every thread, the even bytes for its columns 2 t and 2 t + 1, the odd
    ones for 2 t + 8 and 2 t + 9. K is padded to a multiple of 64 with zeros.
    """
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _PERMUTED)))
    # Column = 64 block + 16 thread + 4 word + 2 half + parity.
    split = rows.reshape(len(rows), rows.shape[1] // _PERMUTED, 4, 4, 2, 2)
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(rows.shape)


def unpermute_columns(rows: jax.Array) -> jax.Array:
    """Undo `permute_columns`, but for the padding."""
    split = rows.reshape(len(rows), rows.shape[1] // _PERMUTED, 4, 2, 4, 2)
    return split.transpose(0, 1, 4, 2, 5, 3).reshape(rows.shape)


def piece_at(warp, row, quarter, part: int, upper: int):
    """Say where in shared memory the 16 bytes lie that a thread decodes at a time.

    The slab is [8, columns / 128, 8, 128] there: tiles whose 16-byte pieces are
    swizzled by their row.

    They are quarter `quarter` of the `part`-th 64 columns, in row 16 warp + 8 upper +
    row. Decoded they are, pair i of 8, columns 64 part + 8 i + 2 quarter and the next
    in the order of `permute_columns`.
    """
    tile, half = divmod(part, 2)
    piece = (quarter + 4 * half) ^ row
    return warp * 2 + upper, tile, row, piece * 16


def scale_at(warp, quarter, part: int):
    """Say which scale those bytes have: all lie in one block, in both rows."""
    return warp // 2, quarter // 2 + 2 * part

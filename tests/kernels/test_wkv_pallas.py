"""The FP8 projection's kernel: its arithmetic and layout, and that it compiles.

What each thread decodes is put together here, on simulated threads, to the matrix that
the tensor cores see. On a GPU the kernel itself runs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import aot
from kernels.simulated_threads import Word
from tolerances import assert_within

from engram_jax import kernels, mxfp8
from engram_jax.kernels import wkv_fragments_pallas, wkv_pallas
from engram_jax.kernels.block_sizes import WkvSizes

NAN_CODES = (0x7F, 0xFF)


def make_weight(rng, rows, width, *, scales=(118, 130), nans=0):
    """Draws e4m3 bytes, NaN codes at `nans` places only, and scale bytes."""
    weight = rng.integers(0, 256, (rows, width), np.uint8)
    weight[(weight & 0x7F) == 0x7F] ^= 1
    places = rng.integers(rows, size=nans), rng.integers(width, size=nans)
    weight[places] = rng.choice(NAN_CODES, nans)
    shape = -(-rows // 32), width // 32
    return weight, rng.integers(scales[0], scales[1] + 1, shape).astype(np.uint8)


def halves(word: Word) -> np.ndarray:
    """The two bfloat16 of each thread's word, in float64 [threads, 2]."""
    return np.stack(
        [reference.bf16_to_float((word.value >> shift) & 0xFFFF) for shift in (0, 16)],
        axis=-1,
    ).astype(np.float64)


# ---- numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("any_scale", [False, True])
def test_all_byte_pairs_decode_as_the_format_says(any_scale):
    """Pitfall: scale bytes 0 and 255, subnormals; NaN codes are the marks' part."""
    codes = np.array([c for c in range(256) if c not in NAN_CODES])
    largest = 255 if any_scale else 134
    values, scales = np.meshgrid(codes, np.arange(largest + 1), indexing="ij")
    values, scales = values.reshape(-1), scales.reshape(-1)
    word = Word(values * 0x01010101)
    expected = np.array([reference.e4m3_to_float(c) for c in range(256)])[values]
    powers = np.array([reference.e8m0_to_float(b) for b in range(256)])
    with np.errstate(over="ignore"):
        expected = expected * powers[scales]
        rounded = expected.astype(ml_dtypes.bfloat16).astype(np.float64)
    for pair in wkv_fragments_pallas.scaled_pairs(
        word, Word(scales), any_scale=any_scale
    ):
        got = halves(pair)
        tiny = np.abs(expected) < 2.0**-126
        for half in (got[:, 0], got[:, 1]):
            np.testing.assert_array_equal(half[~tiny], rounded[~tiny])
            assert (np.abs(half[tiny]) < 2.0**-126).all()


def test_pairs_take_the_bytes_they_name():
    even, odd = wkv_fragments_pallas.scaled_pairs(
        Word(np.array([0x40_38_30_28])), Word(np.array([127])), any_scale=False
    )
    np.testing.assert_array_equal(halves(even), [[0.25, 1.0]])
    np.testing.assert_array_equal(halves(odd), [[0.5, 2.0]])


def test_large_scales_are_found_in_every_byte():
    for place in range(4):
        word = Word(np.arange(256) << 8 * place)
        found = wkv_fragments_pallas.exceeds_folded(word).value != 0
        np.testing.assert_array_equal(found, np.arange(256) > 134)


# ---- layout --------------------------------------------------------------------------


def swizzled(slab: np.ndarray) -> np.ndarray:
    """Lays a slab [64, columns] out as the copy engine does: [8, columns/128, 8, 128].

    Within a tile of 8 rows, the 16-byte piece p of row r lies at piece p ^ r.
    """
    tiles = slab.reshape(8, 8, -1, 8, 16).transpose(0, 2, 1, 3, 4)
    out = np.empty_like(tiles)
    for row in range(8):
        for piece in range(8):
            out[:, :, row, piece ^ row] = tiles[:, :, row, piece]
    return out.reshape(8, -1, 8, 128)


def test_threads_decode_the_matrix_that_permuted_rows_belong_to():
    """A of the instruction: thread 32 w + 4 g + q has rows 16 w + g and 8 below it."""
    columns = 256
    weight, scale = make_weight(np.random.default_rng(0), 64, columns)
    shared = swizzled(weight)
    thread = Word(np.arange(128))
    warp, row, quarter = thread // 32, thread % 32 // 4, thread % 4
    numbers = [w.value.astype(int) for w in (warp, row, quarter)]

    def plain(index):
        return index.value.astype(int) if isinstance(index, Word) else index

    seen = np.full((64, columns), np.nan)
    for part in range(columns // 64):
        scale_row, scale_column = wkv_fragments_pallas.scale_at(warp, quarter, part)
        byte = Word(scale[plain(scale_row), plain(scale_column)])
        for upper in range(2):
            at = wkv_fragments_pallas.piece_at(warp, row, quarter, part, upper)
            first = [plain(index) for index in at]
            pieces = np.stack([shared[*first[:3], first[3] + i] for i in range(16)], -1)
            words = np.ascontiguousarray(pieces).view(np.uint32)
            for i in range(4):
                pairs = wkv_fragments_pallas.scaled_pairs(
                    Word(words[:, i]), byte, any_scale=False
                )
                for parity, pair in enumerate(pairs):
                    where = numbers[0] * 16 + 8 * upper + numbers[1]
                    column = 64 * part + 8 * (2 * i + parity) + 2 * numbers[2]
                    seen[where, column], seen[where, column + 1] = halves(pair).T
    values = jnp.asarray(weight.view(ml_dtypes.float8_e4m3fn))
    dense = kernels.dequantize_weight(values, jnp.asarray(scale))
    expected = wkv_fragments_pallas.permute_columns(dense)
    np.testing.assert_array_equal(seen, np.asarray(expected).astype(np.float64))


@pytest.mark.parametrize("width", [64, 96, 256])
def test_permuting_both_sides_keeps_the_product(width):
    rng = np.random.default_rng(0)
    left, right = rng.integers(-4, 5, (2, 3, width)).astype(np.float32)
    permute = wkv_fragments_pallas.permute_columns
    permuted = permute(jnp.asarray(left)), permute(jnp.asarray(right))
    assert permuted[0].shape[1] % 64 == 0
    np.testing.assert_array_equal(permuted[0] @ permuted[1].T, left @ right.T)
    back = wkv_fragments_pallas.unpermute_columns(permuted[0])
    np.testing.assert_array_equal(back[:, :width], left)


# ---- bounds --------------------------------------------------------------------------


def test_no_tokens_give_no_tokens():
    weight, scale = make_weight(np.random.default_rng(0), 96, 64)
    rows = jnp.zeros((0, 64), jnp.bfloat16)
    out = wkv_pallas.wkv_pallas(rows, jnp.asarray(weight), jnp.asarray(scale))
    assert out.shape == (0, 96)
    assert out.dtype == jnp.bfloat16


def test_refuses_what_it_cannot_do():
    weight, scale = make_weight(np.random.default_rng(0), 90, 64)
    rows = jnp.zeros((1, 64), jnp.bfloat16)
    operands = rows, jnp.asarray(weight), jnp.asarray(scale)
    reason = "the weight has 90 rows, not a multiple of 8"
    assert wkv_pallas.unsupported_reason(*operands) == reason
    with pytest.raises(NotImplementedError, match=reason):
        wkv_pallas.wkv_pallas(*operands)
    operands = rows, jnp.asarray(weight[:88]), jnp.asarray(scale)
    assert wkv_pallas.unsupported_reason(*operands) is None
    reason = wkv_pallas.unsupported_reason(*operands, interpret=True)
    assert reason == wkv_pallas.INTERPRET_REASON


# ---- interpreted ---------------------------------------------------------------------


def assert_near_float64(out, rows, weight, scale):
    wide = np.asarray(rows).astype(np.float64)
    expected = reference.wkv(wide, weight, scale)
    dense = reference.wkv(np.eye(weight.shape[1]), weight, scale).T
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(wide) @ np.abs(dense).T
    got = np.asarray(out).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)
    assert_within("wkv", got[known], expected[known], magnitude[known])


@pytest.mark.parametrize(
    ("tokens", "height", "width", "sizes", "scales"),
    [
        # One CTA with all slabs, in two rounds; warpgroups left over.
        (5, 320, 256, WkvSizes(128, 64, 2, 8, 1), (118, 130)),
        # Nothing fills a tile: rows, columns, tokens. Large scales.
        (3, 40, 96, None, (100, 200)),
        # Several tiles of tokens, and a ring that outlasts its steps.
        (20, 96, 384, WkvSizes(256, 128, 3, 8, 2), (0, 134)),
    ],
)
def test_interpreted_kernel_is_near_float64(tokens, height, width, sizes, scales):
    """Who takes which rows, the ring and its barriers, the ends, NaN marks."""
    rng = np.random.default_rng(0)
    weight, scale = make_weight(rng, height, width, scales=scales, nans=3)
    scale[1, 2] = max(scale[1, 2], 255 * (scales[1] > 134))
    rows = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    out = wkv_pallas.wkv_pallas(
        rows, jnp.asarray(weight), jnp.asarray(scale), interpret=True, sizes=sizes
    )
    assert_near_float64(out, rows, weight, scale)


# ---- compiled for Hopper -------------------------------------------------------------


def aot_operands(tokens, height, width):
    return (
        aot.operand((tokens, width), jnp.bfloat16),
        aot.operand((height, width), jnp.float8_e4m3fn),
        aot.operand((-(-height // 32), width // 32), jnp.uint8),
    )


@pytest.mark.parametrize("tokens", [1, 16, 24, 64, 100])
def test_compiles_at_the_published_size_without_a_copy_of_the_weight(tokens):
    """Pitfall: the weight has 157 MB; permuted rows have at most 1.3."""
    operands = aot_operands(tokens, 25_600, 6144)
    compiled = aot.compile_for_hopper(wkv_pallas.wkv_pallas, *operands)
    assert aot.temporary_bytes(compiled) < 2 * 2**20
    assert "mosaic_gpu" in aot.text_of(compiled)


@pytest.mark.parametrize(
    ("tokens", "height", "width"),
    [
        (3, 64, 32),  # one slab, one block of columns
        (5, 1288, 96),  # rows beyond the last slab, a padded weight
        (9, 65_600, 128),  # several rounds, fewer steps than stages
        (130, 320, 640),  # several tiles of tokens
        (2, 64, 16_384),  # more scales in a row than one copy takes
    ],
)
def test_compiles_for_odd_shapes(tokens, height, width):
    operands = aot_operands(tokens, height, width)
    compiled = aot.compile_for_hopper(wkv_pallas.wkv_pallas, *operands)
    assert "mosaic_gpu" in aot.text_of(compiled)


def test_compiles_for_rows_in_the_kernels_own_order():
    call = functools.partial(wkv_pallas.wkv_permuted, tokens=3)
    rows, *weight = aot_operands(8, 640, 512)
    compiled = aot.compile_for_hopper(call, rows, *weight)
    assert "fusion" not in aot.text_of(compiled)  # nothing but the kernel


@pytest.mark.parametrize("x64", [False, True])
def test_compiles_inside_transformations(x64):
    def program(rows, packed, weight, scale):
        @jax.checkpoint
        def call(rows):
            return kernels.wkv(rows, weight, scale, backend="pallas")

        def loss(rows):
            return call(rows).astype(jnp.float32).sum()

        _, scanned = jax.lax.scan(lambda carry, x: (carry, call(x)), 0, rows)
        return scanned, jax.vmap(call)(packed), jax.grad(loss)(rows[0])

    with jax.enable_x64(x64):
        compiled = aot.compile_for_hopper(
            program,
            aot.operand((2, 3, 4, 64), jnp.bfloat16),
            aot.operand((2, 3, 4, 66), jnp.uint8),
            *aot_operands(1, 128, 256)[1:],
        )
    assert "mosaic_gpu" in aot.text_of(compiled)


@pytest.mark.parametrize("check_vma", [False, True])
def test_compiles_for_columns_spread_over_four_gpus(check_vma):
    mesh = aot.hopper_mesh(4)
    specs = P(), P("device"), P("device")
    call = functools.partial(kernels.wkv, backend="pallas")
    compiled = aot.compile_for_hopper(
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=specs,
            out_specs=P(None, "device"),
            check_vma=check_vma,
        ),
        *(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(aot_operands(5, 512, 256), specs, strict=True)
        ),
        devices=4,
    )
    assert "mosaic_gpu" in aot.text_of(compiled)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "height", "width", "sizes"),
    [
        (1, 25_600, 6144, None),
        (16, 2560, 6144, None),
        (33, 2560, 1536, None),
        (64, 1288, 768, WkvSizes(128, 64, 4, 64)),
        (5, 1288, 96, None),
        (9, 65_600, 128, None),
        (130, 320, 640, WkvSizes(256, 128, 2, 32)),
        (2, 64, 16_384, None),
        (100, 512, 384, WkvSizes(128, 64, 3, 128, 2)),
    ],
)
@pytest.mark.parametrize("scales", [(118, 130), (0, 134), (100, 200)])
def test_kernel_is_near_float64(tokens, height, width, sizes, scales):
    """With NaN codes, and scales on both sides of what one product can fold."""
    rng = np.random.default_rng(0)
    weight, scale = make_weight(rng, height, width, scales=scales, nans=5)
    rows = jnp.asarray(rng.normal(size=(tokens, width)) * 2.0**-20, jnp.bfloat16)
    out = wkv_pallas.wkv_pallas(
        rows, jnp.asarray(weight), jnp.asarray(scale), sizes=sizes
    )
    assert_near_float64(out, rows, weight, scale)


@pytest.mark.gpu
def test_kernel_gives_nan_for_scale_byte_255_and_its_rows_only():
    rng = np.random.default_rng(0)
    weight, scale = make_weight(rng, 256, 256)
    scale[3, 5] = 255
    rows = jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)
    out = wkv_pallas.wkv_pallas(rows, jnp.asarray(weight), jnp.asarray(scale))
    assert_near_float64(out, rows, weight, scale)
    assert np.isnan(np.asarray(out)[:, 96:128].astype(np.float32)).all()


@pytest.mark.gpu
def test_kernel_takes_packed_and_permuted_rows():
    rng = np.random.default_rng(0)
    weight, scale = make_weight(rng, 640, 512)
    values, row_scale = make_weight(rng, 5 * 32, 512)
    packed = mxfp8.pack(
        jnp.asarray(values[:5].reshape(5, 2, 256)),
        jnp.asarray(row_scale.reshape(-1)[: 5 * 16].reshape(5, 2, 8)),
    )
    rows = mxfp8.dequantize(*mxfp8.unpack(packed)).reshape(5, 512)
    operands = jnp.asarray(weight), jnp.asarray(scale)
    expected = np.asarray(wkv_pallas.wkv_pallas(rows, *operands))
    got = np.asarray(wkv_pallas.wkv_pallas(packed, *operands))
    np.testing.assert_array_equal(got, expected)
    padded = jnp.pad(rows, ((0, 3), (0, 0)), constant_values=jnp.nan)
    permuted = wkv_fragments_pallas.permute_columns(padded)
    got = np.asarray(wkv_pallas.wkv_permuted(permuted, *operands, tokens=5))
    np.testing.assert_array_equal(got, expected)

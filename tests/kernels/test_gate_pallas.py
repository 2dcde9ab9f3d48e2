"""The gate's kernel: interpreted on a CPU, compiled for Hopper, run on a GPU.

The interpreter finds races and reads out of range; it takes three plain sums for the
one reduction that the GPU does (`gate_pallas._row_sums`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import aot
from tolerances import assert_within

from engram_jax import kernels
from engram_jax.kernels import gate_pallas
from engram_jax.kernels.block_sizes import GateSizes

EPS = 1e-6
ONE_EACH = GateSizes(stages=0)
RINGS = [GateSizes(stages=2, tokens=2), GateSizes(stages=3, tokens=9)]


def make_operands(tokens, streams, width, dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (tokens, streams, width), (tokens, (streams + 1) * width)
    shapes += ((streams, width),) * 2
    dtypes = (dtype, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    return [
        jnp.asarray(rng.normal(size=shape), kind)
        for shape, kind in zip(shapes, dtypes, strict=True)
    ]


def assert_near_float64(out, operands, mask):
    wide = [np.asarray(x).astype(np.float64) for x in operands]
    mask = None if mask is None else np.asarray(mask)
    expected = reference.gate(*wide, eps=EPS, token_mask=mask)
    magnitude = np.abs(wide[0]) + np.abs(expected - wide[0])
    name = "gate_float32" if out.dtype == jnp.float32 else "gate_bfloat16"
    assert_within(name, out, expected, magnitude)


def bits(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("tokens", "streams", "width", "dtype", "sizes"),
    [
        (1, 4, 1024, jnp.bfloat16, ONE_EACH),
        (5, 1, 96, jnp.float32, ONE_EACH),
        (5, 2, 257, jnp.bfloat16, RINGS[0]),
        (9, 2, 384, jnp.float32, RINGS[1]),
        (7, 3, 128, jnp.float16, RINGS[0]),
    ],
)
def test_interpreted_kernel_is_near_float64(
    tokens, streams, width, dtype, sizes, masked
):
    operands = make_operands(tokens, streams, width, dtype)
    mask = jnp.arange(tokens) % 3 != 1 if masked else None
    out = gate_pallas.gate_pallas(
        *operands, mask, eps=EPS, clamp=1e-6, interpret=True, sizes=sizes
    )
    assert out.dtype == dtype
    assert_near_float64(out, operands, mask)


@pytest.mark.parametrize("sizes", [ONE_EACH, RINGS[0]])
def test_shut_tokens_keep_their_bits_whatever_lies_in_kv(sizes):
    """Pitfall: a choice, not a product with zero; NaN and infinity stay out."""
    operands = make_operands(4, 2, 256, jnp.bfloat16)
    operands[0] = operands[0].at[1, 0, 3].set(-0.0).at[2, 1, 5].set(jnp.nan)
    operands[1] = operands[1].at[1].set(jnp.nan).at[2].set(jnp.inf)
    mask = jnp.array([True, False, False, True])
    out = gate_pallas.gate_pallas(
        *operands, mask, eps=EPS, clamp=1e-6, interpret=True, sizes=sizes
    )
    np.testing.assert_array_equal(bits(out)[1:3], bits(operands[0])[1:3])
    assert np.isfinite(np.asarray(out).astype(np.float32)[[0, 3]]).all()


def test_nan_in_one_stream_stays_in_its_token():
    operands = make_operands(3, 2, 128, jnp.float32)
    operands[0] = operands[0].at[1, 1, 7].set(jnp.nan)
    out = gate_pallas.gate_pallas(*operands, eps=EPS, clamp=1e-6, interpret=True)
    expected = np.zeros((3, 2), bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), expected)
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), expected)


def test_no_tokens_give_no_tokens():
    out = gate_pallas.gate_pallas(
        *make_operands(0, 4, 256, jnp.bfloat16), eps=EPS, clamp=1e-6
    )
    assert out.shape == (0, 4, 256)


def test_refuses_what_it_cannot_do():
    def reason(tokens, width):
        shapes = (tokens, 2, width), (tokens, 3 * width), (2, width), (2, width)
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        found = []  # traced, since the operands are too large to exist
        jax.eval_shape(
            lambda *args: found.append(gate_pallas.unsupported_reason(*args)),
            *operands,
        )
        return found[0]

    assert reason(4, 16_385) == "streams are 16385 wide, more than 16384"
    assert "more elements than 32 bits can count" in reason(2**21, 512)
    assert reason(8192, 16_384) is None


def test_jaxpr_shows_which_kernel_runs():
    for tokens, name in ((1, "gate_one_each"), (512, "gate_ring")):
        operands = make_operands(tokens, 4, 256, jnp.bfloat16)
        call = functools.partial(gate_pallas.gate_pallas, eps=EPS, clamp=1e-6)
        with aot.abstract_hopper():
            assert name in str(jax.make_jaxpr(call)(*operands))


# ---- compiled for Hopper -------------------------------------------------------------


def aot_operands(tokens, streams, width, dtype, *, mask=False):
    operands = [
        aot.operand((tokens, streams, width), dtype),
        aot.operand((tokens, (streams + 1) * width), jnp.bfloat16),
        aot.operand((streams, width), jnp.bfloat16),
        aot.operand((streams, width), jnp.bfloat16),
    ]
    return [*operands, aot.operand((tokens,), jnp.bool_)] if mask else operands


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "mask"),
    [
        (1, 5120, jnp.bfloat16, False),
        (64, 5120, jnp.bfloat16, True),
        (512, 5120, jnp.bfloat16, False),
        (8192, 5120, jnp.bfloat16, True),
        (300, 257, jnp.float32, True),
        (3, 96, jnp.float16, False),
        (2, 16_384, jnp.float32, False),
    ],
)
def test_compiles_for_hopper(tokens, width, dtype, mask):
    call = functools.partial(gate_pallas.gate_pallas, eps=1e-20, clamp=1e-6)
    operands = aot_operands(tokens, 4, width, dtype, mask=mask)
    compiled = aot.compile_for_hopper(call, *operands)
    if width % 128 == 0:  # nothing is padded, so nothing but the kernel runs
        assert aot.temporary_bytes(compiled) == 0
        assert "fusion" not in aot.text_of(compiled)


@pytest.mark.parametrize("x64", [False, True])
def test_compiles_inside_transformations(x64):
    def program(hidden, kv, q_weight, k_weight):
        @jax.checkpoint
        def call(hidden, kv):
            return kernels.gate(
                hidden, kv, q_weight, k_weight, eps=1e-20, backend="pallas"
            )

        def loss(hidden, kv):
            return call(hidden, kv).astype(jnp.float32).sum()

        _, scanned = jax.lax.scan(lambda carry, x: (carry, call(*x)), 0, (hidden, kv))
        return scanned, jax.vmap(call)(hidden, kv), jax.grad(loss)(hidden[0], kv[0])

    with jax.enable_x64(x64):
        compiled = aot.compile_for_hopper(
            program,
            aot.operand((3, 5, 2, 256), jnp.bfloat16),
            aot.operand((3, 5, 768), jnp.bfloat16),
            aot.operand((2, 256), jnp.bfloat16),
            aot.operand((2, 256), jnp.bfloat16),
        )
    assert "mosaic_gpu" in aot.text_of(compiled)


@pytest.mark.parametrize("check_vma", [False, True])
def test_compiles_for_tokens_spread_over_four_gpus(check_vma):
    mesh = aot.hopper_mesh(4)
    specs = P("device"), P("device"), P(), P()
    shapes = (64, 2, 256), (64, 768), (2, 256), (2, 256)
    call = functools.partial(kernels.gate, eps=1e-20, backend="pallas")
    compiled = aot.compile_for_hopper(
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=specs,
            out_specs=P("device"),
            check_vma=check_vma,
        ),
        *(
            jax.ShapeDtypeStruct(
                shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
            )
            for shape, spec in zip(shapes, specs, strict=True)
        ),
        devices=4,
    )
    assert "mosaic_gpu" in aot.text_of(compiled)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("tokens", "streams", "width", "dtype"),
    [
        (1, 4, 5120, jnp.bfloat16),
        (130, 4, 5120, jnp.bfloat16),
        (67, 3, 257, jnp.float32),
        (9, 2, 96, jnp.float16),
        (3, 1, 16_384, jnp.float32),
    ],
)
def test_kernel_is_near_float64(tokens, streams, width, dtype, masked):
    operands = make_operands(tokens, streams, width, dtype)
    mask = jnp.arange(tokens) % 3 != 1 if masked else None
    # Two stages of the widest rows are more than shared memory holds.
    rings = RINGS if width <= 5120 else []
    for sizes in (None, ONE_EACH, *rings):
        out = gate_pallas.gate_pallas(*operands, mask, eps=EPS, clamp=1e-6, sizes=sizes)
        assert_near_float64(out, operands, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [ONE_EACH, RINGS[0]])
def test_kernel_keeps_the_bits_of_shut_tokens(sizes):
    operands = make_operands(40, 2, 512, jnp.bfloat16)
    operands[0] = operands[0].at[1, 0, 3].set(-0.0).at[4, 1, 5].set(jnp.nan)
    operands[1] = operands[1].at[1].set(jnp.nan).at[4].set(jnp.inf)
    mask = jnp.arange(40) % 3 != 1
    out = gate_pallas.gate_pallas(*operands, mask, eps=EPS, clamp=1e-6, sizes=sizes)
    shut = ~np.asarray(mask)
    np.testing.assert_array_equal(bits(out)[shut], bits(operands[0])[shut])
    assert np.isfinite(np.asarray(out).astype(np.float32)[~shut]).all()

"""The projection against float64: forms of its input, block scales, gradients."""

from __future__ import annotations

import functools
import json

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from tolerances import assert_within

from engram_jax import kernels, mxfp8


def random_codes(rng, *shape) -> np.ndarray:
    """Draws e4m3 bytes that are numbers."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(np.isnan(reference.E4M3[codes]), 0x7E, codes).astype(np.uint8)


def operands(tokens, columns, width, outputs, seed=0):
    """Draws packed rows, and a weight with its 32x32 block scales."""
    rng = np.random.default_rng(seed)
    inner = columns * width
    return (
        random_codes(rng, tokens, columns, width),
        rng.integers(118, 128, (tokens, columns, width // 32), np.uint8),
        random_codes(rng, outputs, inner),
        rng.integers(110, 124, (-(-outputs // 32), inner // 32), np.uint8),
    )


def on_device(weight, scale):
    """Gives a weight in the dtypes that it has inside the library."""
    return jnp.asarray(weight.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale)


def in_form(form, values, scales) -> jax.Array:
    """Gives rows in one of the forms that the projection takes."""
    if form == "packed":
        return mxfp8.pack(jnp.asarray(values), jnp.asarray(scales))
    rows = mxfp8.dequantize(jnp.asarray(values), jnp.asarray(scales))
    tokens, columns, width = rows.shape
    return rows.reshape(tokens, columns * width) if form == "flat" else rows


def exact(values, scales, weight, scale) -> tuple[np.ndarray, np.ndarray]:
    """Gives the float64 product, and that of the magnitudes."""
    rows = reference.dequantize(values, scales)
    rows = rows.reshape(len(rows), weight.shape[1])
    matrix = reference.wkv(np.eye(weight.shape[1]), weight, scale)
    return rows @ matrix, np.abs(rows) @ np.abs(matrix)


FORMS = ["flat", "columns", "packed"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 17])
def test_projection_within_one_rounding(run, form, tokens):
    """T = 0, 1 and primes, rows in each form."""
    values, scales, weight, scale = operands(tokens, 6, 64, 96)
    rows = in_form(form, values, scales)
    out = run(kernels.wkv, rows, *on_device(weight, scale))
    chex.assert_type(out, jnp.bfloat16)
    assert_within("wkv", out, *exact(values, scales, weight, scale))


@pytest.mark.parametrize(("outputs", "columns", "width"), [(51, 3, 32), (160, 24, 256)])
def test_projections_of_any_size(run, outputs, columns, width):
    """A last block of output rows may be cut short; V4.1's width is 6,144."""
    values, scales, weight, scale = operands(5, columns, width, outputs)
    rows = in_form("packed", values, scales)
    out = run(kernels.wkv, rows, *on_device(weight, scale))
    assert_within("wkv", out, *exact(values, scales, weight, scale))


@pytest.mark.parametrize("form", FORMS)
def test_small_integers_are_exact(run, form):
    """Sums that float32 and bfloat16 hold leave no room for another order."""
    rng = np.random.default_rng(0)
    one = np.uint8(0x38)  # e4m3's 1
    values = np.where(rng.random((9, 4, 64)) < 0.3, one, 0).astype(np.uint8)
    values |= rng.integers(0, 2, values.shape, np.uint8) << 7
    scales = rng.integers(127, 129, (9, 4, 2), np.uint8)
    weight = np.where(rng.random((64, 256)) < 0.3, one, 0).astype(np.uint8)
    scale = rng.integers(127, 129, (2, 8), np.uint8)
    expected, _ = exact(values, scales, weight, scale)
    assert np.abs(expected).max() < 256
    rows = in_form(form, values, scales)
    out = run(kernels.wkv, rows, *on_device(weight, scale))
    np.testing.assert_array_equal(np.asarray(out, np.float64), expected)


def test_every_block_has_its_own_scale(run):
    """Ones everywhere: each output tells which scales were read, and in which order."""
    scale = np.arange(120, 120 + 12, dtype=np.uint8).reshape(3, 4)
    weight = np.full((96, 128), 0x38, np.uint8)
    values = np.zeros((4, 2, 64), np.uint8)
    for group in range(4):  # token g sees group g alone
        values[group].reshape(-1)[32 * group : 32 * group + 32] = 0x38
    scales = np.full((4, 2, 2), 127, np.uint8)
    rows = in_form("packed", values, scales)
    out = run(kernels.wkv, rows, *on_device(weight, scale))
    expected = np.repeat(32 * 2.0 ** (scale.T.astype(float) - 127), 32, axis=1)
    np.testing.assert_array_equal(np.asarray(out, np.float64), expected)


def test_a_token_alone_equals_the_token_in_a_batch(backend, run):
    """Decoding token by token gives the bits of the prefill.

    Large terms that cancel leave the rounding of the partial sums, so that another
    order of addition shows.
    """
    values, scales, weight, scale = operands(70, 6, 64, 192)
    values[:, 3:], scales[:, 3:] = values[:, :3], scales[:, :3]
    weight[:, 192:], scale[:, 6:] = weight[:, :192] ^ 0x80, scale[:, :6]
    # What is left of the sums: the first group of either half, 2^-14 as large.
    weight[:, 192:224] = weight[:, :32]
    scale[:, [0, 6]] -= 14
    rows = in_form("packed", values, scales)
    table = on_device(weight, scale)
    whole = np.asarray(run(kernels.wkv, rows, *table)).view(np.uint16)
    if backend == "pallas":
        reason = "the GPU kernel's tiling, and so its order of sums, depends on T"
        pytest.skip(reason=reason)
    for start, stop in ((0, 1), (5, 7), (10, 25), (3, 20), (1, 34), (69, 70)):
        part = np.asarray(run(kernels.wkv, rows[start:stop], *table)).view(np.uint16)
        np.testing.assert_array_equal(part, whole[start:stop])


def test_packed_rows_lose_nothing():
    """Pitfall: a second quantisation of rows that are MXFP8 already."""
    values, scales, weight, scale = operands(20, 4, 64, 96)
    outs = [
        kernels.wkv(in_form(form, values, scales), *on_device(weight, scale))
        for form in FORMS
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(np.asarray(out), np.asarray(outs[0]))


def test_edge_scales_of_a_weight():
    """Byte 255 makes its block NaN and no other; byte 0 is 2^-127."""
    weight = np.full((64, 64), 0x7E, np.uint8)  # 448
    scale = np.array([[0, 127], [255, 127]], np.uint8)
    matrix = kernels.dequantize_weight(*on_device(weight, scale))
    chex.assert_type(matrix, jnp.bfloat16)
    got = np.asarray(matrix, np.float64)
    np.testing.assert_array_equal(got[:32, :32], 448 * 2.0**-127)
    np.testing.assert_array_equal(got[:, 32:], 448)
    assert np.isnan(got[32:, :32]).all()


def read_tensor(path, name: str) -> np.ndarray:
    """Reads one tensor's bytes out of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    start, end = entry["data_offsets"]
    body = np.frombuffer(data[8 + length + start : 8 + length + end], np.uint8)
    return body.reshape(entry["shape"])


@pytest.mark.parametrize("layer", [1, 3])
def test_golden_projection_of_the_small_checkpoint(run, golden, golden_dir, layer):
    """The published layout of wkv and its scales, on rows of a real text."""
    folder = golden_dir / "tiny_checkpoint"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight, scale = (
        read_tensor(folder / index["weight_map"][name], name)
        for name in (
            f"layers.{layer}.engram.wkv.weight",
            f"layers.{layer}.engram.wkv.scale",
        )
    )
    data = golden("tiny_checkpoint_expected")
    rows = data[f"rows_{layer}"]
    out = run(
        kernels.wkv,
        jnp.asarray(rows.view(ml_dtypes.bfloat16)),
        *on_device(weight, scale),
    )
    flat = reference.bf16_to_float(rows).reshape(len(rows), -1)
    matrix = reference.wkv(np.eye(weight.shape[1]), weight, scale)
    magnitude = np.abs(flat) @ np.abs(matrix)
    np.testing.assert_allclose(flat @ matrix, data[f"kv_{layer}"], rtol=1e-12)
    assert_within("wkv", out, data[f"kv_{layer}"], magnitude)


# --- Gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["flat", "columns"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradient_of_the_rows(run, form, dtype):
    """It is the cotangent times the weight; the FP8 weight is a constant."""
    values, scales, weight, scale = operands(9, 4, 64, 96)
    rows = in_form(form, values, scales).astype(dtype)
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=(9, 96)), jnp.bfloat16)

    def call(rows):
        return run(kernels.wkv, rows, *on_device(weight, scale))

    out, pull = jax.vjp(call, rows)
    (gradient,) = pull(cotangent)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, rows)
    matrix = reference.wkv(np.eye(256), weight, scale).T
    wide = np.asarray(cotangent).astype(np.float64)
    assert_within(
        "gradient_bfloat16",
        gradient.reshape(9, -1),
        wide @ matrix,
        np.abs(wide) @ np.abs(matrix),
    )
    chex.assert_shape(out, (9, 96))


def test_gradient_of_a_float_weight():
    """Without scales the weight is trained too."""
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.integers(-3, 4, (7, 2, 32)), jnp.float32)
    weight = jnp.asarray(rng.integers(-3, 4, (96, 64)), jnp.float32)
    cotangent = jnp.asarray(rng.integers(-2, 3, (7, 96)), jnp.bfloat16)

    def call(rows, weight):
        return kernels.wkv(rows, weight, None)

    out, pull = jax.vjp(call, rows, weight)
    by_rows, by_weight = pull(cotangent)
    flat, given = np.asarray(rows).reshape(7, -1), np.asarray(cotangent, np.float32)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), (flat @ np.asarray(weight).T).astype(out.dtype)
    )
    np.testing.assert_array_equal(by_rows.reshape(7, -1), given @ np.asarray(weight))
    np.testing.assert_array_equal(by_weight, given.T @ flat)


# --- Transformations ------------------------------------------------------------------


def test_jit_traces_once(run):
    """Other rows run the compiled code."""
    run(
        kernels.wkv,
        in_form("packed", *operands(5, 2, 64, 64)[:2]),
        *on_device(*operands(5, 2, 64, 64)[2:]),
    )

    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(rows, weight, scale):
        return run(kernels.wkv, rows, weight, scale)

    for seed in range(2):
        values, scales, weight, scale = operands(5, 2, 64, 64, seed)
        out = call(in_form("packed", values, scales), *on_device(weight, scale))
        assert_within("wkv", out, *exact(values, scales, weight, scale))


def test_vmap_scan_and_checkpoint(run):
    """Each equals the flat batch."""
    values, scales, weight, scale = operands(12, 2, 64, 64)
    rows = in_form("packed", values, scales).reshape(3, 4, 2, 66)
    expected = exact(values, scales, weight, scale)

    @jax.checkpoint
    def call(rows):
        return run(kernels.wkv, rows, *on_device(weight, scale))

    mapped = jax.jit(jax.vmap(call))(rows)
    _, scanned = jax.lax.scan(lambda count, rows: (count, call(rows)), 0, rows)
    for out in (mapped, scanned):
        assert_within("wkv", out.reshape(12, -1), *expected)


def test_x64_changes_nothing(run):
    """The product's dtype and bits are those of the default mode."""
    values, scales, weight, scale = operands(5, 2, 64, 64)
    rows = in_form("packed", values, scales)
    plain = run(kernels.wkv, rows, *on_device(weight, scale))
    with jax.enable_x64(True):
        out = run(kernels.wkv, rows, *on_device(weight, scale))
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(plain))


# --- Refusals -------------------------------------------------------------------------


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": jnp.zeros((5, 2, 65), jnp.uint8)}, ValueError, "rows"),
        ({"rows": jnp.zeros((5, 132), jnp.uint8)}, ValueError, "rows"),
        ({"rows": jnp.zeros((5, 3, 66), jnp.uint8)}, ValueError, "rows"),
        ({"rows": jnp.zeros((5, 127), jnp.bfloat16)}, ValueError, "rows"),
        ({"rows": jnp.zeros(128, jnp.bfloat16)}, ValueError, "rows"),
        ({"rows": jnp.zeros((5, 128), jnp.int32)}, TypeError, "rows"),
        ({"weight": jnp.zeros((96, 128), jnp.int8)}, TypeError, "weight"),
        ({"weight": jnp.zeros(96, jnp.float8_e4m3fn)}, ValueError, "weight"),
        ({"scale": jnp.zeros((3, 3), jnp.uint8)}, ValueError, "scale"),
        ({"scale": jnp.zeros((96, 4), jnp.uint8)}, ValueError, "scale"),
        ({"scale": jnp.zeros((3, 4))}, TypeError, "scale"),
        ({"scale": None}, TypeError, "scale"),
        ({"backend": "triton"}, ValueError, "triton"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(change, error, message):
    """One error that says what was given and what fits."""
    given = {
        "rows": jnp.zeros((5, 2, 66), jnp.uint8),
        "weight": jnp.zeros((96, 128), jnp.float8_e4m3fn),
        "scale": jnp.full((3, 4), 127, jnp.uint8),
    }
    call = functools.partial(kernels.wkv, **{**given, **change})
    with pytest.raises(error, match=message):
        call()

"""The gate against float64: values, masks, zero products, gradients."""

from __future__ import annotations

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import strategies as st
from tolerances import assert_within

from engram_jax import kernels

SHAPES = ["small", "odd", "v41", "one"]


def operands(tokens, streams, width, dtype=ml_dtypes.bfloat16, seed=0):
    """Draws hidden, kv, q_weight and k_weight."""
    rng = np.random.default_rng(seed)
    shapes = (
        (tokens, streams, width),
        (tokens, (streams + 1) * width),
        (streams, width),
        (streams, width),
    )
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def wide(arrays) -> list[np.ndarray]:
    """Gives the loops the same numbers in float64."""
    return [np.asarray(array).astype(np.float64) for array in arrays]


def magnitude(arrays, **kwargs) -> np.ndarray:
    """Adds up what goes into each output: |hidden| + |gate * value|."""
    hidden, kv, q_weight, k_weight = wide(arrays)
    gates = reference.gate_values(hidden, kv, q_weight, k_weight, **kwargs)
    value = np.abs(kv[:, None, -hidden.shape[-1] :])
    return np.abs(hidden) + gates[..., None] * value


def bits(array) -> np.ndarray:
    """Views bfloat16 or float32 numbers as the integers that they are stored as."""
    array = np.asarray(array)
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


# --- Values ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_golden_outputs_within_one_rounding(run, golden, name, masked):
    """The float64 outputs, rounded once to bfloat16."""
    data = {
        key.split("__")[1]: value
        for key, value in golden("gate").items()
        if key.startswith(f"{name}__")
    }
    arrays = [data[key].view(ml_dtypes.bfloat16) for key in ("hidden", "kv", "q", "k")]
    out = run(
        kernels.gate,
        *map(jnp.asarray, arrays),
        token_mask=jnp.asarray(data["mask"]) if masked else None,
        eps=float(data["eps"]),
    )
    chex.assert_type(out, jnp.bfloat16)
    expected = data["expected_masked" if masked else "expected"]
    weight = magnitude(arrays, eps=float(data["eps"]))
    assert_within("gate_bfloat16", out, expected, weight)


@pytest.mark.parametrize("name", SHAPES)
def test_golden_gates(golden, name):
    """The gates alone, as a heat map shows them."""
    data = golden("gate")
    arrays = [
        jnp.asarray(data[f"{name}__{key}"].view(ml_dtypes.bfloat16))
        for key in ("hidden", "kv", "q", "k")
    ]
    gates = kernels.gate_values(*arrays, eps=float(data[f"{name}__eps"]))
    chex.assert_type(gates, jnp.float32)
    assert_within("gate_float32", gates, data[f"{name}__gate"], 1.0)


@pytest.mark.parametrize("tokens", [0, 1, 13])
@pytest.mark.parametrize(("streams", "width"), [(1, 32), (4, 96), (3, 77)])
def test_any_number_of_tokens_and_streams(run, tokens, streams, width):
    """T = 0, 1 and a prime; widths that are no multiple of anything."""
    arrays = operands(tokens, streams, width)
    out = run(kernels.gate, *map(jnp.asarray, arrays), eps=1e-6)
    expected = reference.gate(*wide(arrays), eps=1e-6)
    assert_within("gate_bfloat16", out, expected, magnitude(arrays, eps=1e-6))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kv_dtype", [jnp.float32, jnp.bfloat16])
def test_the_output_has_the_dtype_of_hidden(run, dtype, kv_dtype):
    """The sum is float32 inside, whatever comes in, and is rounded once."""
    hidden, kv, *weights = operands(5, 2, 64, np.float32)
    arrays = [jnp.asarray(hidden, dtype), jnp.asarray(kv, kv_dtype)]
    arrays += [jnp.asarray(weight, jnp.bfloat16) for weight in weights]
    out = run(kernels.gate, *arrays, eps=1e-6)
    chex.assert_type(out, dtype)
    expected = reference.gate(*wide(arrays), eps=1e-6)
    entry = "gate_float32" if dtype == jnp.float32 else "gate_bfloat16"
    assert_within(entry, out, expected, magnitude(arrays, eps=1e-6))


@hypothesis.given(
    st.integers(0, 2**32),
    st.sampled_from([1e-20, 1e-6, 1e-2]),
    st.sampled_from([1e-6, 1e-3]),
    st.lists(st.integers(-30, 30), min_size=4, max_size=4),
)
def test_operands_of_any_scale(seed, eps, clamp, exponents):
    """Norms near and below eps, and products near and below the clamp."""
    arrays = [
        (np.asarray(array, np.float64) * 2.0**exponent).astype(ml_dtypes.bfloat16)
        for array, exponent in zip(
            operands(3, 2, 32, seed=seed), exponents, strict=True
        )
    ]
    call = jitted_gate(eps, clamp)
    expected = reference.gate(*wide(arrays), eps=eps, clamp=clamp)
    weight = magnitude(arrays, eps=eps, clamp=clamp)
    assert_within("gate_bfloat16", call(*arrays), expected, weight)


@functools.cache
def jitted_gate(eps: float, clamp: float):
    """Compiles the XLA form once for each pair of constants."""
    return jax.jit(functools.partial(kernels.gate, eps=eps, clamp=clamp, backend="xla"))


@pytest.mark.parametrize("zero", ["hidden", "key", "q_weight", "all"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_zero_product_is_finite_and_has_finite_gradients(run, zero, dtype):
    """Pitfall: the slope of the root at 0, and 0 / 0 in the norms."""
    arrays = dict(
        zip(
            ("hidden", "kv", "q_weight", "k_weight"),
            operands(2, 2, 64, np.float32),
            strict=True,
        )
    )
    if zero in ("hidden", "all"):
        arrays["hidden"][:] = 0
    if zero in ("key", "all"):
        arrays["kv"][:, :128] = 0
    if zero == "q_weight":
        arrays["q_weight"][:] = 0
    given = [jnp.asarray(array, dtype) for array in arrays.values()]

    def loss(*given):
        out = run(kernels.gate, *given, eps=1e-20)
        return jnp.square(out.astype(jnp.float32)).sum()

    out = run(kernels.gate, *given, eps=1e-20)
    expected = reference.gate(*wide(given), eps=1e-20)
    entry = "gate_float32" if dtype == jnp.float32 else "gate_bfloat16"
    assert_within(entry, out, expected, magnitude(given, eps=1e-20))
    for gradient in jax.grad(loss, argnums=(0, 1, 2, 3))(*given):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


# --- Masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_shut_gate_leaves_the_stream_bit_for_bit(run, dtype):
    """Pitfall: 0 * NaN; a dead token's row and its streams may hold anything."""
    hidden, kv, *weights = operands(7, 2, 64, dtype)
    mask = np.array([True, False, True, False, False, True, False])
    hidden[1], kv[1] = np.nan, 1
    hidden[3, 0], kv[3] = -np.inf, np.nan
    hidden[4, :, ::2], kv[4] = -0.0, np.inf
    arrays = [hidden, kv, *weights]
    out = run(
        kernels.gate, *map(jnp.asarray, arrays), token_mask=jnp.asarray(mask), eps=1e-6
    )
    np.testing.assert_array_equal(bits(out)[~mask], bits(hidden)[~mask])
    opened = run(kernels.gate, *map(jnp.asarray, arrays), eps=1e-6)
    np.testing.assert_array_equal(bits(out)[mask], bits(opened)[mask])
    assert (bits(out)[mask] != bits(hidden)[mask]).any()


def test_masks_that_shut_all_or_none(run):
    """A rank without real tokens passes its padding through."""
    arrays = [jnp.asarray(array) for array in operands(5, 2, 64)]
    shut = run(kernels.gate, *arrays, token_mask=jnp.zeros(5, bool), eps=1e-6)
    np.testing.assert_array_equal(bits(shut), bits(arrays[0]))
    opened = run(kernels.gate, *arrays, token_mask=jnp.ones(5, bool), eps=1e-6)
    plain = run(kernels.gate, *arrays, eps=1e-6)
    np.testing.assert_array_equal(bits(opened), bits(plain))


def test_a_shut_gate_passes_its_gradient_and_adds_to_no_other(run):
    """NaN in a dead token's numbers reaches no gradient of the others."""
    hidden, kv, *weights = operands(4, 2, 64, np.float32)
    mask = np.array([True, False, True, False])
    alive = [hidden[mask], kv[mask], *weights]
    hidden[~mask], kv[~mask] = np.nan, np.nan
    cotangent = np.random.default_rng(1).normal(size=hidden.shape).astype(np.float32)

    def gradients(arrays, cotangent, token_mask):
        def call(*arrays):
            return run(kernels.gate, *arrays, token_mask=token_mask, eps=1e-6)

        return jax.vjp(call, *map(jnp.asarray, arrays))[1](jnp.asarray(cotangent))

    got = gradients([hidden, kv, *weights], cotangent, jnp.asarray(mask))
    expected = gradients(alive, cotangent[mask], None)
    np.testing.assert_array_equal(got[0][~mask], cotangent[~mask])
    np.testing.assert_array_equal(got[1][~mask], 0)
    for part, whole in zip(
        expected, (got[0][mask], got[1][mask], *got[2:]), strict=True
    ):
        assert_within("gradient_float32", whole, np.asarray(part), np.abs(part).max())


# --- Gradients ------------------------------------------------------------------------


def finite_differences(function, arrays, step=1e-5):
    """Differentiates a float64 function of arrays to a scalar, entry by entry."""
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + step
            above = function(*arrays)
            array[place] = kept - step
            gradient[place] = (above - function(*arrays)) / (2 * step)
            array[place] = kept
        gradients.append(gradient)
    return gradients


def test_gradients_equal_float64_finite_differences(run):
    """With respect to hidden, kv, q_weight and k_weight, through the kernel too."""
    arrays = operands(3, 2, 32, np.float32)
    mask = np.array([True, True, False])
    cotangent = np.random.default_rng(1).normal(size=arrays[0].shape)

    def loss(*arrays):
        out = run(kernels.gate, *arrays, token_mask=jnp.asarray(mask), eps=1e-3)
        return (out * jnp.asarray(cotangent, jnp.float32)).sum()

    def reference_loss(*arrays):
        return float(
            (reference.gate(*arrays, eps=1e-3, token_mask=mask) * cotangent).sum()
        )

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, arrays))
    for gradient, expected in zip(
        got, finite_differences(reference_loss, wide(arrays)), strict=True
    ):
        scale = np.abs(expected).max()
        assert_within("gradient_float32", gradient, expected, scale)


def test_gradients_have_the_dtypes_of_their_operands(run):
    """In bfloat16 they are those of float32, rounded."""
    arrays = [jnp.asarray(array) for array in operands(5, 2, 64)]
    cotangent = jnp.asarray(operands(5, 2, 64, seed=1)[0])

    def call(*arrays):
        return run(kernels.gate, *arrays, eps=1e-6)

    got = jax.vjp(call, *arrays)[1](cotangent)
    chex.assert_trees_all_equal_dtypes(got, tuple(arrays))
    single = [array.astype(jnp.float32) for array in arrays]
    plain = functools.partial(kernels.gate, eps=1e-6, backend="xla")
    expected = jax.vjp(plain, *single)[1](cotangent.astype(jnp.float32))
    for gradient, wanted in zip(got, expected, strict=True):
        scale = float(jnp.abs(wanted).max())
        assert_within("gradient_bfloat16", gradient, np.asarray(wanted), scale)


# --- Transformations ------------------------------------------------------------------


def test_jit_traces_once(run):
    """Other numbers and another mask run the compiled code."""
    run(kernels.gate, *map(jnp.asarray, operands(5, 2, 64)), eps=1e-6)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(arrays, mask):
        return run(kernels.gate, *arrays, token_mask=mask, eps=1e-6)

    for seed in range(2):
        arrays = operands(5, 2, 64, seed=seed)
        mask = np.arange(5) % 2 == seed
        expected = reference.gate(*wide(arrays), eps=1e-6, token_mask=mask)
        out = call(arrays, mask)
        assert_within("gate_bfloat16", out, expected, magnitude(arrays, eps=1e-6))


def test_vmap_scan_and_checkpoint(backend, run):
    """Each equals the flat batch."""
    hidden, kv, q_weight, k_weight = map(jnp.asarray, operands(12, 2, 64))
    flat = run(kernels.gate, hidden, kv, q_weight, k_weight, eps=1e-6)
    steps = hidden.reshape(3, 4, 2, 64), kv.reshape(3, 4, -1)

    @jax.checkpoint
    def call(hidden, kv):
        return run(kernels.gate, hidden, kv, q_weight, k_weight, eps=1e-6)

    mapped = jax.jit(jax.vmap(call))(*steps)
    _, scanned = jax.lax.scan(lambda count, step: (count, call(*step)), 0, steps)
    for rows in (mapped, scanned):
        expected = np.asarray(flat).astype(np.float64)
        assert_within("gate_bfloat16", rows.reshape(flat.shape), expected, 1.0)

    if backend == "pallas_interpret":
        reason = "JAX does not rematerialise the interpreter's ordered effects"
        pytest.skip(reason=reason)

    def loss(hidden, kv):
        return jnp.square(call(hidden, kv).astype(jnp.float32)).sum()

    gradients = jax.vmap(jax.grad(loss, argnums=(0, 1)))(*steps)
    chex.assert_tree_all_finite(gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, steps)


def test_x64_changes_nothing(run):
    """A float64 eps does not pull the float32 arithmetic to float64."""
    arrays = operands(5, 2, 64)
    plain = run(kernels.gate, *map(jnp.asarray, arrays), eps=1e-6)
    with jax.enable_x64(True):
        out = run(kernels.gate, *map(jnp.asarray, arrays), eps=np.float64(1e-6))
    chex.assert_type(out, jnp.bfloat16)
    np.testing.assert_array_equal(bits(out), bits(plain))


# --- Refusals -------------------------------------------------------------------------


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": jnp.zeros((5, 128))}, ValueError, "hidden"),
        ({"hidden": jnp.zeros((5, 2, 64), jnp.int32)}, TypeError, "hidden"),
        ({"kv": jnp.zeros((5, 128))}, ValueError, "kv"),
        ({"kv": jnp.zeros((4, 192))}, ValueError, "kv"),
        ({"kv": jnp.zeros((5, 192), jnp.float8_e4m3fn)}, TypeError, "kv"),
        ({"q_weight": jnp.zeros((2, 65))}, ValueError, "q_weight"),
        ({"k_weight": jnp.zeros(128)}, ValueError, "k_weight"),
        ({"token_mask": jnp.zeros(4, bool)}, ValueError, "token_mask"),
        ({"token_mask": jnp.zeros(5)}, (ValueError, TypeError), "token_mask"),
        ({"backend": "triton"}, ValueError, "triton"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(change, error, message):
    """One error that says what was given and what fits."""
    names = ("hidden", "kv", "q_weight", "k_weight")
    given = dict(zip(names, map(jnp.asarray, operands(5, 2, 64)), strict=True))
    with pytest.raises(error, match=message):
        kernels.gate(**{**given, **change}, eps=1e-6)

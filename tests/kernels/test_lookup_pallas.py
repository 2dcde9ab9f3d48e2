"""The row lookup's kernel: its arithmetic, its addresses, and that it compiles.

The inline code runs on simulated threads (`simulated_threads`) and must equal the XLA
form bit for bit; a read outside a table fails there. On a GPU the kernel itself runs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernels import aot
from kernels.simulated_threads import Memory, Word, simulate

from engram_jax import kernels
from engram_jax.kernels import lookup_pallas, mosaic_pallas

WIDTHS = [32, 64, 96, 256, 512]


def table(rows: int, width: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, width), np.uint8)
    scale = rng.integers(0, 256, (rows, width // 32), np.uint8)
    return jnp.asarray(weight), jnp.asarray(scale)


def xla_form(weight, scale, ids, start, end, *, packed):
    function = kernels.lookup_packed if packed else kernels.lookup
    call = jax.jit(functools.partial(function, backend="xla"))
    return np.asarray(call(weight, scale, ids, row_start=start, row_end=end))


def run_inline_code(monkeypatch, weight, scale, ids, start, end, *, packed):
    width = weight.shape[1] + (scale.shape[1] if packed else 0)
    out = np.full((len(ids), width), 0xAA, np.uint8 if packed else ml_dtypes.bfloat16)
    sizes = lookup_pallas.Sizes(weight.shape[1], len(ids))
    pieces = sizes.pieces(packed)
    inputs = {
        "weight": np.asarray(weight),
        "scale": np.asarray(scale),
        "ids": np.asarray(ids, np.int32),
        "start": np.array([start], np.int32),
        "end": np.array([end], np.int32),
    }
    # A few threads more than there are pieces, as in the last block of a launch.
    memory = Memory(inputs, {"out": out}, threads=pieces + 5)
    simulate(monkeypatch, memory, lookup_pallas)
    locate = functools.partial(
        lookup_pallas.local_row,
        {name: name for name in memory.names},
        rows_in_table=len(weight),
        sizes=sizes,
    )
    move = lookup_pallas.copy_packed if packed else lookup_pallas.dequantize
    move(locate, memory.address("out"), [Word(np.arange(pieces + 5))], sizes)
    return out, memory


def assert_same_rows(actual, expected):
    """Bit for bit, but for NaN's bits and results below 2**-126."""
    if actual.dtype == np.uint8:
        np.testing.assert_array_equal(actual, expected)
        return
    a, e = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(e))
    # The XLA form may give a zero of the same sign where the result is subnormal.
    tiny = (np.abs(a) < 2.0**-126) & (np.abs(e) < 2.0**-126)
    np.testing.assert_array_equal(np.signbit(a)[tiny], np.signbit(e)[tiny])
    plain = ~tiny & ~np.isnan(a)
    np.testing.assert_array_equal(
        actual.view(np.uint16)[plain], expected.view(np.uint16)[plain]
    )


def test_all_byte_pairs_decode_as_the_format_says():
    """Pitfall: NaN codes, scale bytes 0 and 255, subnormals, -0."""
    values, scales = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    word = Word(values.reshape(-1) * 0x01010101)
    scale = mosaic_pallas.e8m0_pair(Word(scales.reshape(-1)))
    value = values.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.where(scales == 255, np.nan, 2.0 ** (scales - 127.0))
    with np.errstate(over="ignore", invalid="ignore"):
        exact = (value * factor).astype(np.float32).astype(ml_dtypes.bfloat16)
    exact = exact.reshape(-1).astype(np.float32)
    for in_order in (True, False):
        for pair in mosaic_pallas.decode_e4m3(word, scale, in_order=in_order):
            for half in pair._halves().T:
                np.testing.assert_array_equal(half, exact)
                number = ~np.isnan(exact)
                np.testing.assert_array_equal(
                    np.signbit(half)[number], np.signbit(exact)[number]
                )


def test_pairs_take_the_bytes_they_name():
    word, one = Word.of(0x50403828), Word.of(0x3F803F80)  # 0.5, 1, 2, 8 as e4m3
    first, second = mosaic_pallas.decode_e4m3(word, one)
    assert [*first._halves()[0], *second._halves()[0]] == [0.25, 1, 2, 8]
    even, odd = mosaic_pallas.decode_e4m3(word, one, in_order=False)
    assert [*even._halves()[0], *odd._halves()[0]] == [0.25, 2, 1, 8]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_inline_code_equals_xla_form(monkeypatch, width, packed):
    weight, scale = table(37, width)
    ids = np.array([0, 36, 5, 5, -1, 37, 2**31 - 1, -(2**31), 20, 9, 11])
    expected = xla_form(weight, scale, ids, 0, 37, packed=packed)
    actual, _ = run_inline_code(monkeypatch, weight, scale, ids, 0, 37, packed=packed)
    assert_same_rows(actual, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_outside_the_window_touch_no_memory(monkeypatch, packed):
    weight, scale = table(10, 64)
    ids = np.array([99, 100, 104, 105, 109, 110, -1])
    # The window may promise more rows than the table has.
    for start, end in [(100, 105), (100, 110), (100, 1000), (100, 100)]:
        expected = xla_form(weight, scale, ids, start, end, packed=packed)
        actual, memory = run_inline_code(
            monkeypatch, weight, scale, ids, start, end, packed=packed
        )
        assert_same_rows(actual, expected)
        rows = sum(start <= i < min(end, start + 10) for i in ids)
        read = memory.touched["weight"] + memory.touched["scale"]
        assert read == rows * (66 // 2 if packed else 2 * 64 // 8)


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_without_rows_reads_as_zeros(monkeypatch, packed):
    weight, scale = table(0, 32)
    out, _ = run_inline_code(
        monkeypatch, weight, scale, np.array([0, 3]), 0, 0, packed=packed
    )
    assert not out.view(np.uint8).any()


@pytest.mark.parametrize("packed", [False, True])
def test_no_ids_give_no_rows(packed):
    weight, scale = table(4, 32)
    ids = jnp.zeros((0,), jnp.int32)
    out = lookup_pallas.lookup_pallas(weight, scale, ids, 0, 4, packed=packed)
    assert out.shape == (0, 33 if packed else 32)


def test_refuses_what_it_cannot_do():
    weight, scale = table(4, 48)
    ids = jnp.zeros((3,), jnp.int32)
    reason = lookup_pallas.unsupported_reason(weight, scale, ids)
    assert reason == "rows have 48 values, not a multiple of 32"
    weight, scale = table(4, 32)
    assert lookup_pallas.unsupported_reason(weight, scale, ids) is None
    reason = lookup_pallas.unsupported_reason(weight, scale, ids, interpret=True)
    assert "interpreter" in str(reason)
    with pytest.raises(NotImplementedError, match="interpreter"):
        lookup_pallas.lookup_pallas(
            weight, scale, ids, 0, 4, packed=False, interpret=True
        )


def operands(rows, width, n, **kind):
    return (
        aot.operand((rows, width), jnp.float8_e4m3fn, **kind),
        aot.operand((rows, width // 32), jnp.uint8, **kind),
        aot.operand((n,), jnp.int32),
        aot.operand((), jnp.int32),
        aot.operand((), jnp.int32),
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "n"),
    [(384_006_168, 256, 98_304), (384_006_168, 256, 24), (1000, 96, 7), (0, 32, 3)],
)
def test_compiles_for_hopper(rows, width, n, packed):
    """Pitfall: a table of over 2**31 values, and no copy of it."""
    function = functools.partial(lookup_pallas.lookup_pallas, packed=packed)
    compiled = aot.compile_for_hopper(function, *operands(rows, width, n))
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion" not in aot.text_of(compiled)  # nothing but the kernel


def test_compiles_for_a_table_in_host_memory():
    function = functools.partial(lookup_pallas.lookup_pallas, packed=False)
    compiled = aot.compile_for_hopper(
        function, *operands(1000, 256, 24, memory_kind="pinned_host")
    )
    assert aot.temporary_bytes(compiled) == 0
    assert "copy" not in aot.text_of(compiled)


@pytest.mark.parametrize("x64", [False, True])
def test_compiles_inside_transformations(x64):
    def program(weight, scale, ids):
        def read(ids):
            rows = kernels.lookup(weight, scale, ids, row_start=3, backend="pallas")
            packed = kernels.lookup_packed(weight, scale, ids, backend="pallas")
            return rows, packed

        _, scanned = jax.lax.scan(lambda carry, i: (carry, read(i)), 0, ids)
        return scanned, jax.vmap(jax.checkpoint(read))(ids)

    with jax.enable_x64(x64):
        compiled = aot.compile_for_hopper(
            program,
            aot.operand((1000, 64), jnp.float8_e4m3fn),
            aot.operand((1000, 2), jnp.uint8),
            aot.operand((5, 7), jnp.int32),
        )
    assert aot.text_of(compiled).count("mosaic_gpu") >= 4


def test_compiles_for_row_shards():
    """Each of four GPUs answers for a quarter of the rows, its window traced."""
    mesh = aot.hopper_mesh(4)
    split = jax.sharding.NamedSharding(mesh, P("device"))

    def read(weight, scale, ids):
        start = jax.lax.axis_index("device") * len(weight)
        rows = kernels.lookup(weight, scale, ids, row_start=start, backend="pallas")
        return jax.lax.psum(rows, "device")

    compiled = aot.compile_for_hopper(
        jax.shard_map(
            read, mesh=mesh, in_specs=(P("device"), P("device"), P()), out_specs=P()
        ),
        jax.ShapeDtypeStruct((400, 64), jnp.float8_e4m3fn, sharding=split),
        jax.ShapeDtypeStruct((400, 2), jnp.uint8, sharding=split),
        jax.ShapeDtypeStruct(
            (9,), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, P())
        ),
        devices=4,
    )
    assert "mosaic_gpu" in aot.text_of(compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_equals_xla_form(width, packed):
    weight, scale = table(999, width)
    ids = np.random.default_rng(1).integers(-50, 1050, 5000).astype(np.int32)
    for in_flight in (1, 2, 4):
        actual = lookup_pallas.lookup_pallas(
            weight, scale, jnp.asarray(ids), 7, 900, packed=packed, in_flight=in_flight
        )
        expected = xla_form(weight, scale, ids, 7, 900, packed=packed)
        assert_same_rows(np.asarray(actual), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_kernel_reads_pinned_host_memory(packed):
    weight, scale = table(999, 256)
    host = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    on_host = jax.device_put((weight, scale), host)
    ids = np.random.default_rng(1).integers(-50, 1050, 500).astype(np.int32)
    actual = lookup_pallas.lookup_pallas(
        *on_host, jnp.asarray(ids), 0, 999, packed=packed
    )
    expected = xla_form(weight, scale, ids, 0, 999, packed=packed)
    assert_same_rows(np.asarray(actual), expected)


@pytest.mark.gpu
def test_kernel_reads_a_table_of_more_than_2_31_values():
    """Pitfall: offsets of values and scales overflow int32, at D = 512."""
    rows = 2**23

    @jax.jit  # makes the bytes without a wider copy
    def make_table():
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, 512), 0)
        return (row * 40503 >> 9).astype(jnp.uint8)

    weight = make_table()
    scale = jnp.full((rows, 16), 127, jnp.uint8)
    ids = np.array([0, 4_194_303, 4_194_304, rows - 2, rows - 1, rows], np.int32)
    out = lookup_pallas.lookup_pallas(
        weight, scale, jnp.asarray(ids), 0, rows, packed=True
    )
    expected = (ids.astype(np.uint32) * np.uint32(40503) >> 9).astype(np.uint8)
    expected[-1] = 0
    wanted = np.broadcast_to(expected[:, None], (len(ids), 512))
    np.testing.assert_array_equal(np.asarray(out)[:, :512], wanted)

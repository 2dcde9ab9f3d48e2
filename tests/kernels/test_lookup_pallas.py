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


def kernel(weight, scale, ids, start, end, **options):
    """The kernel over one table."""
    bounds = jnp.stack([jnp.int32(start), jnp.int32(end)])[None]
    rows = lookup_pallas.lookup_pallas(
        [weight], [scale], ids[:, None, None], bounds, **options
    )
    return rows[:, 0, 0]


def run_inline_code(monkeypatch, weight, scale, ids, start, end, *, packed):
    width = weight.shape[1] + (scale.shape[1] if packed else 0)
    out = np.full((len(ids), width), 0xAA, np.uint8 if packed else ml_dtypes.bfloat16)
    sizes = lookup_pallas.Sizes(weight.shape[1], len(ids))
    pieces = sizes.pieces(packed)
    inputs = {
        "weight 0": np.asarray(weight),
        "scale 0": np.asarray(scale),
        "ids": np.asarray(ids, np.int32),
        "bounds": np.array([start, end], np.int32),
    }
    # A few threads more than there are pieces, as in the last block of a launch.
    memory = Memory(inputs, {"out": out}, threads=pieces + 5)
    simulate(monkeypatch, memory, lookup_pallas)
    locate = functools.partial(
        lookup_pallas.local_row,
        {name: name for name in memory.names},
        n_hash_cols=1,
        rows_in_tables=[len(weight)],
        width=sizes.width,
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
@pytest.mark.parametrize("columns", [1, 5])
def test_layers_have_their_own_tables_and_bounds(monkeypatch, packed, columns):
    """Three layers, the second without a row: each id goes to its layer's table."""
    tables = [table(rows, 64, seed=rows) for rows in (37, 0, 11)]
    bounds = np.array([[0, 37], [5, 9], [100, 108]], np.int32)
    rng = np.random.default_rng(columns)
    ids = rng.integers(-2, 40, (4, 3, columns)).astype(np.int32)
    ids[:, 2] = rng.integers(97, 113, (4, columns))
    sizes = lookup_pallas.Sizes(64, ids.size)
    kind = sizes.out_type(packed)
    out = np.full(kind.shape, 0xAA, np.uint8 if packed else ml_dtypes.bfloat16)
    weights, scales = zip(*tables, strict=True)
    inputs = {"ids": ids, "bounds": bounds}
    inputs |= lookup_pallas.by_layer(weight=weights, scale=scales)
    inputs = {name: np.asarray(array) for name, array in inputs.items()}
    memory = Memory(inputs, {"out": out}, threads=sizes.pieces(packed))
    simulate(monkeypatch, memory, lookup_pallas)
    locate = functools.partial(
        lookup_pallas.local_row,
        {name: name for name in memory.names},
        n_hash_cols=columns,
        rows_in_tables=[37, 0, 11],
        width=64,
    )
    move = lookup_pallas.copy_packed if packed else lookup_pallas.dequantize
    move(locate, memory.address("out"), [Word(np.arange(memory.threads))], sizes)
    out = out.reshape(*ids.shape, -1)
    for layer, (start, end) in enumerate(bounds):
        read = functools.partial(xla_form, *tables[layer], packed=packed)
        expected = read(ids[:, layer], start, end)
        assert_same_rows(out[:, layer], expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("first", [0, 2, 3, 4, 9])
def test_columns_are_read_where_they_lie(monkeypatch, packed, first):
    """Two of five columns, of which the last windows have one or none."""
    tables = [table(rows, 64, seed=rows) for rows in (37, 11)]
    bounds = np.array([[0, 37, first], [100, 108, first]], np.int32)
    rng = np.random.default_rng(first)
    ids = rng.integers(-2, 40, (4, 2, 5)).astype(np.int32)
    ids[:, 1] = rng.integers(98, 112, (4, 5))
    sizes = lookup_pallas.Sizes(64, 4 * 2 * 2)
    kind = sizes.out_type(packed)
    out = np.full(kind.shape, 0xAA, np.uint8 if packed else ml_dtypes.bfloat16)
    weights, scales = zip(*tables, strict=True)
    inputs = {"ids": ids, "bounds": bounds}
    inputs |= lookup_pallas.by_layer(weight=weights, scale=scales)
    inputs = {name: np.asarray(array) for name, array in inputs.items()}
    memory = Memory(inputs, {"out": out}, threads=sizes.pieces(packed) + 5)
    simulate(monkeypatch, memory, lookup_pallas)
    locate = functools.partial(
        lookup_pallas.local_row,
        {name: name for name in memory.names},
        n_hash_cols=5,
        rows_in_tables=[37, 11],
        width=64,
        columns=2,
    )
    move = lookup_pallas.copy_packed if packed else lookup_pallas.dequantize
    move(locate, memory.address("out"), [Word(np.arange(memory.threads))], sizes)
    out = out.reshape(4, 2, 2, -1)
    cut = np.pad(ids, ((0, 0), (0, 0), (0, 9)), constant_values=-1)
    for layer, (start, end, _) in enumerate(bounds):
        read = functools.partial(xla_form, *tables[layer], packed=packed)
        expected = read(cut[:, layer, first : first + 2], start, end)
        assert expected.any() == (first < 5)
        assert_same_rows(out[:, layer], expected)


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
        read = memory.touched["weight 0"] + memory.touched["scale 0"]
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
    out = kernel(weight, scale, ids, 0, 4, packed=packed)
    assert out.shape == (0, 33 if packed else 32)


def test_refuses_what_it_cannot_do():
    weight, scale = table(4, 48)
    ids = jnp.zeros((3,), jnp.int32)
    reason = lookup_pallas.unsupported_reason([weight], ids)
    assert reason == "rows have 48 values, not a multiple of 32"
    weight, scale = table(4, 32)
    assert lookup_pallas.unsupported_reason([weight], ids) is None
    reason = lookup_pallas.unsupported_reason([weight], ids, interpret=True)
    assert "interpreter" in str(reason)
    wider, _ = table(4, 64)
    assert lookup_pallas.unsupported_reason([weight, wider], ids) == (
        "tables differ in their rows' width: [32, 64]"
    )
    with pytest.raises(NotImplementedError, match="interpreter"):
        kernel(weight, scale, ids, 0, 4, packed=False, interpret=True)


def operands(rows, width, tokens, *, layers=1, columns=1, **kind):
    """Operands of `lookup_pallas`, as shapes."""
    return (
        [aot.operand((rows, width), jnp.float8_e4m3fn, **kind)] * layers,
        [aot.operand((rows, width // 32), jnp.uint8, **kind)] * layers,
        aot.operand((tokens, layers, columns), jnp.int32),
        aot.operand((layers, 2), jnp.int32),
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


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_for_two_layers(packed):
    """Rows of both come out in their places: no copy puts them together."""
    function = functools.partial(lookup_pallas.lookup_pallas, packed=packed)
    compiled = aot.compile_for_hopper(
        function, *operands(192_003_084, 256, 8192, layers=2, columns=12)
    )
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion" not in aot.text_of(compiled)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_for_some_columns(packed):
    """Nothing cuts them out of the ids first."""
    function = functools.partial(lookup_pallas.lookup_pallas, packed=packed, columns=5)
    weights, scales, ids, _ = operands(1000, 256, 8192, layers=2, columns=12)
    bounds = aot.operand((2, 3), jnp.int32)
    compiled = aot.compile_for_hopper(function, weights, scales, ids, bounds)
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion" not in aot.text_of(compiled)


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
        actual = kernel(
            weight, scale, jnp.asarray(ids), 7, 900, packed=packed, in_flight=in_flight
        )
        expected = xla_form(weight, scale, ids, 7, 900, packed=packed)
        assert_same_rows(np.asarray(actual), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [3, 900])
def test_kernel_reads_the_tables_of_all_layers(tokens, packed):
    weights, scales = zip(*(table(n, 256, seed=n) for n in (999, 40, 700)), strict=True)
    bounds = jnp.array([[7, 900], [0, 40], [500, 5000]], jnp.int32)
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(-50, 1250, (tokens, 3, 12)), jnp.int32)
    rows = {
        backend: np.asarray(
            kernels.lookup_layers(
                weights, scales, ids, bounds, packed=packed, backend=backend
            )
        )
        for backend in ("pallas", "xla")
    }
    assert_same_rows(rows["pallas"], rows["xla"])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("first", [0, 7, 10, 12])
def test_kernel_reads_columns_where_they_lie(first, packed):
    weights, scales = zip(*(table(n, 256, seed=n) for n in (999, 40)), strict=True)
    bounds = jnp.array([[7, 900, first], [0, 40, first]], jnp.int32)
    ids = np.random.default_rng(1).integers(-50, 1050, (900, 2, 12))
    rows = {
        backend: np.asarray(
            kernels.lookup_layers(
                weights,
                scales,
                jnp.asarray(ids, jnp.int32),
                bounds,
                columns=5,
                packed=packed,
                backend=backend,
            )
        )
        for backend in ("pallas", "xla")
    }
    assert rows["xla"].shape[2] == 5
    assert_same_rows(rows["pallas"], rows["xla"])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_kernel_reads_pinned_host_memory(packed):
    weight, scale = table(999, 256)
    host = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    there, scale_there = jax.device_put((weight, scale), host)
    ids = np.random.default_rng(1).integers(-50, 1050, 500).astype(np.int32)
    actual = kernel(there, scale_there, jnp.asarray(ids), 0, 999, packed=packed)
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
    out = kernel(weight, scale, jnp.asarray(ids), 0, rows, packed=True)
    expected = (ids.astype(np.uint32) * np.uint32(40503) >> 9).astype(np.uint8)
    expected[-1] = 0
    wanted = np.broadcast_to(expected[:, None], (len(ids), 512))
    np.testing.assert_array_equal(np.asarray(out)[:, :512], wanted)

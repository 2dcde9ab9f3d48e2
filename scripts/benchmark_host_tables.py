"""Tables in host memory, for `scripts/benchmark.py --device host`.

Random rows of a table of 17 GB (64 million rows of 264 bytes): read by the GPU itself
from pinned memory, gathered by host threads and copied, and fetched behind a step. The
rows are checked against the function that made them. Times are by the wall clock,
medians over ids that are new each time. What is required comes first. Without a GPU the
table is small, and nothing is required.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import device_times
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_record import Result
from flax import nnx

import engram_jax
from engram_jax import EngramPrefetch, kernels
from engram_jax.host_memory import HostMapping, HostMemoryOptions
from engram_jax.host_storage import (
    MappedFileTable,
    PinnedHostTable,
    pinned_host_sharding,
)
from engram_jax.host_table import RecordTable
from engram_jax.safetensors_file import SafetensorsWriter, read_header
from engram_jax.staging import host_view

DIM, COLUMNS = 256, 24
ROW_BYTES = DIM + DIM // 32
GPU_ROWS, CPU_ROWS = 64_000_000, 2_000_000
FEW, MANY = (1, 16), 4096
PINNED_TOKENS = (1, 16, 64, 512, 4096)
ROUNDS = 15
STEPS, STEP_ROUNDS = 30, 12
EARLY_COPIES = 2
LOOPS = 15


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Says how long a part took."""
    begin = time.perf_counter()
    yield
    print(f"[{name}: {time.perf_counter() - begin:.1f} s]", flush=True)


def table_bytes(rows: Any, xp: Any = np) -> tuple[Any, Any]:
    """Gives values and scales as a function of the row's number."""
    number = xp.asarray(rows).astype(xp.uint32)[:, None]
    x = number * xp.uint32(2654435761) + xp.arange(DIM, dtype=xp.uint32) * xp.uint32(
        40503
    )
    x = (x ^ (x >> 15)) * xp.uint32(2246822519)
    groups = xp.arange(DIM // 32, dtype=xp.uint32)
    scales = 118 + (number * xp.uint32(7) + groups) % 12
    # Codes 0 to 126, so that no value is NaN.
    return ((x >> 13) % 127).astype(xp.uint8), scales.astype(xp.uint8)


@functools.cache
def make_records(rows: int) -> RecordTable:
    """Makes the same table of rows with values and scales side by side, once."""
    pinned = make_pinned(rows)
    mapping = HostMapping(None, rows * ROW_BYTES, HostMemoryOptions())
    records = np.frombuffer(mapping.buffer, np.uint8).reshape(rows, ROW_BYTES)
    values = host_view(pinned.weight[...]).view(np.uint8)
    scales = host_view(pinned.scale[...])

    def fill(start):
        part = slice(start, start + (1 << 17))
        records[part, :DIM] = values[part]
        records[part, DIM:] = scales[part]

    with futures.ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, rows, 1 << 17)))
    mapping.settle()
    return RecordTable(records, mapping.report)


@functools.cache
def make_pinned(rows: int) -> PinnedHostTable:
    """Makes a table in pinned memory, once for all suites; a GPU makes the bytes."""
    host = pinned_host_sharding()
    weight, scale = _make_in_pieces(rows)
    return PinnedHostTable(weight, scale, host)


def _make_in_pieces(rows: int) -> tuple[jax.Array, jax.Array]:
    """Makes the bytes in place; all at once would need several times their memory."""
    step = min(rows, 2_000_000)
    assert rows % step == 0
    weight = jnp.zeros((rows, DIM), jnp.uint8)
    scale = jnp.zeros((rows, DIM // 32), jnp.uint8)

    def put(weight, scale, start):
        new = table_bytes(start + jnp.arange(step), jnp)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0)
            for whole, part in zip((weight, scale), new, strict=True)
        )

    put = jax.jit(put, donate_argnums=(0, 1))
    for start in range(0, rows, step):
        weight, scale = put(weight, scale, start)
    return weight, scale


def make_stack(storage: Any) -> engram_jax.EngramStack:
    """Makes a stack of one layer over a table; only its rows are used."""
    config = engram_jax.EngramConfig(
        layer_ids=(1,),
        num_embeddings=(storage.num_rows,),
        max_ngram_size=4,
        vocab_base=storage.num_rows // (COLUMNS + 2),
        n_heads=8,
        head_dim=DIM,
        pad_token_id=0,
        hidden_size=64,
        hc_mult=1,
        rms_norm_eps=1e-6,
        vocab_size=1000,
        compressed_vocab_size=1000,
    )
    layout = engram_jax.EngramLayout.from_config(config)
    layer = engram_jax.Engram(
        engram_jax.ParallelEngramEmbedding.from_storage(storage),
        jnp.zeros((128, COLUMNS * DIM), jnp.float8_e4m3fn),
        jnp.full((4, COLUMNS * DIM // 32), 127, jnp.uint8),
        jnp.ones((1, 64), jnp.bfloat16),
        jnp.ones((1, 64), jnp.bfloat16),
        eps=1e-6,
    )
    state = engram_jax.NgramHashState(layout, np.arange(1000, dtype=np.int32))
    return engram_jax.EngramStack(config, state, {1: layer})


def random_hashes(tokens: int, rows: int, seed: int) -> np.ndarray:
    """Makes ids [T, 1, C] that no cache has seen."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, rows, (tokens, 1, COLUMNS)).astype(np.int32)


def check_rows(rows: Any, hashes: np.ndarray) -> None:
    """Compares rows, bit for bit, with what made the table."""
    wanted = np.concatenate(table_bytes(hashes.reshape(-1)), axis=1)
    if not np.array_equal(np.asarray(rows).reshape(wanted.shape), wanted):
        raise AssertionError("rows are not those of the table")


def times_ms(call: Callable[[np.ndarray], Any], tokens: int, rows: int) -> list[float]:
    """Times a lookup of ids that are new each time, after checking one."""
    check_rows(call(random_hashes(tokens, rows, 0)), random_hashes(tokens, rows, 0))
    times = []
    for seed in range(1, ROUNDS + 1):
        hashes = random_hashes(tokens, rows, seed)
        begin = time.perf_counter()
        jax.block_until_ready(call(hashes))
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def direct_lookup(table: nnx.Module) -> functools.partial:
    """Makes the jitted reading of a batch's rows by the device itself."""
    graph, state = nnx.split(table)

    @jax.jit
    def read(state, hashes):
        # An operand, not a captured array: that would be copied into the program.
        table: Any = nnx.merge(graph, state)
        return table.lookup_packed(hashes[:, 0])

    return functools.partial(read, state)


@jax.jit
def packed_rows(batch):
    """Brings a batch's rows to the device."""
    return batch.rows[0].packed()


def exposed(stack: Any, **options: Any) -> tuple[Callable, EngramPrefetch]:
    """Gives a lookup through a prefetch that nothing hides."""
    prefetch = EngramPrefetch(stack, **options)
    direct = direct_lookup(stack.layers[1].embedding)

    def call(hashes):
        batch = prefetch.start(hashes).result()
        if batch.rows is None:  # few tokens: the GPU reads the table itself
            return direct(batch.hash_ids)
        return packed_rows(batch)

    return call, prefetch


def program_of(lookup: functools.partial, tokens: int) -> str:
    """Gives what a lookup has compiled, kernels and all, as text."""
    # Not the compiled program's text: in it, kernels know the source lines they are of.
    hashes = jax.ShapeDtypeStruct((tokens, 1, COLUMNS), jnp.int32)
    return str(jax.make_jaxpr(lookup.func)(*lookup.args, hashes))


def chooses_direct(stack: Any, direct: functools.partial, tokens: int) -> bool:
    """Tells whether the library leaves a batch to the program of the direct lookup.

    Args:
        stack: whose rows `EngramPrefetch` is to get.
        direct: the lookup.
        tokens: of the batch.
    """
    hashes = np.zeros((tokens, 1, COLUMNS), np.int32)
    with EngramPrefetch(stack) as prefetch:
        batch = prefetch.start(hashes).result()
    if batch.rows is not None:
        return False
    own = direct_lookup(stack.layers[1].embedding)  # what the layer then runs
    return program_of(own, tokens) == program_of(direct, tokens)


def compare_kernels(chosen, direct, tokens: int, rows: int) -> Iterator[Result]:
    """Compares what runs on the GPU for few tokens, where the host's time is noise."""
    hashes = [random_hashes(tokens, rows, seed) for seed in range(100, 140)]
    # Each has ids of its own: rows that were just read would come from a cache.
    calls = [
        functools.partial((direct, chosen)[turn % 2], ids)
        for turn, ids in enumerate(hashes)
    ]
    runs = device_times.trace(calls)
    if runs is None:
        return
    flat, through = (device_times.median_of(runs[start::2], max) for start in (0, 1))
    yield Result(
        "host_tables",
        f"as chosen, T = {tokens}, kernels over the direct lookup's",
        round(through / flat, 2),  # the timer's ticks are 1 % of this
        "x",
        at_most=1.0,
        detail={"us": through, "direct_us": flat},
    )


def sum_of_words(rows: jax.Array) -> jax.Array:
    """Adds up packed rows as 32-bit words."""
    words = jax.lax.bitcast_convert_type(rows.reshape(-1, 4), jnp.uint32)
    return words.sum(dtype=jnp.uint32)


@jax.jit
def known_sum(hashes):
    """Gives the sum of what made the rows; NumPy takes far longer than a step."""
    return sum_of_words(jnp.concatenate(table_bytes(hashes.reshape(-1), jnp), axis=1))


def measure_step(stack: Any, rows: int, tokens: int) -> Iterator[Result]:
    """Compares a step with rows fetched behind it with the same step without."""
    on_gpu = jax.default_backend() == "gpu"
    side, repeats = (8192, 4) if on_gpu else (512, 2)
    weight = (
        jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16) / side**0.5
    )

    def work(x, weight):
        for _ in range(repeats):
            x = jnp.tanh(x @ weight)
        return x

    plain = jax.jit(work)

    @jax.jit
    def with_rows(x, weight, batch):
        # Handed out as they are: nothing but their coming is added to the step.
        return work(x, weight), batch.rows[0].packed()

    hashes = [random_hashes(tokens, rows, seed) for seed in range(STEPS + 1)]
    wanted = [int(known_sum(ids)) for ids in hashes[:-1]]

    def run_plain():
        x = weight
        begin = time.perf_counter()
        for _ in range(STEPS):
            x = plain(x, weight)
        jax.block_until_ready(x)
        return time.perf_counter() - begin

    def run_with_rows(prefetch):
        x = weight
        found = []
        pending = prefetch.start(hashes[0])
        while not pending.done():  # the first has no step to hide behind
            time.sleep(0.001)
        begin = time.perf_counter()
        for following in hashes[1:]:
            batch = pending.result()
            pending = prefetch.start(following)
            x, packed = with_rows(x, weight, batch)
            found.append(packed)
        jax.block_until_ready(x)
        taken = time.perf_counter() - begin
        prefetch.join()
        if [int(sum_of_words(packed)) for packed in found] != wanted:
            raise AssertionError("a step got the rows of another batch")
        return taken

    times: dict[str, list[float]] = {"plain": [], "rows": []}
    with EngramPrefetch(stack, direct_tokens=0) as prefetch:
        runs = {"plain": run_plain, "rows": lambda: run_with_rows(prefetch)}
        for run in runs.values():
            run()
        if not on_gpu:
            return  # step and threads would share the same cores
        for turn in range(STEP_ROUNDS):  # a GPU's clock drifts: in turns, and in pairs
            for name in sorted(runs, reverse=bool(turn % 2)):
                times[name].append(1e3 * runs[name]() / STEPS)
    ratios = [a / b for a, b in zip(times["rows"], times["plain"], strict=True)]
    without, with_them = (statistics.median(times[name]) for name in times)
    yield Result(
        "host_tables",
        f"step with rows of {tokens} tokens fetched behind it, over one without",
        statistics.median(ratios),
        "x",
        tuple(ratios),
        at_most=1.02,
        detail={"step_ms": without, "with_rows_ms": with_them},
    )


def host_tables() -> Iterator[Result]:
    """Measures everything, what is required first."""
    on_gpu = jax.default_backend() == "gpu"
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    with section("pinned table"):
        pinned = make_pinned(rows)
        jax.block_until_ready((pinned.weight[...], pinned.scale[...]))
    with section("table of records"):
        records = make_records(rows)
    stacks = {"split": make_stack(pinned), "records": make_stack(records)}
    direct = direct_lookup(pinned)
    medians: dict[Any, float] = {}

    def measure(name, tokens, call):
        times = times_ms(call, tokens, rows)
        medians[name, tokens] = statistics.median(times)
        text = f"{name}, T = {tokens}"
        yield Result("host_tables", text, medians[name, tokens], "ms", tuple(times))

    def measure_direct(tokens):
        yield from measure("direct", tokens, lambda ids: direct(jnp.asarray(ids)))

    def measure_exposed(form, tokens, pieces):
        name = f"exposed {form}, {pieces} early copies"
        call, prefetch = exposed(stacks[form], early_copies=pieces, direct_tokens=0)
        with prefetch:
            yield from measure(name, tokens, call)

    def measure_chosen(form, tokens, limit=None):
        # What is documented for a device that has nothing else to do.
        early = EARLY_COPIES if tokens == MANY else 0
        call, prefetch = exposed(stacks[form], early_copies=early)
        with prefetch:
            yield from measure("as chosen", tokens, call)
            text = f"as chosen, T = {tokens}, over direct"
            over = medians["as chosen", tokens] / medians["direct", tokens]
            yield Result("host_tables", text, over, "x", at_most=limit)
            if tokens in FEW:
                yield from compare_kernels(call, direct, tokens, rows)

    with section(f"{MANY} tokens"):
        yield from measure_direct(MANY)
        yield from measure_chosen("records", MANY, 0.65 if on_gpu else None)
    for tokens in (FEW[-1], MANY):
        with section(f"step beside rows of {tokens} tokens"):
            yield from measure_step(stacks["records"], rows, tokens)
    for tokens in FEW:
        with section(f"{tokens} tokens"):
            yield from measure_direct(tokens)
            if chooses_direct(stacks["split"], direct, tokens):
                print(f"as chosen, T = {tokens}: the direct lookup", flush=True)
            else:
                yield from measure_chosen("split", tokens)
    with section("other forms"):
        yield from measure_exposed("records", MANY, 0)
        yield from measure_exposed("split", MANY, 0)
        for tokens in FEW:
            for form in stacks:
                yield from measure_exposed(form, tokens, 0)


def lookup_host() -> Iterator[Result]:
    """Times the kernels that read host memory by themselves.

    From pinned arrays to bfloat16, and records at an address as they are.
    """
    if jax.default_backend() != "gpu":
        return
    import benchmark_gpu  # here, since it needs the profiler of a GPU

    pinned, records = make_pinned(GPU_ROWS), make_records(GPU_ROWS)
    records.register()
    assert records.reads_on_device, records.report.register
    arrays = pinned.weight[...], pinned.scale[...]
    for tokens in PINNED_TOKENS:
        hashes = [random_hashes(tokens, GPU_ROWS, seed) for seed in range(8)]
        ids = jnp.asarray(np.stack([some.reshape(-1) for some in hashes]))
        check_rows(jax.jit(kernels.lookup_packed)(*arrays, ids[0]), hashes[0])
        check_rows(jax.jit(records.lookup_packed)(ids[0]), hashes[0])
        size = tokens * COLUMNS * ROW_BYTES
        for variant, lookup, table in (
            ("pallas", kernels.lookup, arrays),
            ("pallas, records", records.lookup_packed, ()),
        ):
            yield from benchmark_gpu.row_results(
                "lookup_host", lookup, table, ids, size, variant
            )


def decode_host() -> Iterator[Result]:
    """Times a decode step of V4.1's two layers, whose tables the host has."""
    if jax.default_backend() != "gpu":
        return
    import benchmark_gpu

    steps = {
        name: benchmark_gpu.DecodeStep(benchmark_gpu.make_stack(GPU_ROWS, storage))
        for name, storage in (
            ("pinned", make_pinned(GPU_ROWS)),
            ("records", make_records(GPU_ROWS)),
        )
    }
    sizes = 1, 16, 64
    for name, step in steps.items():
        loops = benchmark_gpu.decode_loops(step, sizes, LOOPS)
        for tokens, times in loops.items():
            yield benchmark_gpu.kernel_result("decode_host_async", name, tokens, times)
    for name, step in steps.items():
        for tokens, times in benchmark_gpu.decode_kernels(step, sizes):
            yield benchmark_gpu.kernel_result(
                "decode_host_kernels", name, tokens, times
            )


def mapped_file() -> Iterator[Result]:
    """Reads the rows of 64 tokens from a file that is in no cache, then again."""
    rows, tokens = 4_000_000, 64
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        path = Path(folder) / "table.safetensors"
        tensors = {
            "weight": ("F8_E4M3", (rows, DIM)),
            "scale": ("F8_E8M0", (rows, DIM // 32)),
        }
        with SafetensorsWriter(path, tensors) as writer:
            for start in range(0, rows, 100_000):
                values, scales = table_bytes(np.arange(start, start + 100_000))
                writer.write("weight", values, start)
                writer.write("scale", scales, start)
        times: dict[str, list[float]] = {"cold": [], "warm": []}
        for seed in range(5):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            infos = read_header(path)
            table = MappedFileTable(infos["weight"], infos["scale"])
            hashes = random_hashes(tokens, rows, seed)
            for taken in times.values():
                begin = time.perf_counter()
                found = table.gather(hashes)
                taken.append(1e3 * (time.perf_counter() - begin))
                check_rows(found, hashes)
            del table
    for name, limit in (("cold", 200), ("warm", 10)):
        yield Result(
            "mapped_file",
            f"{tokens * COLUMNS} rows from a mapped file of 1 GB, {name}",
            statistics.median(times[name]),
            "ms",
            tuple(times[name]),
            at_most=limit,
        )


SUITES = {
    "decode_host": decode_host,
    "lookup_host": lookup_host,
    "host_tables": host_tables,
    "mapped_file": mapped_file,
}

"""Kernel times on a GPU at DeepSeek-V4.1's sizes, for `scripts/benchmark.py`.

Times are CUPTI kernel times in microseconds. Every sample reads other data than the one
before. Rows of a table are in no cache, since a token's are not, either; where another
implementation was measured on rows that were, so is this one. Results are checked
against the XLA form in the same run before anything is timed.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_record import Result
from flax import nnx
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from v41 import V41_CONFIG

import engram_jax
from engram_jax import EngramConfig, EngramLayout, kernels
from engram_jax.kernels import block_sizes, wkv_pallas

TOKENS = (1, 16, 64, 512, 4096, 16384)
PROJECTED_TOKENS = (1, 8, 16, 32, 64, 128, 512, 4096)
GATED_TOKENS = (1, 16, 64, 512, 4096, 8192)
DECODED_TOKENS = (1, 16)
LOOPS, LOOP_STEPS = 41, 100
FORMS: tuple[kernels.Backend, ...] = ("pallas", "xla")
CONFIG = EngramConfig.from_dict(V41_CONFIG)
STREAMS, WIDTH = CONFIG.hc_mult, CONFIG.hidden_size
COLUMNS, DIM = CONFIG.n_hash_cols, CONFIG.head_dim
OUTPUTS, INPUTS = (STREAMS + 1) * WIDTH, COLUMNS * DIM
ROW_BYTES = DIM + DIM // 32
IN_CACHE = ", rows in cache"
CACHED = "pallas" + IN_CACHE
TABLE_ROWS = 64_000_000  # 17 GB: far beyond any cache, and two of them fit


def kernel_times(
    function: Callable[..., Any], calls: list[tuple], *, is_kernel: bool = False
) -> list[float]:
    """Time one call on each of several sets of operands, in microseconds.

    All calls run in one program, so that each finds the caches as the others left them.

    Args:
        function: of one set of operands.
        calls: the sets.
        is_kernel: whether the function is a kernel of this project, of whose result a
            few elements are then kept: the memory of the rest is free for the next
            call, as in a model. XLA would leave out what is not kept of its own forms.

    Returns:
        For each set and repetition, the time of the kernels of its call together; where
        they cannot be told apart, their mean for each repetition.
    """

    def program(calls):
        results = [function(*operands) for operands in calls]
        if is_kernel:
            results = [x.reshape(-1)[:8] for x in results]
        return results

    _, runs = profiler.measure(jax.jit(program), aggregate=False, iterations=3)(calls)
    assert runs is not None, "CUPTI reported no kernel"
    times = []
    for run in runs:
        names, per_call = [name for name, _ in run], len(run) // len(calls)
        parts = [run[i * per_call : (i + 1) * per_call] for i in range(len(calls))]
        if is_kernel:
            counted = [ms for name, ms in run if "slice" not in name]
            if len(counted) == len(calls):
                times += [1e3 * ms for ms in counted]
                continue
        # XLA may run the calls' small kernels in another order, or several as one.
        if names == names[:per_call] * len(calls):
            times += [1e3 * sum(ms for _, ms in part) for part in parts]
        else:
            times.append(1e3 * sum(ms for _, ms in run) / len(calls))
    return times


def cold_row_times(lookup: Callable[..., Any], table: tuple, ids: jax.Array):
    """Time a kernel that reads rows which no cache holds, in microseconds.

    Args:
        lookup: of the table's arrays and ids [n].
        table: its arrays.
        ids: [samples, n].

    Returns:
        The kernel's time for each sample and repetition.
    """

    @jax.jit
    def program(filler, table, ids):
        # Once before all samples: none of them reads another's rows.
        filled, ids = lax.optimization_barrier((jnp.sum(filler), ids))
        results = lax.map(lambda some: lookup(*table, some).reshape(-1)[:8], ids)
        return filled, results

    filler = jnp.ones((1 << 26,), jnp.float32)  # 256 MB, several times the L2 cache
    measure = profiler.measure(program, aggregate=False, iterations=3)
    _, runs = measure(filler, table, ids)
    assert runs is not None, "CUPTI reported no kernel"
    times = [1e3 * ms for run in runs for name, ms in run if "mosaic" in name]
    assert len(times) == 3 * len(ids), f"{len(times)} kernels for {len(ids)} samples"
    return times


def row_results(
    operation: str,
    lookup: Callable[..., Any],
    table: tuple,
    ids: jax.Array,
    size: int,
    variant: str = "pallas",
) -> Iterator[Result]:
    """Time a kernel on rows that no cache holds, and on rows that were just read.

    Args:
        operation: name of the results.
        lookup: of the table's arrays and ids [n].
        table: its arrays.
        ids: [samples, n].
        size: bytes that a call moves.
        variant: name of the kernel.
    """
    tokens = ids.shape[1] // COLUMNS
    times = cold_row_times(lookup, table, ids)
    yield kernel_result(operation, variant, tokens, times, size)
    # Few sets, read in turns: up to the size of the cache, it has them.
    times = kernel_times(lookup, [(*table, some) for some in ids[:4]], is_kernel=True)
    yield kernel_result(operation, variant + IN_CACHE, tokens, times, size)


def kernel_result(operation, variant, tokens, times, size=None) -> Result:
    """Make a result of times in microseconds, and the bytes that each moves."""
    us = statistics.median(times)
    detail = {"operation": operation, "variant": variant, "tokens": tokens}
    if size is not None:
        detail |= {"bytes": size, "GB/s": round(size / us / 1e3, 1)}
    name = f"{operation} ({variant}), T = {tokens}"
    return Result(operation, name, us, "us", tuple(times), detail=detail)


def random_bytes(seed: int, shape: tuple[int, int], low: int, high: int) -> jax.Array:
    """Make bytes from `low` to `high` on the device, without a wider copy."""

    def make():
        row = lax.broadcasted_iota(jnp.uint32, shape, 0)
        column = lax.broadcasted_iota(jnp.uint32, shape, 1)
        x = row * jnp.uint32(2654435761) + column * jnp.uint32(40503 + 2 * seed)
        x = (x ^ (x >> 15)) * jnp.uint32(2246822519)
        x = (x ^ (x >> 13)) * jnp.uint32(3266489917)
        return (jnp.uint32(low) + (x >> 8) % jnp.uint32(high - low + 1)).astype(
            jnp.uint8
        )

    return jax.jit(make)()


def random_table(seed: int, rows: int = TABLE_ROWS) -> tuple[jax.Array, jax.Array]:
    """Make a table of finite values of both signs, and its scales."""
    # Codes 0 to 126 and 128 to 254, as an even spread over 254 numbers.
    values = random_bytes(seed, (rows, DIM), 0, 253)
    values = jax.jit(lambda v: v + (v > 126).astype(jnp.uint8), donate_argnums=0)(
        values
    )
    weight = jax.jit(
        lambda v: lax.bitcast_convert_type(v, jnp.float8_e4m3fn), donate_argnums=0
    )(values)
    return weight, random_bytes(seed + 1, (rows, DIM // 32), 118, 129)


def random_projection(seed: int) -> tuple[jax.Array, jax.Array]:
    """Make a projection weight and its block scales."""
    weight, _ = random_table(seed, OUTPUTS * INPUTS // DIM)
    scale = random_bytes(seed, (OUTPUTS // 32, INPUTS // 32), 118, 126)
    return weight.reshape(OUTPUTS, INPUTS), scale


def _keys(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def _times(variant: str, function, calls) -> list[float]:
    """Time a kernel on every set of operands, the XLA form on one (to compile once)."""
    if variant == "pallas":
        return kernel_times(function, calls, is_kernel=True)
    return kernel_times(function, calls[:1])


def _check_equal(name: str, got: jax.Array, wanted: jax.Array) -> None:
    if not bool(jnp.array_equal(got, wanted)):
        raise AssertionError(f"{name}: the kernel and the XLA form disagree")


def _check_close(name: str, got: jax.Array, wanted: jax.Array, relative: float) -> None:
    difference = jnp.abs(got.astype(jnp.float32) - wanted.astype(jnp.float32)).max()
    bound = relative * jnp.abs(wanted.astype(jnp.float32)).max()
    if not difference <= bound:
        raise AssertionError(f"{name}: off by {difference}, allowed {bound}")


def copy_suite() -> Iterator[Result]:
    """Measure the card's own copy: what memory-bound kernels can reach."""
    calls = [(jax.random.normal(key, (1 << 28,)),) for key in _keys(0, 3)]
    times = kernel_times(lambda x: x + 1, calls)
    yield kernel_result("copy", "xla", 0, times, 2 * calls[0][0].nbytes)


def _hash_batch(tokens: int, seed: int) -> dict[str, Any]:
    """Make chunks of 64 tokens in the middle of their requests, with lookback."""
    requests = max(1, tokens // 64)
    rng = np.random.default_rng(seed)
    length, depth = tokens // requests, CONFIG.max_ngram_size - 1
    vocab = CONFIG.vocab_size
    return {
        "input_ids": rng.integers(0, vocab, tokens).astype(np.int32),
        "positions": (np.arange(tokens) % length + 100).astype(np.int32),
        "query_start_loc": np.arange(0, tokens + 1, length).astype(np.int32),
        "dead_mask": np.zeros(tokens, bool),
        "lookback_token_ids": rng.integers(0, vocab, (requests, depth)).astype(
            np.int32
        ),
        "lookback_dead_mask": np.zeros((requests, depth), bool),
    }


def _hash_state(backend=None) -> engram_jax.NgramHashState:
    layout = EngramLayout.from_config(CONFIG)
    rng = np.random.default_rng(0)
    compressed, vocab = layout.compressed_vocab_size, CONFIG.vocab_size
    ids = np.concatenate(
        [np.arange(compressed), rng.integers(0, compressed, vocab - compressed)]
    )
    return engram_jax.NgramHashState(layout, rng.permutation(ids), backend=backend)


def hash_suite() -> Iterator[Result]:
    """Time the n-gram hash of both layers."""
    for tokens in TOKENS:
        calls = [(_hash_batch(tokens, i),) for i in range(4)]
        calls = jax.device_put(calls)
        forms = {b: _hash_state(b) for b in FORMS}
        run = {b: (lambda batch, s=s: s(**batch)) for b, s in forms.items()}
        _check_equal(
            "hash", jax.jit(run["pallas"])(*calls[0]), jax.jit(run["xla"])(*calls[0])
        )
        for variant, function in run.items():
            times = _times(variant, function, calls)
            yield kernel_result("hash", variant, tokens, times)


def lookup_suite() -> Iterator[Result]:
    """Time row reads of one layer: to bfloat16, and packed."""
    table = random_table(0)
    for tokens in TOKENS:
        rows = tokens * COLUMNS
        ids = jax.random.randint(jax.random.key(tokens), (12, rows), 0, TABLE_ROWS)
        for name, function, written in (
            ("lookup", kernels.lookup, 2 * DIM),
            ("lookup_packed", kernels.lookup_packed, ROW_BYTES),
        ):
            run = {b: functools.partial(function, backend=b) for b in FORMS}
            _check_equal(name, *(jax.jit(run[b])(*table, ids[0]) for b in FORMS))
            size = rows * (ROW_BYTES + written + 4)
            yield from row_results(name, run["pallas"], table, ids, size)
            times = kernel_times(run["xla"], [(*table, ids[0])])
            yield kernel_result(name, "xla", tokens, times, size)


def gate_suite() -> Iterator[Result]:
    """Time the gate of one layer."""
    q, k = (
        jax.random.normal(key, (STREAMS, WIDTH), jnp.bfloat16) for key in _keys(0, 2)
    )
    for tokens in GATED_TOKENS:
        calls = []
        # At 64, so many that they do not fit into the cache.
        for key in _keys(tokens, {64: 12}.get(tokens, 4 if tokens <= 512 else 3)):
            one, two = jax.random.split(key)
            hidden = jax.random.normal(one, (tokens, STREAMS, WIDTH), jnp.bfloat16)
            kv = jax.random.normal(two, (tokens, OUTPUTS), jnp.bfloat16)
            calls.append((hidden, kv))
        gate = functools.partial(kernels.gate, q_weight=q, k_weight=k, eps=1e-20)
        run = {b: functools.partial(gate, backend=b) for b in FORMS}
        _check_close(
            "gate",
            jax.jit(run["pallas"])(*calls[0]),
            jax.jit(run["xla"])(*calls[0]),
            2.0**-7,  # neighbours in bfloat16
        )
        size = tokens * (3 * STREAMS + 1) * WIDTH * 2
        for variant, function in run.items():
            times = _times(variant, function, calls)
            yield kernel_result("gate", variant, tokens, times, size)


def wkv_suite() -> Iterator[Result]:
    """Time the projection: as chosen automatically, and the library's product."""
    weights = [random_projection(seed) for seed in range(3)]
    expanded = [jax.jit(kernels.dequantize_weight)(*weight) for weight in weights]
    for tokens in PROJECTED_TOKENS:
        rows = [
            jax.random.normal(key, (tokens, INPUTS), jnp.bfloat16)
            for key in _keys(tokens, 3)
        ]
        calls = [(r, *w, e) for r, w, e in zip(rows, weights, expanded, strict=True)]

        def chosen(rows, weight, scale, expanded):
            return kernels.wkv(rows, weight, scale, expanded=expanded)

        def library(rows, weight, scale, expanded):
            del weight, scale
            dims = (((1,), (1,)), ((), ()))
            return lax.dot_general(rows, expanded, dims)

        _check_close(
            "wkv", jax.jit(chosen)(*calls[0]), jax.jit(library)(*calls[0]), 2.0**-7
        )
        forms: dict[str, tuple[Callable[..., Any], list]] = {
            "auto": (chosen, calls),
            "library": (library, calls),
        }
        if not block_sizes.wkv_prefers_library(tokens):
            # As the kernel that hashes and reads rows writes them.
            ordered = [
                (kernels.OrderedRows(wkv_pallas.permute_columns(r), tokens), *w)
                for r, w in zip(rows, weights, strict=True)
            ]
            _check_close(
                "wkv", jax.jit(kernels.wkv)(*ordered[0]), chosen(*calls[0]), 2.0**-7
            )
            forms["ordered"] = kernels.wkv, ordered
        for variant, (function, operands) in forms.items():
            yield kernel_result(
                "wkv", variant, tokens, kernel_times(function, operands)
            )


def make_stack(rows: int = TABLE_ROWS, storage: Any = None) -> engram_jax.EngramStack:
    """Make V4.1's two layers with tables of fewer rows, addressed modulo those.

    Args:
        rows: of each table.
        storage: a table of so many rows outside device memory, for all layers.
    """
    layers = {}
    for index, layer_id in enumerate(CONFIG.layer_ids):
        table = engram_jax.ParallelEngramEmbedding
        embedding = (
            table(*random_table(10 + index, rows))
            if storage is None
            else table.from_storage(storage)
        )
        q, k = (
            jax.random.normal(key, (STREAMS, WIDTH), jnp.bfloat16)
            for key in _keys(index, 2)
        )
        layers[layer_id] = engram_jax.Engram(
            embedding,
            *random_projection(20 + index),
            q,
            k,
            eps=CONFIG.rms_norm_eps,
        )
    layout = _small_layout(rows)
    state = _hash_state()
    state = engram_jax.NgramHashState(layout, np.asarray(state.token_map[...]))
    return engram_jax.EngramStack(CONFIG, state, layers)


def _small_layout(rows: int) -> EngramLayout:
    """V4.1's columns over tables of fewer rows: a smaller base, the same hash."""
    small = dataclasses.replace(
        CONFIG,
        vocab_base=rows // COLUMNS - 5000,
        num_embeddings=(rows,) * CONFIG.num_layers,
    )
    return EngramLayout.from_config(small)


def _run_layers(stack, hidden, batch):
    for layer_id in CONFIG.layer_ids:
        hidden = stack(layer_id, hidden, batch)
    return hidden


class DecodeStep:
    """A step of two layers, a token of each request, as one jitted function.

    Attributes:
        stack: V4.1's two layers.
        state: their arrays.
        call: of state, hidden states, windows, token ids and what stays as it is.
    """

    def __init__(self, stack: engram_jax.EngramStack | None = None) -> None:
        """Take layers, or make them with tables in device memory."""
        self.stack = stack or make_stack()
        graph, tree = nnx.split(self.stack)
        # Leaves, since a call flattens an `nnx.State` in 45 us, a list of arrays in 10.
        self.state, structure = jax.tree.flatten(tree)

        def step(state, hidden, window, tokens, positions, starts):
            stack = nnx.merge(graph, jax.tree.unflatten(structure, state))
            # Text alone: no token is dead, so the windows need no mask.
            batch, (window, _) = stack.batch(
                tokens,
                positions,
                starts,
                lookback_token_ids=window,
                advance_lookback=True,
            )
            return _run_layers(stack, hidden, batch), window

        self.call = step

    def start(self, tokens: int) -> tuple[jax.Array, jax.Array]:
        """Make hidden states and windows."""
        hidden = jnp.ones((tokens, STREAMS, WIDTH), jnp.bfloat16)
        return hidden, self.stack.hash_state.init_lookback(tokens)[0]

    def batches(self, tokens: int) -> list[tuple[jax.Array, ...]]:
        """Make token ids, positions and starts of several steps."""
        rng = np.random.default_rng(tokens)
        ids = rng.integers(0, CONFIG.vocab_size, (4, tokens)).astype(np.int32)
        constant = jnp.full(tokens, 100), jnp.arange(tokens + 1)
        return [(some, *constant) for some in jax.device_put(list(ids))]


def decode_loop_suite() -> Iterator[Result]:
    """Time decode steps that are not waited for, by the wall clock.

    Before any kernel is timed: CUPTI, once it was on, may slow launches down.
    """
    for tokens, times in decode_loops(DecodeStep(), DECODED_TOKENS).items():
        yield kernel_result("decode_async", "auto", tokens, times)


def decode_loops(
    step: DecodeStep, sizes: tuple[int, ...], loops: int = LOOPS
) -> dict[int, list[float]]:
    """Give the microseconds of a step in each of several loops, by its tokens."""
    jitted = jax.jit(step.call, donate_argnums=1)  # windows are a few bytes
    batches = {tokens: step.batches(tokens) for tokens in sizes}
    carry = {
        tokens: jitted(step.state, *step.start(tokens), *batches[tokens][0])
        for tokens in sizes
    }
    walls: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    for _ in range(loops):  # in turns: the host is faster at one time than at another
        for tokens in sizes:
            state = jax.block_until_ready(carry[tokens])
            begin = time.perf_counter()
            for i in range(LOOP_STEPS):
                state = jitted(step.state, *state, *batches[tokens][i % 4])
            jax.block_until_ready(state)
            walls[tokens].append((time.perf_counter() - begin) * 1e6 / LOOP_STEPS)
            carry[tokens] = state
    return walls


def decode_kernels(
    step: DecodeStep, sizes: tuple[int, ...]
) -> Iterator[tuple[int, list[float]]]:
    """Give the microseconds of all kernels of a step, by its tokens."""
    # Operands, not captured arrays: those would become constants of the program.
    for tokens in sizes:
        calls = [
            (step.state, *step.start(tokens), *batch)
            for batch in step.batches(tokens)[:2]
        ]
        yield tokens, kernel_times(step.call, calls)


def step_suite() -> Iterator[Result]:
    """Time the kernels of a decode step, and of prefill of 4,096 tokens."""
    step = DecodeStep()
    for tokens, times in decode_kernels(step, DECODED_TOKENS):
        yield kernel_result("decode_kernels", "auto", tokens, times)

    stack = step.stack
    stack.expand_projections()
    graph, tree = nnx.split(stack)
    state, structure = jax.tree.flatten(tree)

    def merge(state):
        return nnx.merge(graph, jax.tree.unflatten(structure, state))

    tokens = 4096
    batches = jax.device_put([_hash_batch(tokens, i) for i in range(2)])
    hidden = jax.random.normal(
        jax.random.key(1), (tokens, STREAMS, WIDTH), jnp.bfloat16
    )
    kv = jax.random.normal(jax.random.key(2), (tokens, OUTPUTS), jnp.bfloat16)

    def prefill(state, hidden, batch):
        stack = merge(state)
        return _run_layers(stack, hidden, stack.batch(**batch))

    def without_projection(state, hidden, batch, kv):
        stack = merge(state)
        batch = stack.batch(**batch)
        rows = [
            stack.layers[i].rows(stack.hash_ids(i, batch)) for i in CONFIG.layer_ids
        ]
        for layer_id in CONFIG.layer_ids:
            hidden = stack.layers[layer_id].gate(hidden, kv, batch.token_mask)
        return hidden, rows

    for name, function, more in (
        ("prefill", prefill, ()),
        ("prefill_without_projection", without_projection, (kv,)),
    ):
        times = kernel_times(
            function, [(state, hidden, batch, *more) for batch in batches]
        )
        yield kernel_result(name, "auto", tokens, times)


SUITES = {
    "decode_loop": decode_loop_suite,  # the first
    "copy": copy_suite,
    "hash": hash_suite,
    "lookup": lookup_suite,
    "gate": gate_suite,
    "wkv": wkv_suite,
    "step": step_suite,
}

"""Rows fetched ahead against the direct lookup, over every kind of table and batch."""

from __future__ import annotations

import functools
import threading
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from prefetch_cases import mapped, random_batch, run_layers, same, with_storage
from small_stack import CONFIG, make_stack, random_hidden, random_ids

import engram_jax
from engram_jax.host_storage import PinnedHostTable
from engram_jax.prefetch import EngramPrefetch

PLACEMENTS = ("device", "pinned_host", "mapped_file")


def pinned(layer_id, values, scales):
    del layer_id
    return PinnedHostTable(values, scales)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory) -> dict[str, engram_jax.EngramStack]:
    device = make_stack()
    files = mapped(tmp_path_factory.mktemp("tables"))
    return {
        "device": device,
        "pinned_host": with_storage(device, pinned),
        "mapped_file": with_storage(device, files),
    }


def make_step(stack):
    """Compiles all layers of a batch; hashes of a batch on the device; both."""
    graph, state = nnx.split(stack)

    @jax.jit
    def step(hidden, batch):
        return run_layers(nnx.merge(graph, state), hidden, batch)

    @jax.jit
    def hash_batch(arguments):
        return nnx.merge(graph, state).batch(**arguments)

    return step, hash_batch


def direct_rows(stack, hashes) -> list[np.ndarray]:
    """Reads rows of tables in pinned memory by plain indexing."""
    rows = []
    for index, layer in enumerate(stack.layers.values()):
        parts = storage_parts(layer.embedding.storage)
        table = np.concatenate([np.asarray(x[...]).view(np.uint8) for x in parts], 1)
        ids = np.asarray(hashes)[:, index]
        inside = (ids >= 0) & (ids < len(table))
        rows.append(np.where(inside[..., None], table[np.where(inside, ids, 0)], 0))
    return rows


def storage_parts(storage):
    return storage.weight, storage.scale


def check_rows(stack, batch, hashes) -> None:
    """Compares a batch's rows with the direct lookup."""
    wanted = direct_rows(stack, hashes)
    for rows, expected in zip(put_together(batch.rows), wanted, strict=True):
        same(rows, expected)


@jax.jit
def put_together(rows):
    return [part.packed() for part in rows]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("tokens", "unique"), [(0, False), (1, False), (61, False), (0, True), (61, True)]
)
def test_outputs_equal_the_direct_lookup(stacks, placement, tokens, unique):
    stack = stacks[placement]
    step, hash_batch = make_step(stack)
    arguments = random_batch(tokens, seed=tokens + 1)
    hidden = random_hidden(tokens)
    expected = step(hidden, hash_batch(arguments))
    with EngramPrefetch(stack, threads=2, unique=unique) as prefetch:
        from_tokens = prefetch.start(**arguments)
        same(step(hidden, from_tokens.result()), expected)
        from_hashes = prefetch.start(hash_batch(arguments))
        same(step(hidden, from_hashes.result()), expected)


def check_overlapped(stack, count: int, **options) -> None:
    """Fetches batches while steps that read others still run, and compares them all."""

    @jax.jit
    def step(batch, weight):
        # Long enough for the next fetch to overlap, and the rows are read last.
        for _ in range(3):
            weight = jnp.tanh(weight @ weight)
        rows = [part.packed() for part in batch.rows]
        return jax.lax.optimization_barrier((rows, weight.sum()))[0]

    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(160, 160)), jnp.float32)
    batches = []
    for tokens in rng.choice([3, 40, 41, 160], count):
        # Small ids are frequent, and some are outside the smaller table.
        some = 950 * rng.random((tokens, 2, stack.layout.n_hash_cols)) ** 3
        batches.append(some.astype(np.int32) - 1)
    results = []
    with EngramPrefetch(stack, threads=2, direct_tokens=0, **options) as prefetch:
        pending = prefetch.start(batches[0])
        for following in [*batches[1:], None]:
            batch = pending.result()
            if following is not None:
                pending = prefetch.start(following)
            results.append(step(batch, weight))  # not waited for
        assert ("hot_rows" in options) == (prefetch.counters.hits > 5 * count)
    for hashes, layers in zip(batches, results, strict=True):
        for actual, wanted in zip(layers, direct_rows(stack, hashes), strict=True):
            np.testing.assert_array_equal(np.asarray(actual), wanted)


@pytest.mark.parametrize("options", [{}, {"hot_rows": 100 * 2 * 33}], ids=str)
def test_200_random_batches_overlapped_equal_serial(stacks, options):
    """Pitfall: overlapped and serial runs differ."""
    check_overlapped(stacks["pinned_host"], 200, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"hot_rows": 100 * 2 * 33}, {"early_copies": 3}], ids=str
)
def test_overlapped_batches_on_a_gpu(stacks, options):
    check_overlapped(stacks["pinned_host"], 60, **options)


@pytest.mark.gpu
def test_few_tokens_are_read_by_the_gpu_itself(stacks):
    stack = stacks["pinned_host"]
    step, hash_batch = make_step(stack)
    arguments = random_batch(7, 1)
    with EngramPrefetch(stack, threads=1) as prefetch:
        batch = prefetch.start(**arguments).result()
        assert batch.rows is None
        hidden = random_hidden(7)
        same(step(hidden, batch), step(hidden, hash_batch(arguments)))


def test_cached_rows_equal_direct_ones_while_rows_come_and_go(stacks):
    stack = stacks["pinned_host"]
    step, hash_batch = make_step(stack)
    rng = np.random.default_rng(3)
    width = CONFIG.head_dim + 1
    with EngramPrefetch(stack, threads=2, hot_rows=2 * 64 * width) as prefetch:
        direct = batch = None
        for round_ in range(18):
            arguments = random_batch(48, seed=round_)
            # Few distinct tokens, other ones from time to time.
            arguments["input_ids"] = rng.integers(0, 6, 48) + round_ // 6 * 6
            direct = hash_batch(arguments)
            batch = prefetch.start(**arguments).result()
            check_rows(stack, batch, direct.hash_ids)
        hidden = random_hidden(48)
        same(step(hidden, batch), step(hidden, direct))
        counters = prefetch.counters
    assert counters.hits > 0.1 * counters.rows
    assert counters.admitted > 20
    total = counters.hits + counters.duplicates + counters.rows_from_host
    assert total == counters.rows
    assert counters.bytes_from_host == counters.rows_from_host * width
    assert 0 < counters.host_share < 1


def test_slot_cache_batches_come_through_the_stack(stacks):
    stack = stacks["pinned_host"]
    step, _ = make_step(stack)
    cache = stack.hash_state.init_slot_cache(64)
    arguments = {
        "input_ids": random_ids(8),
        "positions": np.arange(8),
        "query_start_loc": [0, 8],
        "slot_mapping": np.arange(8),
        "block_table": [[0, 1]],
        "block_size": 8,
    }
    batch, _ = stack.batch(slot_cache=cache, **arguments)
    hidden = random_hidden(8)
    with EngramPrefetch(stack, threads=1) as prefetch:
        same(step(hidden, prefetch.start(batch).result()), step(hidden, batch))
        with pytest.raises(ValueError, match="slot cache lives on the device"):
            prefetch.start(slot_cache=cache, **arguments)


def test_layers_may_have_different_placements(stacks):
    """Pitfall: no side conditions."""
    mixed = {
        1: stacks["device"].layers[1],
        3: stacks["mapped_file"].layers[3],
    }
    stack = engram_jax.EngramStack(CONFIG, stacks["device"].hash_state, mixed)
    step, hash_batch = make_step(stack)
    arguments = random_batch(20, seed=5)
    with EngramPrefetch(stack, threads=2) as prefetch:
        batch = prefetch.start(**arguments).result()
        assert batch.rows[0] is None
        same(
            step(random_hidden(20), batch),
            step(random_hidden(20), hash_batch(arguments)),
        )


def test_one_program_for_one_shape(stacks):
    stack = stacks["pinned_host"]
    graph, state = nnx.split(stack)

    @jax.jit
    @chex.assert_max_traces(1)
    def step(hidden, batch):
        return run_layers(nnx.merge(graph, state), hidden, batch)

    with EngramPrefetch(stack, threads=1) as prefetch:
        for seed in range(4):
            pending = prefetch.start(**random_batch(16, seed))
            step(random_hidden(16), pending.result())
    chex.clear_trace_counter()


def test_a_batch_that_came_too_late_is_refused_not_garbage(stacks):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        old = prefetch.start(**random_batch(5, 0)).result()
        prefetch.start(**random_batch(5, 1)).result()
        same(old.rows[0].packed(), put_together(old.rows)[0])  # it still may
        prefetch.start(**random_batch(5, 2)).result()
        with pytest.raises(RuntimeError, match="deleted"):
            jax.block_until_ready([rows.packed() for rows in old.rows])


def test_a_step_may_take_the_batch_as_donated(stacks):
    stack = stacks["pinned_host"]

    @functools.partial(jax.jit, donate_argnums=0)
    def take(rows):
        return [part.packed().reshape(-1) for part in rows]

    with EngramPrefetch(stack, threads=1) as prefetch:
        for seed in range(4):
            hashes = np.random.default_rng(seed).integers(-1, 900, (11, 2, 6))
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Some donated buffers were not usable"
                )
                rows = take(prefetch.start(hashes).result().rows)
            for actual, wanted in zip(rows, direct_rows(stack, hashes), strict=True):
                same(actual, wanted.reshape(-1))


@pytest.mark.parametrize("given", ["tokens", "hashes"])
def test_a_running_step_blocks_the_refill(stacks, given):
    stack = stacks["pinned_host"]

    @jax.jit
    def slow(batch, weight, times):
        weight = jax.lax.fori_loop(0, times, lambda _, w: jnp.tanh(w @ w), weight)
        # The rows are read when the loop is over.
        zero = (weight.sum() * 0).astype(jnp.uint8)
        return batch.rows[0].packed() + zero

    first, second = (random_batch(9, seed) for seed in (0, 1))
    hashes = [np.asarray(stack.batch(**batch).hash_ids) for batch in (first, second)]
    expected = direct_rows(stack, hashes[0])[0]
    if given == "hashes":
        first, second = ({"hashes": ids} for ids in hashes)
    weight = jnp.eye(400)
    with EngramPrefetch(stack, threads=1) as prefetch:
        same(slow(prefetch.start(**first).result(), weight, 1), expected)
        for times in (100, 400, 1600, 6400):  # until the step is the slower one
            rows = slow(prefetch.start(**first).result(), weight, times)
            waited = not rows.is_ready()
            for _ in range(6):  # its buffer is among those that are filled again
                prefetch.start(**second).result()
            assert rows.is_ready()
            same(rows, expected)
            if waited:
                break
    assert waited


def test_errors_of_threads_surface_where_rows_are_used(stacks, tmp_path):
    stack = with_storage(stacks["device"], mapped(tmp_path))
    with EngramPrefetch(stack, threads=2) as prefetch:
        prefetch.start(**random_batch(300, 0)).result()
        path = tmp_path / "3.safetensors"
        with path.open("r+b") as file:
            file.truncate(100)
        pending = prefetch.start(**random_batch(300, 1))
        with pytest.raises(ValueError, match="truncated"):
            pending.result()
        prefetch.start(**random_batch(300, 1))
        with pytest.raises(ValueError, match="truncated"):
            prefetch.join()
        bad = random_batch(4, 1) | {"input_ids": np.full(4, 10**6), "dead_mask": None}
        with pytest.raises(ValueError, match="another tokenizer"):
            prefetch.start(**bad).result()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "hashes or tokens"),
        ({"hashes": np.zeros((2, 2, 6), np.int32), "input_ids": [1]}, "one of the two"),
        ({"input_ids": [1], "token_mask": [True]}, "a mask of their own"),
        (
            {"hashes": engram_jax.EngramBatch(None, None), "token_mask": [True]},
            "of their own",
        ),
    ],
)
def test_start_refuses(stacks, arguments, message):
    with (
        EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch,
        pytest.raises(ValueError, match=message),
    ):
        prefetch.start(**arguments)


def test_hashes_stay_on_the_device_where_nothing_is_staged(stacks):
    stack = stacks["device"]
    batch = stack.batch(**random_batch(5, 3))
    with EngramPrefetch(stack, threads=1) as prefetch:
        pending = prefetch.start(batch)
        assert pending.done()  # no thread had to see the hashes first
        found = pending.result()
    assert found.hash_ids is batch.hash_ids
    assert found.token_mask is batch.token_mask
    assert found.rows is None


@pytest.mark.usefixtures("library_errors")
def test_wrong_hashes_are_refused(stacks):
    with EngramPrefetch(stacks["pinned_host"], threads=1) as prefetch:
        with pytest.raises(ValueError, match=r"must be \[T, 2, 6\]"):
            prefetch.start(np.zeros((4, 3, 6), np.int32)).result()
        with pytest.raises(TypeError, match="integers"):
            prefetch.start(np.zeros((4, 2, 6))).result()
        wide = np.full((4, 2, 6), 2**32 + 5)  # no truncation to row 5
        batch = prefetch.start(wide).result()
        assert not np.asarray(batch.rows[0].packed()).any()


def test_order_depth_and_closing(stacks):
    prefetch = EngramPrefetch(stacks["pinned_host"], threads=2)
    names = {thread.name for thread in threading.enumerate()}
    first = prefetch.start(**random_batch(4, 0))
    second = prefetch.start(**random_batch(4, 1))
    with pytest.raises(RuntimeError, match="none of them was taken"):
        prefetch.start(**random_batch(4, 2))
    with pytest.raises(RuntimeError, match="in the order"):
        second.result()
    first.result()
    prefetch.join()
    with pytest.raises(RuntimeError, match="dropped by join"):
        second.result()
    prefetch.close()
    prefetch.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetch.start(**random_batch(4, 0))
    left = {thread.name for thread in threading.enumerate()} - names
    assert not [name for name in left if name.startswith("engram")]


def test_closing_with_an_error_underway_leaves_no_thread(stacks):
    def fail():
        with EngramPrefetch(stacks["pinned_host"], threads=2) as prefetch:
            prefetch.start(**random_batch(900, 0))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not [t for t in threading.enumerate() if t.name.startswith("engram")]


@pytest.mark.parametrize("unique", [False, True])
def test_early_copies_in_pieces(stacks, unique):
    stack = stacks["pinned_host"]
    rng = np.random.default_rng(5)
    with EngramPrefetch(stack, threads=2, early_copies=3, unique=unique) as prefetch:
        for tokens in (37, 37, 37, 2, 1, 0):
            hashes = rng.integers(-1, 900, (tokens, 2, 6)).astype(np.int32)
            batch = prefetch.start(hashes).result()
            if tokens == 0:
                assert batch.rows is None
                continue
            assert len(batch.rows[0].rows) == 3
            check_rows(stack, batch, hashes)


def test_errors_surface_with_early_copies(stacks, tmp_path):
    stack = with_storage(stacks["device"], mapped(tmp_path))
    with EngramPrefetch(stack, threads=2, early_copies=2) as prefetch:
        (tmp_path / "1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"removed|truncated"):
            prefetch.start(**random_batch(300, 1)).result()
        with pytest.raises(ValueError, match="one of the two"):
            prefetch.start()


@pytest.mark.parametrize("number", ["threads", "depth"])
def test_numbers_below_one_are_refused(stacks, number):
    with pytest.raises(ValueError, match=f"{number} is 0"):
        EngramPrefetch(stacks["device"], **{number: 0})  # pyright: ignore[reportArgumentType]


def test_caches_must_fit_the_layers(stacks):
    wrong = [engram_jax.HotRowCache(16, 40)] * 2
    with pytest.raises(ValueError, match="one cache a layer"):
        EngramPrefetch(stacks["pinned_host"], hot_rows=wrong)
    with pytest.raises(ValueError, match="holds nothing"):
        EngramPrefetch(stacks["pinned_host"], hot_rows=1)
    with pytest.raises(MemoryError, match="GB free"):
        EngramPrefetch(stacks["pinned_host"], hot_rows=1 << 45)

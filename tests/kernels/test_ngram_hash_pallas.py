"""The hash's kernel: its arithmetic, its reads, and that it compiles.

The inline code runs on simulated threads (`simulated_threads`) and must equal the XLA
form exactly. On a GPU the kernel itself runs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import aot
from kernels.ragged_batches import PAD_ID, make_layout, random_batch
from kernels.simulated_threads import Memory, Word, simulate

from engram_jax import kernels
from engram_jax.kernels import mosaic_pallas, ngram_hash_pallas

HISTORIES = [
    {},
    {"cache": False},
    {"lookback": False},
    {"masks": False},
    {"masks": False, "lookback": False, "cache": False},
]


def xla_form(batch, layout):
    function = functools.partial(
        kernels.ngram_hash,
        layout=layout,
        pad_id=PAD_ID,
        block_size=batch.get("block_size"),
        backend="xla",
    )
    arrays = {name: value for name, value in batch.items() if name != "block_size"}
    return np.asarray(jax.jit(function)(**arrays))


def simulate_hash(monkeypatch, batch, layout, tokens_per_thread=None):
    block_size = batch.get("block_size")
    arrays = {name: value for name, value in batch.items() if name != "block_size"}
    operands = ngram_hash_pallas.batch_operands(**arrays)
    sizes = ngram_hash_pallas.batch_sizes(operands, layout, PAD_ID, block_size)
    operands |= ngram_hash_pallas.layout_constants(layout)
    inputs = {name: np.asarray(array) for name, array in operands.items()}
    shape = (sizes.tokens, layout.num_layers, layout.n_hash_cols)
    out = np.full(shape, -777, np.int32)
    plan = ngram_hash_pallas._plan(sizes.tokens, layout, tokens_per_thread)
    memory = Memory(inputs, {"out": out})
    simulate(monkeypatch, memory, ngram_hash_pallas)
    refs = {name: name for name in memory.names}
    for block in np.ndindex(*plan.grid):
        memory.shared["window"] = np.full(
            plan.tokens_per_block * sizes.depth, -999, np.int32
        )
        words = Word.of(block[0]), Word.of(block[1])
        ngram_hash_pallas._hash_block(refs, "window", words, sizes, layout, plan)
    return out


@pytest.mark.parametrize(
    ("tokens", "requests", "history"),
    [
        (1, 1, HISTORIES[0]),
        (37, 3, HISTORIES[0]),
        (50, 20, HISTORIES[0]),
        (37, 3, HISTORIES[1]),
        (50, 20, HISTORIES[2]),
        (37, 3, HISTORIES[3]),
        (64, 9, HISTORIES[4]),
    ],
)
def test_inline_code_equals_xla_form(monkeypatch, tokens, requests, history):
    layout = make_layout()
    seed = tokens + requests
    batch = random_batch(seed, tokens, requests, layout.max_ngram_size, **history)
    actual = simulate_hash(monkeypatch, batch, layout)
    np.testing.assert_array_equal(actual, xla_form(batch, layout))


@pytest.mark.parametrize(
    "sizes", [(1, 2, 1), (3, 3, 6), (1, 5, 2), (2, 6, 12), (16, 4, 8)]
)
@pytest.mark.parametrize("tokens_per_thread", [3])
def test_inline_code_takes_every_layout(monkeypatch, sizes, tokens_per_thread):
    layout = make_layout(*sizes, smallest=50_000)
    batch = random_batch(1, 13, 3, layout.max_ngram_size)
    actual = simulate_hash(monkeypatch, batch, layout, tokens_per_thread)
    np.testing.assert_array_equal(actual, xla_form(batch, layout))


@pytest.mark.parametrize("smallest", [2, 4093, 2**31 - 2000])
def test_inline_code_takes_primes_of_every_size(monkeypatch, smallest):
    """Pitfall: the smallest primes, and the largest that int32 rows allow."""
    layout = make_layout(1, 2, 1, smallest=smallest)
    batch = random_batch(5, 40, 3, 2)
    actual = simulate_hash(monkeypatch, batch, layout)
    np.testing.assert_array_equal(actual, xla_form(batch, layout))


@pytest.mark.parametrize("requests", [1, 7, 8, 9, 63, 64, 65, 700])
def test_finds_the_request_of_every_token(monkeypatch, requests):
    """Eight-way search, at and around the powers of eight, empty requests included."""
    rng = np.random.default_rng(requests)
    starts = np.sort(rng.integers(2, 120, requests + 1)).astype(np.int32)
    memory = Memory({"starts": starts}, {}, threads=125)
    simulate(monkeypatch, memory, ngram_hash_pallas)
    sizes = ngram_hash_pallas.Batch(125, requests, 1, 4, 0)
    token = np.arange(125)
    request, place, owned = ngram_hash_pallas._find_request(
        {"starts": "starts"}, sizes, Word(token)
    )
    inside = (token >= starts[0]) & (token < starts[-1])
    np.testing.assert_array_equal(owned.value, inside)
    expected = np.searchsorted(starts[1:], token, "right")
    np.testing.assert_array_equal(np.asarray(request.value)[inside], expected[inside])
    expected = token - starts[np.minimum(expected, requests)]
    np.testing.assert_array_equal(np.asarray(place.value)[inside], expected[inside])


def test_remainder_is_exact():
    """At multiples of the prime and beside them, where one step too few would show."""
    rng = np.random.default_rng(0)
    for prime in [1, 2, 3, 7, 211, 4099, 16_000_057, 2**31 - 1]:
        quotients = rng.integers(0, (2**63 - 1) // prime, 2000)
        edges = np.concatenate([quotients * prime, [0, 1, 2**63 - 1, 2**62]])
        numbers = np.concatenate([edges, edges[:-4] - 1, edges[:-4] + 1])
        numbers = np.maximum(numbers, 0)
        factor = Word.of(mosaic_pallas.reciprocal(prime), 64)
        rest = mosaic_pallas.remainder(Word(numbers, 64), factor, Word.of(prime))
        np.testing.assert_array_equal(rest.value, numbers % prime)


def test_refuses_what_it_cannot_do():
    layout = make_layout()
    batch = random_batch(0, 5, 1, 4)
    reason = functools.partial(
        ngram_hash_pallas.unsupported_reason, **batch, layout=layout
    )
    assert reason(pad_id=PAD_ID) is None
    assert "interpreter" in str(reason(pad_id=PAD_ID, interpret=True))
    assert "2**63" in str(reason(pad_id=2**30))


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_tokens_or_no_requests(tokens):
    layout = make_layout()
    empty = jnp.zeros((tokens,), jnp.int32)
    starts = jnp.zeros((1,), jnp.int32)
    out = ngram_hash_pallas.ngram_hash_pallas(
        empty, empty, starts, jnp.arange(9), layout=layout, pad_id=PAD_ID
    )
    assert out.shape == (tokens, 2, 24)
    assert (out == -1).all()


def operands(batch):
    """The batch's arrays on paper, and its block size."""
    block_size = batch.pop("block_size", None)
    return {
        name: aot.operand(value.shape, value.dtype) for name, value in batch.items()
    }, block_size


@pytest.mark.parametrize("history", HISTORIES[:3])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_compiles_for_hopper(tokens, history):
    layout = make_layout()
    batch, block_size = operands(
        random_batch(0, tokens, 1 + tokens // 64, 4, **history)
    )
    static = {"layout": layout, "pad_id": PAD_ID, "block_size": block_size}
    compiled = aot.compile_for_hopper(
        lambda batch: ngram_hash_pallas.ngram_hash_pallas(**batch, **static), batch
    )
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion" not in aot.text_of(compiled)  # nothing but the kernel


@pytest.mark.parametrize("x64", [False, True])
def test_compiles_inside_transformations(x64):
    layout = make_layout()
    batch = random_batch(0, 12, 2, 4)
    block_size = batch.pop("block_size")

    def hashes(batch):
        return kernels.ngram_hash(
            **batch,
            layout=layout,
            pad_id=PAD_ID,
            block_size=block_size,
            backend="pallas",
        )

    def program(batches):
        _, scanned = jax.lax.scan(lambda c, b: (c, hashes(b)), 0, batches)
        return scanned, jax.vmap(jax.checkpoint(hashes))(batches)

    with jax.enable_x64(x64):
        batches = {
            name: aot.operand((3, *value.shape), value.dtype)
            for name, value in batch.items()
        }
        compiled = aot.compile_for_hopper(program, batches)
    assert "mosaic_gpu" in aot.text_of(compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    ("tokens", "requests"), [(1, 1), (16, 16), (333, 70), (9000, 40)]
)
def test_kernel_equals_xla_form(tokens, requests, history):
    layout = make_layout()
    batch = random_batch(tokens, tokens, requests, layout.max_ngram_size, **history)
    actual = ngram_hash_pallas.ngram_hash_pallas(**batch, layout=layout, pad_id=PAD_ID)
    np.testing.assert_array_equal(np.asarray(actual), xla_form(batch, layout))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(1, 2, 1), (3, 3, 6), (1, 5, 2), (2, 6, 12), (16, 4, 8)]
)
def test_kernel_takes_every_layout(sizes):
    layout = make_layout(*sizes, smallest=50_000)
    batch = random_batch(1, 77, 5, layout.max_ngram_size)
    actual = ngram_hash_pallas.ngram_hash_pallas(**batch, layout=layout, pad_id=PAD_ID)
    np.testing.assert_array_equal(np.asarray(actual), xla_form(batch, layout))

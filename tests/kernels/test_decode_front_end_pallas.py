"""The fused decode front end: equal to hash, lookup and reordering, and it compiles."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels import aot
from kernels.ragged_batches import PAD_ID, make_layout, random_batch
from kernels.simulated_threads import Memory, Word, simulate
from kernels.test_lookup_pallas import assert_same_rows
from kernels.test_ngram_hash_pallas import HISTORIES, operands, xla_form

from engram_jax import kernels
from engram_jax.kernels import decode_front_end_pallas, ngram_hash_pallas, wkv_pallas


def tables(layout, width):
    rng = np.random.default_rng(0)
    for rows in layout.num_rows:
        weight = rng.integers(0, 256, (rows, width), np.uint8)
        yield weight, rng.integers(0, 256, (rows, width // 32), np.uint8)


def separate_kernels(batch, layout, weights, scales):
    """Hash, lookup and reordering by their XLA forms."""
    hashes = xla_form(batch, layout)
    for layer, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        rows = kernels.lookup(
            jnp.asarray(weight),
            jnp.asarray(scale),
            jnp.asarray(hashes[:, layer]),
            backend="xla",
        )
        yield np.asarray(wkv_pallas.permute_columns(rows.reshape(len(rows), -1)))


def alive_tokens(batch):
    """Tokens of a request that are neither dead nor outside the vocabulary."""
    ids = np.asarray(batch["input_ids"])
    alive = (ids >= 0) & (ids < len(batch["token_map"]))
    if batch.get("dead_mask") is not None:
        alive &= ~np.asarray(batch["dead_mask"])
    starts, token = batch["query_start_loc"], np.arange(len(ids))
    return alive & (token >= starts[0]) & (token < starts[-1])


@pytest.mark.parametrize(
    ("sizes", "history"),
    [
        ((2, 4, 8, 64), HISTORIES[0]),
        ((1, 2, 1, 128), HISTORIES[1]),
        ((3, 3, 5, 192), HISTORIES[4]),
    ],
)
def test_inline_code_equals_separate_kernels(monkeypatch, sizes, history):
    *shape, width = sizes
    layout = make_layout(*shape, smallest=40)
    batch = random_batch(4, 11, 3, layout.max_ngram_size, **history)
    weights, scales = zip(*tables(layout, width), strict=True)
    expected = list(separate_kernels(batch, layout, weights, scales))

    arrays = {name: value for name, value in batch.items() if name != "block_size"}
    given = ngram_hash_pallas.batch_operands(**arrays)
    static = ngram_hash_pallas.batch_sizes(
        given, layout, PAD_ID, batch.get("block_size")
    )
    given |= ngram_hash_pallas.layout_constants(layout)
    buffers = {name: np.asarray(array) for name, array in given.items()}
    names = [(f"w{i}", f"s{i}", f"o{i}") for i in range(layout.num_layers)]
    buffers |= dict(zip([n[0] for n in names], weights, strict=True))
    buffers |= dict(zip([n[1] for n in names], scales, strict=True))
    out = {
        n[2]: np.full((16, e.shape[1]), 0.5, ml_dtypes.bfloat16)
        for n, e in zip(names, expected, strict=True)
    }
    alive = np.full(static.tokens, 2, np.uint8)
    pieces = static.tokens * layout.n_hash_cols * width // 16 + 3
    memory = Memory(buffers, out | {"alive": alive}, threads=pieces)
    simulate(monkeypatch, memory, ngram_hash_pallas, decode_front_end_pallas)
    for layer in range(layout.num_layers):
        decode_front_end_pallas._move_piece(
            {name: name for name in memory.names},
            names,
            static,
            layout,
            Word.of(layer),
            Word(np.arange(pieces)),
            width,
            layout.num_rows,
        )
    for written, wanted in zip(out.values(), expected, strict=True):
        actual, padding = np.split(written, [static.tokens])
        assert (padding == 0.5).all()  # stays as it was
        assert_same_rows(actual, wanted)
    np.testing.assert_array_equal(alive, alive_tokens(batch))


def test_refuses_what_it_cannot_do():
    layout = make_layout()
    ids = jnp.zeros((3,), jnp.int32)
    reason = functools.partial(
        decode_front_end_pallas.unsupported_reason,
        scales=[],
        input_ids=ids,
        layout=layout,
        pad_id=PAD_ID,
    )
    tables = [jnp.zeros((4, 64), jnp.uint8), jnp.zeros((4, 128), jnp.uint8)]
    assert reason(tables[:1]) is None
    assert "differ" in str(reason(tables))
    assert "multiple of 64" in str(reason([jnp.zeros((4, 96), jnp.uint8)]))
    assert "interpreter" in str(reason(tables[:1], interpret=True))


@pytest.mark.parametrize("history", HISTORIES[:2])
@pytest.mark.parametrize("tokens", [1, 16])
def test_compiles_for_hopper(tokens, history):
    layout = make_layout()
    batch, block_size = operands(random_batch(0, tokens, tokens, 4, **history))
    static = {"layout": layout, "pad_id": PAD_ID, "block_size": block_size}
    weights = [aot.operand((rows, 256), jnp.float8_e4m3fn) for rows in layout.num_rows]
    scales = [aot.operand((rows, 8), jnp.uint8) for rows in layout.num_rows]
    compiled = aot.compile_for_hopper(
        lambda weights, scales, batch: decode_front_end_pallas.decode_front_end_pallas(
            weights, scales, **batch, **static
        ),
        weights,
        scales,
        batch,
    )
    rows, alive = compiled.out_info
    assert [out.shape for out in rows] == [(8 if tokens == 1 else 16, 6144)] * 2
    assert (alive.shape, alive.dtype) == ((tokens,), jnp.bool_)
    assert "fusion" not in aot.text_of(compiled)  # nothing but the kernel


@pytest.mark.gpu
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("tokens", [1, 16, 61])
def test_kernel_equals_separate_kernels(tokens, history):
    layout = make_layout(smallest=500)
    batch = random_batch(tokens, tokens, 1 + tokens // 2, 4, **history)
    weights, scales = zip(*tables(layout, 256), strict=True)
    out, alive = decode_front_end_pallas.decode_front_end_pallas(
        [*map(jnp.asarray, weights)],
        [*map(jnp.asarray, scales)],
        **batch,
        layout=layout,
        pad_id=PAD_ID,
    )
    np.testing.assert_array_equal(alive, alive_tokens(batch))
    expected = separate_kernels(batch, layout, weights, scales)
    for actual, wanted in zip(out, expected, strict=True):
        assert_same_rows(np.asarray(actual)[:tokens], wanted)

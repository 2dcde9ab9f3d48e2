"""Launches each GPU kernel at small sizes and compares it with its XLA form.

    compute-sanitizer --tool memcheck --error-exitcode 1 \
        --kernel-name kns=mosaic python tests/kernels/small_launches.py wkv

`test_sanitized.py` runs this for every kernel and tool.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_stack import CONFIG, make_stack, random_ids, token_map

from engram_jax import EngramLayout, NgramHashState, kernels
from engram_jax.kernels import gate_pallas, wkv_pallas
from engram_jax.kernels.block_sizes import GateSizes, WkvSizes


def same(found, wanted) -> None:
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8)
    )


def near(found, wanted) -> None:
    """Compares bfloat16 results whose sums were added up in another order."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    atol = 2.0**-6 * np.abs(wanted).mean()
    np.testing.assert_allclose(found, wanted, rtol=2.0**-6, atol=atol)


def on_cpu():
    """Runs the XLA form elsewhere, so that nothing but the kernels is watched."""
    return jax.default_device(jax.devices("cpu")[0])


def ragged_batch(tokens: int) -> dict:
    """Makes two requests with windows, dead tokens and a padding token."""
    return {
        "input_ids": random_ids(tokens),
        "positions": np.arange(tokens),
        "query_start_loc": [0, tokens // 2, max(tokens - 1, 0)],
        "dead_mask": np.arange(tokens) % 5 == 3,
        "lookback_token_ids": [[5, 7, -1], [1, 2, 3]],
    }


def hashes(tokens: int, backend: kernels.Backend) -> jax.Array:
    """Hashes a batch of `small_stack.CONFIG`."""
    layout = EngramLayout.from_config(CONFIG)
    state = NgramHashState(layout, token_map(), backend=backend)
    return state(**ragged_batch(tokens))


def ngram_hash() -> None:
    """Hashes batches of one and of several blocks."""
    for tokens in (3, 70, 600):
        found = hashes(tokens, "pallas")
        with on_cpu():
            same(found, hashes(tokens, "xla"))


def wide_stack():
    """Makes a small stack whose rows are wide enough for every kernel."""
    return make_stack(head_dim=64)


def tables() -> list[tuple[np.ndarray, np.ndarray]]:
    """Gives the values and scales of both layers of a small stack."""
    with on_cpu():
        layers = wide_stack().layers.values()
        return [
            (np.asarray(x.embedding.weight[...]), np.asarray(x.embedding.scale[...]))
            for x in layers
        ]


def lookup() -> None:
    """Reads rows at both ends of a window, and outside of it."""
    weight, scale = tables()[0]
    for count in (1, 37, 5000):
        ids = np.random.default_rng(count).integers(-3, 910, count).astype(np.int32)
        ids[0] = 889
        for function in (kernels.lookup, kernels.lookup_packed):

            def rows(backend, function=function, ids=ids):
                parts = map(jnp.asarray, (weight, scale, ids))
                return function(*parts, row_start=2, row_end=890, backend=backend)

            found = rows("pallas")
            with on_cpu():
                same(found, rows("xla"))

    weights, scales = zip(*(map(jnp.asarray, parts) for parts in tables()), strict=True)
    bounds = jnp.array([[2, 890], [0, 900]], jnp.int32)
    ids = np.random.default_rng(0).integers(-3, 910, (300, 2, 12)).astype(np.int32)
    for packed in (False, True):

        def rows_of_layers(backend, packed=packed):
            parts = weights, scales, jnp.asarray(ids), bounds
            return kernels.lookup_layers(*parts, packed=packed, backend=backend)

        found = rows_of_layers("pallas")
        with on_cpu():
            same(found, rows_of_layers("xla"))


def decode_front_end() -> None:
    """Hashes and reads the rows of both layers at once."""
    stack = wide_stack()
    for tokens in (2, 19, 64):
        batch = stack.batch(**ragged_batch(tokens))
        assert batch.rows is not None, "the fused kernel did not run"
        with on_cpu():
            ids = hashes(tokens, "xla")
            for index, (weight, scale) in enumerate(tables()):
                parts = jnp.asarray(weight), jnp.asarray(scale), ids[:, index]
                rows = kernels.lookup(*parts, backend="xla").reshape(tokens, -1)
                wanted = wkv_pallas.permute_columns(rows)
                same(batch.rows[index].values[:tokens], wanted[:tokens])


def gate() -> None:
    """Gates with and without a ring of buffers, masked."""
    for tokens, streams, width, sizes in (
        (3, 4, 256, None),
        (1, 1, 32, None),
        (300, 4, 512, None),
        (37, 2, 5120, GateSizes(2, 4)),
        (9, 4, 96, GateSizes(3, 2)),
    ):
        rng = np.random.default_rng(tokens)
        shapes = (tokens, streams, width), (tokens, (streams + 1) * width)
        shapes += ((streams, width),) * 2
        arrays = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes]
        mask = np.arange(tokens) % 3 != 1
        options = {"eps": 1e-6, "clamp": 1e-6}
        found = gate_pallas.gate_pallas(*arrays, mask, sizes=sizes, **options)
        with on_cpu():
            arrays = map(jnp.asarray, arrays)
            masked = functools.partial(kernels.gate, token_mask=jnp.asarray(mask))
            near(found, masked(*arrays, backend="xla", **options))


def wkv() -> None:
    """Projects with one and with several slabs a warpgroup, and a large scale."""
    for tokens, outputs, inputs, largest, sizes in (
        (3, 640, 256, 130, None),
        (17, 200, 160, 220, None),
        (64, 1280, 384, 130, WkvSizes(256, 128, 2, 64, 3)),
        (100, 320, 512, 130, None),
        (1, 64, 6144, 220, None),
    ):
        rng = np.random.default_rng(tokens)
        weight = rng.integers(0, 126, (outputs, inputs)).astype(np.uint8)
        weight |= rng.integers(0, 2, weight.shape).astype(np.uint8) << 7
        scale = rng.integers(120, 130, (-(-outputs // 32), inputs // 32))
        scale[0, 0] = largest
        rows = rng.normal(size=(tokens, inputs)).astype(jnp.bfloat16)
        operands = rows, weight, scale.astype(np.uint8)
        found = wkv_pallas.wkv_pallas(*operands, sizes=sizes)
        with on_cpu():
            near(found, kernels.wkv(*map(jnp.asarray, operands), backend="xla"))


LAUNCHES = {
    function.__name__: function
    for function in (ngram_hash, lookup, decode_front_end, gate, wkv)
}

if __name__ == "__main__":
    LAUNCHES[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]}: right\n")

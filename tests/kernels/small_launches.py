"""Launches each GPU kernel at small sizes and compares it with its XLA form.

    compute-sanitizer --tool memcheck --error-exitcode 1 \
        --kernel-regex kns=mosaic python tests/kernels/small_launches.py wkv

`test_sanitized.py` runs this for every kernel and tool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_stack import make_stack, random_ids

from engram_jax import NgramHashState, kernels
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


def ragged_batch(tokens: int) -> dict:
    """Makes two requests with windows, dead tokens and a padding token."""
    return {
        "input_ids": random_ids(tokens),
        "positions": np.arange(tokens),
        "query_start_loc": [0, tokens // 2, max(tokens - 1, 0)],
        "dead_mask": np.arange(tokens) % 5 == 3,
        "lookback_token_ids": [[5, 7, -1], [1, 2, 3]],
    }


def ngram_hash() -> None:
    """Hashes batches of one and of several blocks."""
    stack = make_stack()
    token_map = stack.hash_state.token_map[...]
    for tokens in (3, 70, 600):
        found, wanted = (
            NgramHashState(stack.layout, token_map, backend=backend)(
                **ragged_batch(tokens)
            )
            for backend in ("pallas", "xla")
        )
        same(found, wanted)


def lookup() -> None:
    """Reads rows at both ends of a window, and outside of it."""
    layer = make_stack().layers[1].embedding
    parts = layer.weight[...], layer.scale[...]
    for count in (1, 37, 5000):
        ids = np.random.default_rng(count).integers(-3, 910, count)
        ids[0] = 889
        for function in (kernels.lookup, kernels.lookup_packed):
            found, wanted = (
                function(
                    *parts, jnp.asarray(ids), row_start=2, row_end=890, backend=backend
                )
                for backend in ("pallas", "xla")
            )
            same(found, wanted)


def decode_front_end() -> None:
    """Hashes and reads the rows of both layers at once."""
    stack = make_stack()
    for tokens in (2, 19, 64):
        batch = stack.batch(**ragged_batch(tokens))
        assert batch.rows is not None, "the fused kernel did not run"
        for index, (layer, rows) in enumerate(
            zip(stack.layers.values(), batch.rows, strict=True)
        ):
            table = layer.embedding
            wanted = kernels.lookup(
                table.weight[...],
                table.scale[...],
                batch.hash_ids[:, index],
                backend="xla",
            ).reshape(tokens, -1)
            same(rows.values[:tokens], wkv_pallas.permute_columns(wanted)[:tokens])


def gate() -> None:
    """Gates with and without a ring of buffers, masked."""
    for tokens, streams, width, sizes in (
        (3, 4, 256, None),
        (1, 1, 32, None),
        (300, 4, 512, None),
        (37, 2, 5120, GateSizes(2, 4)),
        (9, 4, 96, GateSizes(3, 2)),
    ):
        keys = jax.random.split(jax.random.key(tokens), 4)
        shapes = (tokens, streams, width), (tokens, (streams + 1) * width)
        shapes += ((streams, width),) * 2
        operands = [
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=True)
        ]
        mask = jnp.arange(tokens) % 3 != 1
        options = {"eps": 1e-6, "clamp": 1e-6}
        near(
            gate_pallas.gate_pallas(*operands, mask, sizes=sizes, **options),
            kernels.gate(*operands, token_mask=mask, backend="xla", **options),
        )


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
        operands = (
            jnp.asarray(rng.normal(size=(tokens, inputs)), jnp.bfloat16),
            jnp.asarray(weight),
            jnp.asarray(scale.astype(np.uint8)),
        )
        near(
            wkv_pallas.wkv_pallas(*operands, sizes=sizes),
            kernels.wkv(*operands, backend="xla"),
        )


LAUNCHES = {
    function.__name__: function
    for function in (ngram_hash, lookup, decode_front_end, gate, wkv)
}

if __name__ == "__main__":
    LAUNCHES[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]}: right\n")

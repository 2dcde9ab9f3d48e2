"""Engram layers made on the devices, whose every byte follows from its row and column.

A table on one device, its shards on many, and any row of it in NumPy are the same
numbers, so that a table of any size can be checked without being read back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from v41 import V41_CONFIG

import engram_jax
from engram_jax import EngramConfig, EngramLayout, EngramSharding

V41 = EngramConfig.from_dict(V41_CONFIG)
SMALL = dataclasses.replace(
    V41,
    vocab_size=3000,
    compressed_vocab_size=2500,
    hidden_size=64,
    hc_mult=2,
    head_dim=32,
)
"""V4.1's 24 columns at widths that a CPU runs in no time."""

_VALUES, _SCALES, _WEIGHTS, _BLOCK_SCALES = range(4)


def with_rows(config: EngramConfig, rows: int) -> EngramConfig:
    """Give a config tables of at most so many rows: a smaller base, the same hash.

    Args:
        config: the sizes.
        rows: of each table; at least a thousand for each column.

    Returns:
        The config.
    """
    per_column = rows // config.n_hash_cols
    primes = config.num_layers * config.n_hash_cols
    room = int(2 * primes * math.log(per_column))  # primes lie log(n) apart
    return dataclasses.replace(
        config,
        vocab_base=per_column - room,
        num_embeddings=(rows,) * config.num_layers,
    )


def mixed_bytes(xp: Any, seed: int, row: Any, column: Any, low: int, high: int) -> Any:
    """Compute the bytes at rows and columns: from `low` to `high`, evenly spread.

    Args:
        xp: `numpy` or `jax.numpy`.
        seed: of the array.
        row: uint32, of any shape that goes with that of `column`.
        column: uint32.
        low: smallest byte.
        high: largest byte.

    Returns:
        uint8.
    """
    u32 = xp.uint32
    x = row * u32(2654435761) + column * u32(40503 + 2 * seed) + u32(seed)
    x = (x ^ (x >> u32(15))) * u32(2246822519)
    x = (x ^ (x >> u32(13))) * u32(3266489917)
    return (u32(low) + (x >> u32(8)) % u32(high - low + 1)).astype(xp.uint8)


def _finite(xp: Any, spread: Any) -> Any:
    """Turn 0 to 253 into the e4m3 codes of finite values of both signs."""
    return spread + (spread > 126).astype(xp.uint8)


def known_rows(layer: int, rows: np.ndarray, width: int) -> np.ndarray:
    """Compute packed rows of a layer's table in NumPy.

    Args:
        layer: the layer's index, from 0.
        rows: their numbers [..].
        width: D.

    Returns:
        uint8 [.., D + D/32].
    """
    row = np.asarray(rows).astype(np.uint32)[..., None]
    seed = 10 * layer
    column = np.arange(width, dtype=np.uint32)
    values = _finite(np, mixed_bytes(np, seed + _VALUES, row, column, 0, 253))
    scales = mixed_bytes(np, seed + _SCALES, row, column[: width // 32], 118, 129)
    return np.concatenate([values, scales], axis=-1)


def make_table(
    config: EngramConfig,
    layout: EngramLayout,
    layer: int,
    sharding: EngramSharding | None = None,
    device: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Make a table where it shall lie, each shard on its device, without a copy.

    Args:
        config: the row width.
        layout: the layer's rows.
        layer: the layer's index, from 0.
        sharding: how it lies on a mesh, or None for one device.
        device: that device; None takes the first.

    Returns:
        e4m3 [R, D] and scale bytes [R, D/32]; on a mesh R is padded, as
        `EngramSharding.place_table` does.
    """
    rows, width, seed = layout.num_rows[layer], config.head_dim, 10 * layer
    if sharding is not None:
        rows = sharding.shards.rows_per_shard[layer]

    def grid(first, columns):
        # int32 would do: a table has fewer rows than that.
        row = lax.broadcasted_iota(jnp.uint32, (rows, columns), 0) + first
        return row, lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)

    def values(first):
        spread = mixed_bytes(jnp, seed + _VALUES, *grid(first, width), 0, 253)
        return lax.bitcast_convert_type(_finite(jnp, spread), jnp.float8_e4m3fn)

    def scales(first):
        place = grid(first, width // 32)
        return mixed_bytes(jnp, seed + _SCALES, *place, 118, 129)

    if sharding is None:
        place = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
        zero = np.uint32(0)
        make: Callable[..., Any] = lambda f: jax.jit(  # noqa: E731
            lambda: f(zero), out_shardings=place
        )()
        return make(values), make(scales)

    starts = sharding.shards.row_start[layer].astype(np.uint32)
    axes = sharding.table_axes

    def make_shards(function):
        def body():
            shard = lax.axis_index(axes) if axes else 0
            return function(jnp.asarray(starts)[shard])

        return sharding.shard_map(body, (), sharding.table)()

    return make_shards(values), make_shards(scales)


def make_projection(
    config: EngramConfig,
    layer: int,
    sharding: EngramSharding | None = None,
    device=None,
) -> tuple[jax.Array, jax.Array]:
    """Make a projection's e4m3 weight and its block scales where they shall lie."""
    outputs, inputs = _projection_shape(config)
    place: Any = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    if sharding is not None:
        outputs = sharding.padded_width(outputs)
        place = sharding.named(sharding.projection)
    seed = 10 * layer

    def values():
        shape = (outputs, inputs)
        row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        spread = mixed_bytes(jnp, seed + _WEIGHTS, row, column, 0, 253)
        return lax.bitcast_convert_type(_finite(jnp, spread), jnp.float8_e4m3fn)

    def scales():
        shape = (-(-outputs // 32), inputs // 32)
        row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        return mixed_bytes(jnp, seed + _BLOCK_SCALES, row, column, 106, 110)

    weight = jax.jit(values, out_shardings=place)()
    return weight, jax.jit(scales, out_shardings=place)()


def _projection_shape(config: EngramConfig) -> tuple[int, int]:
    outputs = (config.hc_mult + 1) * config.hidden_size
    return outputs, config.n_hash_cols * config.head_dim


def make_token_map(config: EngramConfig) -> np.ndarray:
    """Make a map of the config's sizes: every compressed id, in no order."""
    assert config.compressed_vocab_size is not None
    compressed, vocab = config.compressed_vocab_size, config.vocab_size
    rng = np.random.default_rng(0)
    ids = np.arange(compressed)
    more = rng.integers(0, compressed, vocab - compressed)
    return rng.permutation(np.concatenate([ids, more])).astype(np.int32)


def make_stack(
    config: EngramConfig,
    layout: EngramLayout,
    sharding: EngramSharding | None = None,
    device: Any = None,
    tables: list[tuple[jax.Array, jax.Array]] | None = None,
) -> engram_jax.EngramStack:
    """Make a stack on one device or on a mesh, with the same numbers in both.

    Args:
        config: its sizes.
        layout: of that config.
        sharding: how it lies on a mesh, or None for one device.
        device: that device; None takes the first.
        tables: what `make_table` gave for each layer, if it is there already.

    Returns:
        The stack.
    """
    whole: Any = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    if sharding is not None:
        whole = sharding.named(P())
    layers = {}
    for index, layer_id in enumerate(config.layer_ids):
        table = (
            make_table(config, layout, index, sharding, device)
            if tables is None
            else tables[index]
        )
        shape = (2, config.hc_mult, config.hidden_size)
        norms = np.random.default_rng(index).normal(1, 0.3, shape)
        q, k = (put(x.astype(jnp.bfloat16), whole) for x in norms)
        layers[layer_id] = engram_jax.Engram(
            engram_jax.ParallelEngramEmbedding(
                *table, sharding=sharding, layer_index=index if sharding else 0
            ),
            *make_projection(config, index, sharding, device),
            q,
            k,
            eps=config.rms_norm_eps,
        )
    state = engram_jax.NgramHashState(layout, make_token_map(config))
    state.token_map[...] = put(np.asarray(state.token_map[...]), whole)
    return engram_jax.EngramStack(config, state, layers)


def with_sharding(
    stack: engram_jax.EngramStack, sharding: EngramSharding
) -> engram_jax.EngramStack:
    """Make another stack of the same arrays, whose rows travel in another form.

    Args:
        stack: on the mesh.
        sharding: cuts tables and projections as that of the stack does.

    Returns:
        The stack; nothing is copied.
    """
    layers = {}
    for index, (layer_id, old) in enumerate(stack.layers.items()):
        table, scale = old.embedding, old.wkv_scale
        assert scale is not None
        layers[layer_id] = engram_jax.Engram(
            engram_jax.ParallelEngramEmbedding(
                table.weight[...],
                table.scale[...],
                sharding=sharding,
                layer_index=index,
            ),
            old.wkv_weight[...],
            scale[...],
            old.q_weight[...],
            old.k_weight[...],
            eps=old.eps,
        )
        layers[layer_id].wkv_expanded = old.wkv_expanded
    return engram_jax.EngramStack(stack.config, stack.hash_state, layers)


def put(array: np.ndarray, place: Any) -> jax.Array:
    """Put an array that every process knows, also where other processes have parts.

    Args:
        array: the whole of it.
        place: its sharding.

    Returns:
        The device array.
    """
    return jax.make_array_from_callback(
        array.shape, place, lambda index: array[index], dtype=array.dtype
    )


def make_batch(config: EngramConfig, tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Make a batch in the middle of its requests, with lookback.

    Args:
        config: the vocabulary.
        tokens: up to 64, one of each request; else chunks of 64.
        seed: of the token ids.

    Returns:
        The arguments of `EngramStack.batch`.
    """
    requests = tokens if tokens <= 64 else tokens // 64
    length, depth = tokens // requests, config.max_ngram_size - 1
    rng = np.random.default_rng([seed, tokens])
    ids = rng.integers(0, config.vocab_size, (requests, length + depth), np.int32)
    return {
        "input_ids": ids[:, depth:].reshape(-1),
        "positions": np.tile(np.arange(length, dtype=np.int32) + 100, requests),
        "query_start_loc": np.arange(0, tokens + 1, length, dtype=np.int32),
        "lookback_token_ids": ids[:, :depth][:, ::-1].copy(),
        "lookback_dead_mask": np.zeros((requests, depth), bool),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of a stack as a function of arrays, to jit.

    Attributes:
        leaves: the stack's arrays: a list costs a call less than an `nnx.State`.
        merge: makes the stack of them, inside the function.
        by_replica: whether batches have a leading axis of replicas.
    """

    leaves: list[jax.Array]
    merge: Callable[[list[Any]], engram_jax.EngramStack]
    by_replica: bool

    @classmethod
    def of(cls, stack: engram_jax.EngramStack) -> Step:
        """Take a stack apart."""
        graph, tree = nnx.split(stack)
        leaves, structure = jax.tree.flatten(tree)
        sharding = stack.sharding

        def merge(leaves):
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves))

        return cls(leaves, merge, sharding is not None and bool(sharding.data_axes))

    def make_batch(self, leaves: list[Any], batch: dict[str, Any]) -> Any:
        """Run hash and rows of every layer."""
        stack = self.merge(leaves)
        return (stack.replica_batch if self.by_replica else stack.batch)(**batch)

    def __call__(self, leaves: list[Any], hidden: Any, batch: dict[str, Any]) -> Any:
        """Run hash, rows, projection and gate of every layer."""
        stack, made = self.merge(leaves), self.make_batch(leaves, batch)
        for layer_id in stack.config.layer_ids:
            hidden = stack(layer_id, hidden, made)
        return hidden


def place_batch(
    sharding: EngramSharding | None,
    batches: list[dict[str, np.ndarray]],
    device: Any = None,
) -> dict[str, jax.Array]:
    """Put each replica's batch where a step wants it.

    Args:
        sharding: how tokens lie on the mesh, or None for one device.
        batches: one of each replica.
        device: the one device.

    Returns:
        The arguments of `EngramStack.batch`, or of `replica_batch` where the mesh has a
        data axis.
    """
    if sharding is None or not sharding.data_axes:
        (known,) = batches
        place: Any = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
        place = place if sharding is None else sharding.named(P())
    else:
        known = {name: np.stack([b[name] for b in batches]) for name in batches[0]}
        place = sharding.named(sharding.replica)
    return {name: put(x, place) for name, x in known.items()}


def make_hidden(
    config: EngramConfig,
    tokens: int,
    sharding: EngramSharding | None = None,
    device: Any = None,
) -> jax.Array:
    """Make residual streams of all replicas' tokens, laid out as the library says."""
    shape = (tokens, config.hc_mult, config.hidden_size)
    place: Any = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    if sharding is not None:
        even = tokens % sharding.size(sharding.token_axes) == 0
        place = sharding.named(sharding.tokens if even else P())

    def make():
        row = lax.broadcasted_iota(jnp.uint32, shape, 0)
        column = lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(shape[2])
        column += lax.broadcasted_iota(jnp.uint32, shape, 2)
        return (
            mixed_bytes(jnp, 99, row, column, 0, 255).astype(jnp.float32) / 64 - 2
        ).astype(jnp.bfloat16)

    return jax.jit(make, out_shardings=place)()

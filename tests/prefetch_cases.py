"""What the tests of `EngramPrefetch` share: tables in files, batches, comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
from small_stack import CONFIG, random_ids

import engram_jax
from engram_jax.host_storage import MappedFileTable
from engram_jax.safetensors_file import SafetensorsWriter, read_header


def with_storage(stack, storage_of) -> engram_jax.EngramStack:
    """Gives a stack's layers other tables with the same rows."""
    layers = {}
    for layer_id, layer in stack.layers.items():
        table = layer.embedding
        storage = storage_of(
            layer_id, np.asarray(table.weight[...]), np.asarray(table.scale[...])
        )
        layers[layer_id] = engram_jax.Engram(
            engram_jax.ParallelEngramEmbedding.from_storage(storage),
            layer.wkv_weight[...],
            layer.wkv_scale[...],
            layer.q_weight[...],
            layer.k_weight[...],
            eps=layer.eps,
        )
    return engram_jax.EngramStack(stack.config, stack.hash_state, layers)


def mapped(folder):
    """Makes tables in files of a folder."""

    def storage(layer_id, values, scales):
        path = folder / f"{layer_id}.safetensors"
        tensors = {
            "weight": ("F8_E4M3", values.shape),
            "scale": ("F8_E8M0", scales.shape),
        }
        with SafetensorsWriter(path, tensors) as writer:
            writer.write("weight", values)
            writer.write("scale", scales)
        infos = read_header(path)
        return MappedFileTable(infos["weight"], infos["scale"])

    return storage


def random_batch(tokens: int, seed: int) -> dict[str, Any]:
    """Makes a ragged batch with dead tokens and lookback windows."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 5))
    cuts = np.sort(rng.integers(0, tokens + 1, requests - 1))
    starts = np.array([0, *cuts, tokens if seed % 3 else max(0, tokens - 2)])
    starts = np.minimum(starts, starts[-1])
    first = rng.integers(0, 6, requests)
    owner = np.searchsorted(starts[1:], np.arange(tokens), side="right")
    owner = np.minimum(owner, requests - 1)
    return {
        "input_ids": random_ids(tokens, seed),
        "positions": (np.arange(tokens) - starts[owner] + first[owner]).clip(0),
        "query_start_loc": starts,
        "dead_mask": rng.random(tokens) < 0.1,
        "lookback_token_ids": rng.integers(-1, CONFIG.vocab_size, (requests, 3)),
    }


def random_hashes(tokens: int, seed: int) -> np.ndarray:
    """Makes rows of both layers' tables."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 850, (tokens, 2, 6)).astype(np.int32)


def run_layers(stack, hidden, batch):
    for layer_id in CONFIG.layer_ids:
        hidden = stack(layer_id, hidden, batch)
    return hidden


def same(actual, expected) -> None:
    np.testing.assert_array_equal(
        np.asarray(actual).view(np.uint8), np.asarray(expected).view(np.uint8)
    )


def warmed(prefetch, hashes) -> None:
    """Leaves a buffer that can be filled at once, so that `start` begins to gather."""
    for _ in range(4):
        prefetch.start(hashes).result()
    for buffers in prefetch._fetcher._free._buffers.values():
        for buffer in buffers:
            buffer.wait_for_readers()

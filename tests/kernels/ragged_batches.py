"""Random ragged batches and layouts for the kernels' tests: every odd case at once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from engram_jax.layout import (
    EngramLayout,
    compute_hash_multipliers,
    find_next_prime,
)

VOCAB, COMPRESSED, PAD_ID = 300, 211, 5


def make_layout(
    layers: int = 2,
    depth: int = 4,
    heads: int = 8,
    *,
    smallest: int = 16_000_000,
    compressed: int = COMPRESSED,
) -> EngramLayout:
    """A layout with the next primes above `smallest`."""
    primes, seen, last = [], set(), smallest - 1
    for _ in range(layers * (depth - 1) * heads):
        last = find_next_prime(last, seen)
        primes.append(last)
    primes = np.array(primes).reshape(layers, -1)
    ids = tuple(range(1, layers + 1))
    return EngramLayout(
        layer_ids=ids,
        primes=primes.reshape(layers, depth - 1, heads),
        offsets=np.cumsum(primes, axis=1) - primes,
        multipliers=compute_hash_multipliers(ids, depth, compressed),
        num_rows=tuple(map(int, primes.sum(1))),
        pad_token_id=2,
        compressed_vocab_size=compressed,
        max_ngram_size=depth,
        n_heads=heads,
    )


def random_batch(
    seed: int,
    tokens: int,
    requests: int,
    depth: int,
    *,
    masks: bool = True,
    lookback: bool = True,
    cache: bool = True,
) -> dict:
    """Operands of `kernels.ngram_hash`, as keywords.

    Chunks of all lengths, empty ones too, start anywhere in their requests; tokens
    stand before the first request and after the last; ids fall outside the vocabulary;
    lookback ids are unknown or invalid; blocks are negative, too large or missing.
    """
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(0, tokens + 1, requests + 1))
    if tokens < 3 * requests or seed % 2:  # else the ends stay unowned
        starts[0], starts[-1] = 0, tokens
    first = rng.integers(0, 2 * depth, requests)  # each chunk's first position
    request = np.clip(np.searchsorted(starts, np.arange(tokens), "right") - 1, 0, None)
    request = np.minimum(request, requests - 1)
    positions = np.arange(tokens) - starts[request] + first[request]
    ids = rng.integers(0, VOCAB, tokens)
    odd = rng.random(tokens) < 0.05
    ids[odd] = rng.choice([-1, VOCAB, -(2**31), 2**31 - 1], odd.sum())
    token_map = rng.permutation(np.arange(VOCAB) % COMPRESSED)
    batch = {
        "input_ids": ids,
        "positions": positions,
        "query_start_loc": starts,
        "token_map": token_map,
    }
    if masks:
        batch["dead_mask"] = rng.random(tokens) < 0.1
    if lookback:
        window = rng.integers(0, VOCAB, (requests, depth - 1))
        odd = rng.random(window.shape) < 0.3
        window[odd] = rng.choice([-1, -1, -2, VOCAB], odd.sum())
        batch["lookback_token_ids"] = window
        if masks:
            batch["lookback_dead_mask"] = rng.random(window.shape) < 0.15
    blocks, block_size = 5, 3
    if cache:
        slots = rng.integers(0, COMPRESSED, blocks * block_size * requests + 1)
        odd = rng.random(slots.shape) < 0.3
        slots[odd] = rng.choice([-1, -2], odd.sum())
        table = rng.integers(-2, blocks * requests + 2, (requests, blocks))
        batch |= {"slot_cache": slots, "block_table": table}
    batch = {
        name: jnp.asarray(value, jnp.bool_ if value.dtype == bool else jnp.int32)
        for name, value in batch.items()
    }
    return batch | ({"block_size": block_size} if cache else {})

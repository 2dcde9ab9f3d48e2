"""A stack small enough to run anywhere, with every part that a large one has."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

import engram_jax

CONFIG = engram_jax.EngramConfig(
    layer_ids=(1, 3),
    num_embeddings=(900, 1000),
    max_ngram_size=4,
    vocab_base=101,
    n_heads=2,
    head_dim=32,
    pad_token_id=2,
    hidden_size=48,
    hc_mult=2,
    rms_norm_eps=1e-20,
    vocab_size=120,
    compressed_vocab_size=100,
)


def token_map() -> np.ndarray:
    """Gives 120 tokens 100 compressed ids, in an order that is not the tokens'."""
    ids = np.concatenate([np.arange(100), np.arange(0, 40, 2)])
    return np.random.default_rng(7).permutation(ids).astype(np.int32)


def make_layer(
    config: engram_jax.EngramConfig, rows: int, rng: np.random.Generator, **backend
) -> engram_jax.Engram:
    """Makes one layer with random finite rows and weights."""
    width = config.n_hash_cols * config.head_dim
    out = (config.hc_mult + 1) * config.hidden_size
    values = rng.integers(0, 120, (rows, config.head_dim)).astype(np.uint8)
    values |= rng.integers(0, 2, values.shape).astype(np.uint8) << 7
    scale = rng.integers(119, 125, (rows, config.head_dim // 32)).astype(np.uint8)
    q, k = rng.normal(1, 0.3, (2, config.hc_mult, config.hidden_size))
    return engram_jax.Engram(
        engram_jax.ParallelEngramEmbedding(
            jnp.asarray(values).view(jnp.float8_e4m3fn), jnp.asarray(scale), **backend
        ),
        jnp.asarray(rng.normal(size=(out, width)), jnp.float8_e4m3fn),
        jnp.asarray(
            rng.integers(122, 125, (-(-out // 32), width // 32)).astype(np.uint8)
        ),
        jnp.asarray(q, jnp.bfloat16),
        jnp.asarray(k, jnp.bfloat16),
        eps=config.rms_norm_eps,
        **backend,
    )


def make_stack(seed: int = 0, **changes) -> engram_jax.EngramStack:
    """Makes a stack of `CONFIG`, with changes to its fields."""
    config = dataclasses.replace(CONFIG, **changes)
    layout = engram_jax.EngramLayout.from_config(config)
    rng = np.random.default_rng(seed)
    layers = {
        layer_id: make_layer(config, rows, rng)
        for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True)
    }
    return engram_jax.EngramStack(
        config, engram_jax.NgramHashState(layout, token_map()), layers
    )


def random_hidden(tokens: int, seed: int = 1, dtype=jnp.bfloat16):
    """Makes residual streams [T, M, E]."""
    shape = (tokens, CONFIG.hc_mult, CONFIG.hidden_size)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_ids(tokens: int, seed: int = 2) -> np.ndarray:
    """Makes raw token ids [T]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, CONFIG.vocab_size, tokens).astype(np.int32)

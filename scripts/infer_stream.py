"""Runs one request through the Engram layers as a server does: in chunks, then singly.

There is no transformer here, so hidden states are stand-ins: each token id has a fixed
random vector per residual stream, and every Engram layer is given the same ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from infer_mesh import to_host

from engram_jax import EngramConfig, EngramStack, pad_batch

BLOCK_SIZE = 16
"""Positions in a block of the slot cache, as of a paged KV cache."""

_PROGRESS_EVERY = 16


@dataclass(frozen=True)
class Computed:
    """What a text gave.

    Attributes:
        hashes: the rows' numbers, int32 [T, L, C].
        rows: the rows themselves, packed, one array [T, C, D + D/32] for each layer.
        outputs: each layer's residual streams, [L, T, M, E].
    """

    hashes: np.ndarray
    rows: list[np.ndarray]
    outputs: np.ndarray


@dataclass(frozen=True)
class Times:
    """How long each phase took, in seconds."""

    compile: float
    prefill: float
    decode: float


@functools.partial(jax.jit, static_argnames=("streams", "width"))
def _stand_ins(ids: jax.Array, streams: int, width: int) -> jax.Array:
    def of_token(token_id):
        key = jax.random.fold_in(jax.random.key(0), token_id)
        return jax.random.normal(key, (streams, width), jnp.bfloat16)

    return jax.vmap(of_token)(ids)


def stand_in_hidden_states(ids: np.ndarray, config: EngramConfig) -> np.ndarray:
    """Draws each token id's vectors, the same at every place: bfloat16 [T, M, E].

    A model's hidden states come from its embedding and the layers before; these take
    their place where only the Engram layers are at hand.
    """
    return np.asarray(_stand_ins(ids, config.hc_mult, config.hidden_size))


def compute_at_once(stack: EngramStack, ids: np.ndarray) -> Computed:
    """Runs the whole text in one pass, without any state."""
    graph, weights = nnx.split(stack)
    tokens = len(ids)

    @jax.jit
    def whole(weights, ids, hidden):
        model = nnx.merge(graph, weights)
        batch = model.batch(ids, jnp.arange(tokens), jnp.array([0, tokens]))
        return batch.hash_ids, _run_layers(model, hidden, batch)

    hashes, outputs = whole(weights, ids, stand_in_hidden_states(ids, stack.config))
    return Computed(to_host(hashes), _read_rows(stack, hashes), to_host(outputs))


def compute_as_stream(
    stack: EngramStack,
    ids: np.ndarray,
    *,
    prefill_tokens: int,
    chunk: int,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> tuple[Computed, Times]:
    """Prefills in chunks, then decodes token by token, with donated state.

    The state is a slot cache: the compressed id of each position, in blocks that are
    in no order, as a paged KV cache hands them out.

    Args:
        stack: the Engram layers.
        ids: the text's token ids, int32 [T].
        prefill_tokens: how many of them come in chunks; the rest come one by one.
        chunk: tokens in a chunk; a shorter one is padded, not compiled anew.
        progress: called with "compile", "prefill" or "decode", steps done (from 0), and
            steps.

    Returns:
        The same as in one pass, and the times. Each phase ends when its results are
        there.
    """
    graph, weights = nnx.split(stack)

    # The slot cache is given away: each step writes into the memory of the last one.
    @functools.partial(jax.jit, donate_argnames="slot_cache")
    def step(weights, slot_cache, batch, text, start):
        model = nnx.merge(graph, weights)
        tokens = batch["input_ids"].shape[0]
        hidden = jax.lax.dynamic_slice_in_dim(text, start, tokens)
        engram_batch, slot_cache = model.batch(
            **batch, slot_cache=slot_cache, block_size=BLOCK_SIZE
        )
        outputs = _run_layers(model, hidden, engram_batch)
        return slot_cache, engram_batch.hash_ids, outputs

    # On the device, as hidden states are in a model; the last chunk may be padded.
    hidden = stand_in_hidden_states(ids, stack.config)
    text = jnp.pad(hidden, ((0, chunk), (0, 0), (0, 0)))
    blocks = -(-len(ids) // BLOCK_SIZE)
    block_table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    place = np.arange(len(ids), dtype=np.int32)
    slots = block_table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE

    def run(slot_cache, start, stop):
        size = 1 if stop - start == 1 else chunk
        batch = pad_batch(
            input_ids=ids[start:stop],
            positions=place[start:stop],
            query_start_loc=np.array([0, stop - start], np.int32),
            slot_mapping=slots[start:stop],
            block_table=block_table[None],
            token_buckets=(size,),
            request_buckets=(1,),
        )
        return step(weights, slot_cache, batch, text, start)

    def empty_cache():
        return stack.init_slot_cache(blocks * BLOCK_SIZE)

    chunks = [
        (start, min(start + chunk, prefill_tokens))
        for start in range(0, prefill_tokens, chunk)
    ]
    singles = [(start, start + 1) for start in range(prefill_tokens, len(ids))]

    shapes = [steps[0] for steps in (chunks, singles) if steps]
    progress("compile", 0, len(shapes))
    began = time.perf_counter()
    for number, (start, stop) in enumerate(shapes, 1):
        jax.block_until_ready(run(empty_cache(), start, stop))
        progress("compile", number, len(shapes))
    seconds = [time.perf_counter() - began]

    slot_cache, results = empty_cache(), []
    for phase, steps in (("prefill", chunks), ("decode", singles)):
        progress(phase, 0, len(steps))
        began = time.perf_counter()
        for number, (start, stop) in enumerate(steps, 1):
            slot_cache, *result = run(slot_cache, start, stop)
            results.append(result)
            if number % _PROGRESS_EVERY == 0 or number == len(steps):
                progress(phase, number, len(steps))
        jax.block_until_ready((slot_cache, results))
        seconds.append(time.perf_counter() - began)

    hashes, rows, outputs = [], [], []
    for (start, stop), (of_step, streams) in zip(
        chunks + singles, results, strict=True
    ):
        tokens = stop - start  # the rest of a chunk is padding
        hashes.append(to_host(of_step)[:tokens])
        rows.append([array[:tokens] for array in _read_rows(stack, of_step)])
        outputs.append(to_host(streams)[:, :tokens])
    rows = [np.concatenate(of_layer) for of_layer in zip(*rows, strict=True)]
    computed = Computed(np.concatenate(hashes), rows, np.concatenate(outputs, axis=1))
    return computed, Times(*seconds)


def compute_gates(
    stack: EngramStack, ids: np.ndarray, hashes: np.ndarray
) -> np.ndarray:
    """Computes the gates of a text, float32 [T, L, M]."""
    hidden = jnp.asarray(stand_in_hidden_states(ids, stack.config))
    gates = [
        layer.gate_values(hidden, jnp.asarray(hashes[:, index]))
        for index, layer in enumerate(stack.layers.values())
    ]
    return np.stack([to_host(of_layer) for of_layer in gates], axis=1)


def _run_layers(stack: EngramStack, hidden, batch) -> jax.Array:
    layer_ids = stack.config.layer_ids
    return jnp.stack([stack(layer_id, hidden, batch) for layer_id in layer_ids])


def _read_rows(stack: EngramStack, hashes: jax.Array) -> list[np.ndarray]:
    return [
        to_host(_lookup_packed(*nnx.split(layer.embedding), hashes[:, index]))
        for index, layer in enumerate(stack.layers.values())
    ]


@functools.partial(jax.jit, static_argnums=0)
def _lookup_packed(graph, weights, ids):
    return nnx.merge(graph, weights).lookup_packed(ids)


def compare(
    streamed: Computed, whole: Computed, hidden: np.ndarray, *, exact: bool
) -> list[tuple[str, bool, str]]:
    """Compares what the stream gave with what one pass gave.

    Row numbers and rows must be equal on every device. Outputs must be so where one
    form of the projection serves all token counts, as on a CPU; elsewhere another
    kernel may add in another order for one token than for many.

    Args:
        streamed: from `compute_as_stream`.
        whole: from `compute_at_once`.
        hidden: what all layers started from.
        exact: whether outputs must be equal bit for bit, or within one bfloat16
            rounding of value and output.

    Returns:
        For each thing compared its name, whether it agrees, and how.
    """
    results = []
    for name, ours, theirs in (
        ("row numbers", [streamed.hashes], [whole.hashes]),
        ("rows", streamed.rows, whole.rows),
        ("outputs", [streamed.outputs], [whole.outputs]),
    ):
        wrong = sum(_different(a, b) for a, b in zip(ours, theirs, strict=True))
        count = sum(array.size for array in ours)
        how = f"{count:,} values equal bit for bit"
        if wrong:
            how = f"{wrong:,} of {count:,} values differ"
        results.append((name, not wrong, how))
    name, agrees, how = results[-1]
    if not (agrees or exact):
        first, second = (x.outputs.astype(np.float32) for x in (streamed, whole))
        added = np.abs(second - hidden.astype(np.float32))
        bound = 2.0**-7 * (np.abs(second) + 2 * added)
        # Written so that a NaN on one side is an excess.
        excess = int((~(np.abs(first - second) <= bound)).sum())
        how += f", {excess:,} of them by more than one bfloat16 rounding"
        results[-1] = (name, not excess, how)
    return results


def _different(first: np.ndarray, second: np.ndarray) -> int:
    """Counts values whose bits differ; zeros of other signs and NaNs count, too."""
    bits = f"u{first.dtype.itemsize}"
    return int((first.view(bits) != second.view(bits)).sum())

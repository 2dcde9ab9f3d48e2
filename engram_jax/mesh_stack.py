"""The hash state and whole stacks over a mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from . import kernels
from .arguments import as_array, check_values
from .batching import pad_batch
from .exchange import (
    peer_cut,
    peer_operands,
    peer_specs,
    reads_peers,
    unpad_tokens,
)
from .hash_state import NgramHashState
from .sharding import EngramSharding

_CHECKED = (
    "input_ids",
    "positions",
    "query_start_loc",
    "dead_mask",
    "lookback_token_ids",
    "lookback_dead_mask",
)


class Hashed(NamedTuple):
    """What `hash_on_mesh` gives.

    Attributes:
        hashes: rows of each token.
        token_mask: which tokens are alive.
        slot_cache: the new slot cache, or None.
        rows: each layer's rows, where one kernel hashes and reads; else None.
        lookback: the windows after the batch and their dead mask, if asked for.
    """

    hashes: Int32[Array, "T L C"]
    token_mask: Bool[Array, " T"]
    slot_cache: Any
    rows: tuple[kernels.OrderedRows, ...] | None
    lookback: tuple[Any, Any] | None


def advance_lookback(
    hash_state: NgramHashState, operands: Mapping[str, Any], written: Any = None
) -> tuple[Int32[Array, "R n_minus_1"], Bool[Array, "R n_minus_1"]]:
    """Move a batch's windows past it, but for what a kernel has written already.

    Args:
        hash_state: what hashes the batch.
        operands: of `NgramHashState.operands`, with lookback windows.
        written: as `kernels.ngram_rows` gives them, or None.

    Returns:
        As `NgramHashState.advance_lookback`. Inside jit nothing is left of what the
        caller does not use, or a kernel wrote.
    """
    names = "lookback_token_ids", "lookback_dead_mask", "input_ids", "query_start_loc"
    windows, dead = hash_state.advance_lookback(
        *(operands[name] for name in names), dead_mask=operands["dead_mask"]
    )
    if written is None:
        return windows, dead
    return written[0], dead if written[1] is None else written[1]


def hash_on_mesh(
    sharding: EngramSharding,
    hash_state: NgramHashState,
    arguments: Mapping[str, Any],
    *,
    by_replica: bool = False,
    advance: bool = False,
    tables: Sequence[Any] = (),
) -> Hashed:
    """Hash a batch on every device, or each replica's batch on its own devices.

    Ids are few bytes and hashing is cheap, so nothing is cut and nothing travels. For
    few tokens whose rows lie in the peers' memory, the kernel that hashes also reads
    them (`kernels.ngram_rows`), each device those of its own tokens.

    Args:
        sharding: how tokens lie on the mesh.
        hash_state: its map lies on every device.
        arguments: those of `NgramHashState.__call__`, by name.
        by_replica: whether every array has a leading axis of replicas, one for each
            part of the data axes.
        advance: whether to move the lookback windows past the batch.
        tables: `ParallelEngramEmbedding` of all layers, if the kernel that hashes may
            read their rows.

    Returns:
        Hashes [T, L, C], token mask [T], and the new slot cache or None; by replica,
        T counts the tokens of all replicas in order, laid out by `sharding.replica`,
        and the cache keeps its leading axis, as windows do. And rows, if they were
        read: laid out by `sharding.rows`, on each device its own tokens padded to a
        multiple of 8.

    Raises:
        ValueError: as `NgramHashState.__call__`; or the replicas are not as many as
            the mesh has; or a table was replaced after its addresses were recorded.
    """
    known = {n: as_array(x) for n, x in arguments.items() if x is not None}
    static: dict[str, Any] = {
        name: int(known.pop(name)) for name in ("block_size",) if name in known
    }
    replicas = sharding.size(sharding.data_axes)
    if by_replica:
        for name, array in known.items():
            if array.ndim < 1 or array.shape[0] != replicas:
                raise ValueError(
                    f"{name} has shape {array.shape}; its first axis must be the "
                    f"{replicas} replicas of the mesh's data axis. pad_replicas makes "
                    "such a batch of each replica's own"
                )
    _check_values(hash_state, known, by_replica)
    # As given until now: narrowing turns ids beyond int32 into -1, "no token".
    known = {name: _narrow(name, x) for name, x in known.items()}
    graph, state = nnx.split(hash_state)
    num_tokens = math.prod(known["input_ids"].shape)
    reads_rows = _reads_rows(sharding, hash_state, tables, num_tokens, by_replica)

    def body(state, arrays, peers):
        if by_replica:
            arrays = {name: array[0] for name, array in arrays.items()}
        local = nnx.merge(graph, state)
        operands = local.operands(**arrays, **static)
        # Where one kernel does both nothing reads these, and jit leaves them out.
        hashes = kernels.ngram_hash(**operands, backend=local.backend)
        cache = operands["slot_cache"]
        if cache is not None and by_replica:
            cache = cache[None]
        rows = lookback = None
        if reads_rows:
            rows, mask, lookback = _read_rows(
                sharding, operands, peers, num_tokens, by_replica, advance
            )
        else:
            mask = local.token_mask(
                arrays["input_ids"], arrays["query_start_loc"], arrays.get("dead_mask")
            )
        if advance:
            lookback = advance_lookback(local, operands, lookback)
            if by_replica:
                lookback = jax.tree.map(lambda x: x[None], lookback)
        return hashes, mask, cache, rows, lookback

    spec = sharding.replica if by_replica else P()
    peers = peer_operands(tables) if reads_rows else None
    specs = (P(), spec, peer_specs(sharding) if reads_rows else P())
    masks = sharding.rows if reads_rows else spec
    out_specs = (spec, masks, spec, sharding.rows, spec)
    hashed = Hashed(*sharding.shard_map(body, specs, out_specs)(state, known, peers))
    mask = unpad_tokens(sharding, hashed.token_mask, num_tokens)
    return hashed._replace(token_mask=mask)


def _reads_rows(sharding, hash_state, tables, num_tokens, by_replica) -> bool:
    """Whether one kernel hashes and reads the rows of all layers."""
    if not tables or not reads_peers(sharding, tables, num_tokens):
        return False
    padded = sharding.pad_tokens(num_tokens) - num_tokens
    if by_replica and sharding.data_axes and padded:
        return False  # a device has tokens of two replicas
    return kernels.reads_at_once(
        [table.weight[...] for table in tables],
        sharding.own_tokens(num_tokens),
        layout=hash_state.layout,
        pad_id=hash_state.pad_id,
        backend=hash_state.backend,
    )


def _read_rows(sharding, operands, peers, num_tokens, by_replica, advance):
    """Rows and mask of this device's own tokens, and windows, inside `shard_map`."""
    weights, scales, records = peers
    own, first = sharding.own_tokens(num_tokens), None
    cut = sharding.row_token_axes
    if by_replica:  # the batch is this replica's already
        cut = tuple(axis for axis in cut if axis not in sharding.data_axes)
    if cut:
        first = (lax.axis_index(cut) * own).reshape(1)
    return kernels.ngram_rows(
        weights,
        scales,
        **operands,
        **peer_cut(sharding),
        records=[record[0] for record in records],
        first_token=first,
        num_tokens=own,
        advance_lookback=advance,
    )


def pad_replicas(
    batches: Sequence[Mapping[str, Any] | None],
    *,
    slot: int | None = None,
    requests: int | None = None,
) -> dict[str, np.ndarray]:
    """Pad the replicas' batches to one slot and put them on a leading axis.

    A replica without tokens takes part with ids that are all -1, so that no collective
    waits for it.

    Args:
        batches: `input_ids`, `positions`, `query_start_loc` and the other per-token or
            per-request arguments that `pad_batch` takes, for each replica; all with
            the same names. None for a replica without tokens.
        slot: tokens that each replica is padded to; None takes the largest count.
            Give one of a few sizes, so that few programs are compiled.
        requests: requests that each replica is padded to; None takes the largest.

    Returns:
        The arguments of `EngramStack.replica_batch`, each [replicas, ...].

    Raises:
        ValueError: a replica has more tokens or requests than its slot.

    Example:
        >>> one = {"input_ids": [5, 6], "positions": [0, 1], "query_start_loc": [0, 2]}
        >>> padded = pad_replicas([one, None], slot=3)
        >>> padded["input_ids"].tolist(), padded["query_start_loc"].tolist()
        ([[5, 6, -1], [-1, -1, -1]], [[0, 2], [0, 0]])
    """
    given = [batch for batch in batches if batch is not None]
    tokens = [0 if b is None else len(b["input_ids"]) for b in batches]
    counts = [0 if b is None else len(b["query_start_loc"]) - 1 for b in batches]
    slot = max(tokens, default=0) if slot is None else slot
    requests = max(counts, default=0) if requests is None else requests
    for what, found, room in (("tokens", tokens, slot), ("requests", counts, requests)):
        if found and max(found) > room:
            replica = int(np.argmax(found))
            raise ValueError(
                f"replica {replica} has {found[replica]} {what}; the slot that all "
                f"replicas share has {room}. Give a larger one, or split the batch"
            )
    empty = _empty_batch(given[0]) if given else _EMPTY
    padded = [
        pad_batch(
            **(empty if batch is None else batch),  # pyright: ignore[reportArgumentType]
            token_buckets=(max(slot, 1),),
            request_buckets=(max(requests, 1),),
        )
        for batch in batches
    ]
    return {name: np.stack([p[name] for p in padded]) for name in padded[0]}


_EMPTY: dict[str, Any] = {
    "input_ids": np.zeros(0, np.int32),
    "positions": np.zeros(0, np.int32),
    "query_start_loc": np.zeros(1, np.int32),
}


def _empty_batch(like: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of no request and no token, with the arguments of another."""
    others = {
        name: np.asarray(x)[:0]
        for name, x in like.items()
        if name not in _EMPTY and x is not None
    }
    return _EMPTY | others


def state_shardings(sharding: EngramSharding, module: nnx.Module) -> Any:
    """Give the sharding of each array of a stack or a layer, for `jax.jit`.

    Args:
        sharding: how it lies on the mesh.
        module: an `EngramStack`, an `Engram` or an embedding.

    Returns:
        The module's state (`nnx.state`) with a `NamedSharding` for each array: tables
        over the shards, projections by output columns, each device its own addresses
        of tables, all else on every device.
    """

    def place(path, _):
        names = [getattr(part, "key", None) for part in path]
        if "addresses" in names:
            return sharding.named(sharding.by_device)
        if "embedding" in names or names[0] in ("weight", "scale"):
            return sharding.named(sharding.table)
        if {"wkv_weight", "wkv_scale", "wkv_expanded"} & set(names):
            return sharding.named(sharding.projection)
        return sharding.named(P())

    return jax.tree_util.tree_map_with_path(place, nnx.state(module))


def _narrow(name: str, values: Any) -> Any:
    if values.dtype in (np.bool_, np.int32):
        return values
    # A lookback id that does not fit is a dead token, where -1 would be an unknown one.
    outside = -2 if name == "lookback_token_ids" else -1
    if isinstance(values, jax.Array) or values.dtype.kind not in "iu":
        return kernels.narrow_ids(values, name, outside=outside)
    # A NumPy array stays one: the same in every process, it is put everywhere.
    limits = np.iinfo(np.int32)
    fits = (values >= limits.min) & (values <= limits.max)
    return np.where(fits, values, outside).astype(np.int32)


def _check_values(hash_state, known, by_replica) -> None:
    checked = [known.get(name) for name in _CHECKED]
    for x in checked:
        if isinstance(x, Tracer) or (
            isinstance(x, jax.Array) and not x.is_fully_addressable
        ):
            return  # not known here
    arrays = [None if x is None else np.asarray(x) for x in checked]
    if not by_replica:
        check_values(hash_state.vocab_size, *arrays)
        return
    for replica in range(len(known["input_ids"])):
        check_values(
            hash_state.vocab_size, *(None if x is None else x[replica] for x in arrays)
        )

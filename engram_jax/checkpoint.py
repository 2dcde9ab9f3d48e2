"""Load Engram layers from a checkpoint in the published layout."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from .checkpoint_files import (
    CheckpointFiles,
    Placement,
    check_fingerprint,
    open_checkpoint,
)
from .config import QUANT_BLOCK, EngramConfig
from .embedding import ParallelEngramEmbedding
from .hash_state import NgramHashState
from .host_memory import HostMemoryOptions
from .host_storage import MappedFileTable, PinnedHostTable, available_host_memory
from .host_table import HostTable
from .kernels import Backend
from .layer import Engram
from .layout import EngramLayout
from .memory_plan import (
    PINNED_POOL_VARIABLE,
    MemoryPlan,
    MemoryRoom,
    choose_placement,
    plan_memory,
)
from .processes import agreement, processes_of_node
from .safetensors_file import (
    DTYPES,
    TensorInfo,
    map_tensor,
    read_rows,
)
from .sharding import EngramSharding
from .shared_table import SharedHostTable, shared_bytes
from .stack import EngramStack
from .vocabulary import build_compressed_token_map, fingerprint

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20


def load_engram(
    checkpoint_dir: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    placement: Placement | Sequence[Placement] = "device",
    mesh: jax.sharding.Mesh | EngramSharding | None = None,
    backend: Backend | None = None,
    host_memory: HostMemoryOptions | None = None,
) -> EngramStack:
    """Load the Engram layers of a checkpoint in the published layout.

    Headers are checked before any data is read: names, dtypes, shapes, the index, the
    token map's size and, where ``engram.json`` pins it, its fingerprint. So is the
    memory that the tables take.

    Args:
      checkpoint_dir: A directory with ``config.json`` and ``model.safetensors``, or
        shards and ``model.safetensors.index.json``. Other tensors are left alone, and
        shards without Engram tensors need not be there.
      tokenizer: What `build_compressed_token_map` takes, or a token map (integers
        [V]); None takes ``tokenizer.json`` in the directory.
      placement: Where the tables live. ``"device"``: in device memory.
        ``"pinned_host"``: in page-locked host memory. ``"host"``: in this process's
        own memory, in huge pages where there are any (`HostTable`). ``"shared_host"``:
        in shared memory, one copy for all processes of the node (`SharedHostTable`).
        ``"mapped_file"``: in the checkpoint's files, which must stay as they are;
        takes no memory. Several, in order of preference, take the first that fits
        (`memory_plan`), on a mesh the same in all processes.
      mesh: Devices to spread the tables over, or an `EngramSharding` that says how;
        None uses JAX's default device. Each process reads only the rows that its
        devices own.
      backend: Form of every operation: None chooses, or ``"pallas"``, ``"xla"``,
        ``"pallas_interpret"``.
      host_memory: Huge pages and the like for ``"host"`` and ``"shared_host"``, none of
        which changes a result; None takes `HostMemoryOptions()`. What came of them is
        in the log and in the tables' `report`.

    Returns:
      The stack, ready to call.

    Raises:
      FileNotFoundError: A file that is needed is missing.
      RuntimeError: On a mesh of several processes, it failed in one or more of them;
        all raise this, with each one's reason.
      MemoryError: The tables do not fit; the message has the figures.
      TypeError: The tokenizer is of an unknown kind.
      ValueError: Anything in the checkpoint or the tokenizer does not fit; the
        message names it.
    """
    placements: tuple[Any, ...] = (
        tuple(placement) if isinstance(placement, list | tuple) else (placement,)
    )
    if not placements or not set(placements) <= set(get_args(Placement)):
        listed = ", ".join(map(repr, get_args(Placement)))
        raise ValueError(
            f"placement is {placement!r}; it must be one of {listed}, or several."
        )
    processes = 1 if mesh is None else processes_of_node()
    # All processes of a mesh load, or none: one alone would wait for the rest forever.
    # In two steps, since the choice of a placement is itself a collective, which a
    # process that cannot open its files would miss.
    with _together(mesh):
        files = open_checkpoint(checkpoint_dir)
        token_map = _token_map(files, tokenizer)
        layout = EngramLayout.from_config(files.config, int(token_map.max()) + 1)
        found = fingerprint(token_map)
        check_fingerprint(found, files.token_map_sha256, files.directory)
        hash_state = NgramHashState(layout, token_map, backend=backend)
        sharding = _sharding_on(mesh, layout)
        plans = _plan_placements(files, placements, sharding, processes)
    with _together(mesh):
        return _load(
            files, token_map, hash_state, plans, sharding, backend, host_memory
        )


def _together(mesh: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if mesh is None else agreement("load_engram")


def _sharding_on(
    mesh: jax.sharding.Mesh | EngramSharding | None, layout: EngramLayout
) -> EngramSharding | None:
    if mesh is None or isinstance(mesh, EngramSharding):
        return mesh
    return EngramSharding.on(mesh, layout)


def _load(
    files: CheckpointFiles,
    token_map: npt.NDArray[np.int32],
    hash_state: NgramHashState,
    plans: list[MemoryPlan],
    sharding: EngramSharding | None,
    backend: Backend | None,
    host_memory: HostMemoryOptions | None,
) -> EngramStack:
    placement = _choose_placement(plans, sharding)
    # Tables that every process reads whole.
    storages: dict[str, Any] = {
        "mapped_file": MappedFileTable,
        "host": functools.partial(HostTable, options=host_memory),
        "shared_host": functools.partial(SharedHostTable, options=host_memory),
    }
    storage = storages.get(placement)
    if sharding is None:
        layers = {
            layer_id: _load_layer(files, layer_id, placement, backend, storage)
            for layer_id in files.layers
        }
    else:
        hash_state.token_map[...] = sharding.place(token_map, PartitionSpec())
        layers = {
            layer_id: _load_layer_on_mesh(
                files, layer_id, placement, backend, storage, sharding, index
            )
            for index, layer_id in enumerate(files.layers)
        }
    _log.info("Loaded %s: tables in placement %r.", files.directory, placement)
    return EngramStack(files.config, hash_state, layers)


def _token_map(files: CheckpointFiles, tokenizer: Any) -> npt.NDArray[np.int32]:
    if isinstance(tokenizer, np.ndarray | jax.Array):
        token_map = np.asarray(tokenizer)
        if (
            token_map.ndim != 1
            or token_map.dtype.kind not in "iu"
            or not token_map.size
        ):
            raise ValueError(
                f"tokenizer is an array of dtype {token_map.dtype} and shape "
                f"{token_map.shape}; a token map is integers of shape [V]."
            )
        if token_map.min() < 0 or token_map.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"The token map holds {token_map.min()} to {token_map.max()}; "
                "compressed ids count from 0 and are int32."
            )
        return token_map.astype(np.int32)
    if tokenizer is None:
        tokenizer = files.directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise FileNotFoundError(
                f"{tokenizer} does not exist; pass tokenizer= (a tokenizer.json, a "
                "tokenizer, or a token map)."
            )
    return build_compressed_token_map(tokenizer)[0]


def _default_device() -> Any:
    # Where arrays go unless told otherwise, whatever jax_default_device says.
    return next(iter(jnp.zeros(()).devices()))


def _plan_placements(
    files: CheckpointFiles,
    placements: tuple[Placement, ...],
    sharding: EngramSharding | None,
    processes: int,
) -> list[MemoryPlan]:
    """Compute what each placement would take here; nothing is allocated yet."""
    shared = sum(
        shared_bytes(parts["embed.weight"], parts["embed.scale"])
        for parts in files.layers.values()
        if "shared_host" in placements
    )
    plans = []
    for placement in placements:
        if sharding is None or placement not in ("device", "pinned_host"):
            plans.append(_plan_memory(files.config, placement, shared, processes))
            continue
        problems = ()
        try:
            _check_memory_on_mesh(files.config, sharding, placement)
        except MemoryError as error:
            problems = (str(error),)
        plans.append(MemoryPlan(placement, 0, 0, 0, problems))
    return plans


def _choose_placement(
    plans: list[MemoryPlan], sharding: EngramSharding | None
) -> Placement:
    """Take the first placement that fits in every process, or refuse with figures."""
    chosen = choose_placement(plans, together=sharding is not None)
    for plan in plans[: plans.index(chosen)]:
        _log.info("Not in placement %r: %s", plan.placement, " ".join(plan.problems))
    for note in chosen.notes:
        _log.info("Placement %r: %s", chosen.placement, note)
    return chosen.placement


def _plan_memory(
    config: EngramConfig,
    placement: Placement,
    already_shared: int = 0,
    processes: int = 1,
) -> MemoryPlan:
    room = MemoryRoom.measure(_default_device())
    room = dataclasses.replace(room, host=available_host_memory())
    return plan_memory(
        config,
        placement,
        processes=processes,
        already_shared=already_shared,
        room=room,
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def _check_memory_on_mesh(
    config: EngramConfig, sharding: EngramSharding, placement: Placement
) -> None:
    """Refuse shards that cannot fit, with the figures, before anything is allocated."""
    bytes_per_row = config.head_dim + config.head_dim // QUANT_BLOCK
    device = sharding.mesh.local_devices[0]
    if device.platform != "cpu" and placement == "device":
        sharding.check_memory(bytes_per_row)
        return
    # CPU devices share the host's memory, and replicas one copy of a shard.
    needed = bytes_per_row * sum(
        end - start
        for layer in range(config.num_layers)
        for start, end in sharding.owned_rows(layer)
    )
    room = available_host_memory()
    pinned = MemoryRoom.measure(device).pinned
    if placement == "pinned_host" and pinned is not None and needed > pinned:
        raise MemoryError(
            f"This process's shards take {_gigabytes(needed)} of pinned memory, but "
            f"JAX's pool has {_gigabytes(pinned)}. Set {PINNED_POOL_VARIABLE} before "
            "JAX starts."
        )
    if needed > room:
        raise MemoryError(
            f"This process's shards take {_gigabytes(needed)} of host memory, but "
            f"{_gigabytes(room)} are available. "
            'placement="mapped_file" leaves the tables in the checkpoint.'
        )


def _load_layer(
    files: CheckpointFiles,
    layer_id: int,
    placement: Placement,
    backend: Backend | None,
    storage: Any,
) -> Engram:
    parts = files.layers[layer_id]
    weight, scale = parts["embed.weight"], parts["embed.scale"]
    if storage is not None:
        table = ParallelEngramEmbedding.from_storage(storage(weight, scale))
    elif placement == "pinned_host":
        table = ParallelEngramEmbedding.from_storage(
            PinnedHostTable(_all_rows(weight), _all_rows(scale))
        )
    else:
        table = ParallelEngramEmbedding(
            _to_device(weight), _to_device(scale), backend=backend
        )
    return Engram(
        table,
        _to_device(parts["wkv.weight"]),
        _to_device(parts["wkv.scale"]),
        _to_device(parts["q_weight"]),
        _to_device(parts["k_weight"]),
        eps=files.config.rms_norm_eps,
        backend=backend,
    )


def _load_layer_on_mesh(
    files: CheckpointFiles,
    layer_id: int,
    placement: Placement,
    backend: Backend | None,
    storage: Any,
    sharding: EngramSharding,
    index: int,
) -> Engram:
    parts = files.layers[layer_id]
    weight, scale = parts["embed.weight"], parts["embed.scale"]
    if storage is not None:
        table = ParallelEngramEmbedding(
            None,
            storage=storage(weight, scale),
            sharding=sharding,
            layer_index=index,
        )
    else:
        device = sharding.mesh.local_devices[0]
        on_mesh = (
            sharding.place_table(
                index,
                functools.partial(_rows_for, device, info),
                info.shape[1],
                _rows_for(device, info, 0, 0).dtype,
                memory_kind="pinned_host" if placement == "pinned_host" else None,
            )
            for info in (weight, scale)
        )
        table = ParallelEngramEmbedding(
            *on_mesh, backend=backend, sharding=sharding, layer_index=index
        )
    whole = {
        part: _bytes_of_scales(read_rows(info, 0, info.shape[0]))
        for part, info in parts.items()
        if not part.startswith("embed.")
    }
    outputs = sharding.padded_width(whole["wkv.weight"].shape[0])
    return Engram(
        table,
        sharding.place(whole["wkv.weight"], sharding.projection, outputs),
        sharding.place(whole["wkv.scale"], sharding.projection, outputs // QUANT_BLOCK),
        sharding.place(whole["q_weight"], PartitionSpec()),
        sharding.place(whole["k_weight"], PartitionSpec()),
        eps=files.config.rms_norm_eps,
        backend=backend,
    )


def _rows_for(device: Any, info: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
    """Give rows to JAX so that what it makes of them is the only copy.

    A CPU device uses aligned memory as it is, a mapped file's, too, which a table must
    not depend on unasked. For others JAX copies, and of a mapping only what is being
    copied is resident.
    """
    if device.platform == "cpu":
        return _bytes_of_scales(read_rows(info, start, stop))
    return _bytes_of_scales(map_tensor(info)[start:stop])


def _all_rows(info: TensorInfo) -> npt.NDArray[Any]:
    return _rows_for(_default_device(), info, 0, info.shape[0])


def _to_device(info: TensorInfo) -> jax.Array:
    """Load a tensor; E8M0 scales become bytes."""
    if _default_device().platform == "cpu":
        return jax.device_put(_all_rows(info))
    return _in_pieces(info)


def _in_pieces(info: TensorInfo) -> jax.Array:
    """Fill a device array piece by piece, in place."""
    rows = info.shape[0]
    step = max(1, _CHUNK_BYTES * rows // max(info.nbytes, 1))
    result = jnp.zeros(info.shape, _bytes_of_scales(read_rows(info, 0, 0)).dtype)
    for start in range(0, rows, step):
        piece = _bytes_of_scales(read_rows(info, start, min(start + step, rows)))
        # Waiting keeps one piece in host memory instead of a queue of them.
        result = _put_rows(result, piece, start).block_until_ready()
    return result


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(
    table: Shaped[Array, "R W"],
    rows: Shaped[Array, "r W"] | Shaped[np.ndarray, "r W"],
    start: Int[Array, ""],
) -> Shaped[Array, "R W"]:
    return lax.dynamic_update_slice_in_dim(table, rows, start, 0)


def _bytes_of_scales(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.uint8) if array.dtype == DTYPES["F8_E8M0"] else array

"""Where rows can be read from the peers' memory, and where their tables lie.

Within one process a GPU reads another's memory by its address, over NVLink or PCIe. So
a device needs no collective for rows that others hold, only their tables' addresses
(`record_addresses`), which stay what they are while nobody replaces the tables. For
memory of another process of the same host the driver gives an address, too, once that
process has given it a file descriptor.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from . import gpu_driver, kernels
from .descriptors import open_exchange
from .processes import agreement, machine

if TYPE_CHECKING:  # it takes `mesh_reason` from here
    from .sharding import EngramSharding

_DOOR_BYTES = 128  # a machine's name of at most 64, a socket's of 27; a multiple of 8


def mesh_reason(
    mesh: Mesh | AbstractMesh, *, across_processes: bool = False
) -> str | None:
    """Say why the devices of a mesh cannot read each other's memory, or give None.

    Args:
      mesh: The devices. Those that exist on paper only (to compile for) are taken for
        connected.
      across_processes: Whether they may belong to several processes; only
        `record_addresses` then finds out whether these reach each other.

    Returns:
      The reason, for a message.
    """
    if isinstance(mesh, AbstractMesh):
        return "the mesh is abstract, without devices"
    devices = list(mesh.devices.flat)
    for device in devices:
        reason = kernels.device_reason(device)
        if reason is not None:
            return reason
    processes = {device.process_index for device in devices}
    if len(processes) > 1 or processes != {jax.process_index()}:
        if not across_processes:
            return (
                f"its devices belong to {len(processes)} processes, between which it "
                "runs only where exchange='peer_read' asks for it"
            )
        if processes != set(range(jax.process_count())):
            return (
                f"its devices belong to {len(processes)} of {jax.process_count()} "
                "processes, and all must tell each other their addresses"
            )
        return None
    numbers = [device.local_hardware_id for device in devices]
    if None in numbers:
        return None
    for one, other in np.ndindex(len(numbers), len(numbers)):
        if one != other and not gpu_driver.can_reach(numbers[one], numbers[other]):
            return f"{devices[one]} cannot reach the memory of {devices[other]}"
    return None


def table_reason(weight: Any, scale: Any, backend: str | None) -> str | None:
    """Say why a table's rows cannot be read from peers' memory, or give None.

    Args:
      weight: The table's values, or None where they are not in device memory.
      scale: Its scales, or None.
      backend: That of its lookup.

    Returns:
      The reason, for a message.
    """
    if weight is None:
        return "its rows are not in device memory"
    if scale is None:
        return "it is a float table"
    if backend not in (None, "pallas"):
        return f"its backend is {backend!r}, and the kernel is the only form"
    if isinstance(weight, Tracer) or isinstance(scale, Tracer):
        return "it is being traced, and has no address yet"
    kind = getattr(weight.sharding, "memory_kind", None)  # a shape may have none
    if kind not in (None, "device"):
        return f"it lies in {kind} memory"
    return None


def record_addresses(
    sharding: "EngramSharding", layer: int, weight: Any, scale: Any
) -> Array:
    """Write down for every device where the shards that it reads lie.

    Where tables have several copies, a device reads those of its own replica. Where
    devices belong to several processes, all must call. What then holds a table is
    mapped in the others, and stays taken until all processes end, also once JAX gives
    it back.

    Args:
      sharding: How the table lies on the mesh.
      layer: The layer's index, from 0.
      weight: The table's values, as `EngramSharding.place_table` makes them.
      scale: Its scales.

    Returns:
      uint32 [devices, S + 1, 8], laid out by `sharding.by_device`:
      `kernels.make_record` of each device. Of shapes without arrays, the shape.

    Raises:
      RuntimeError: A process cannot open another's memory; all processes raise it.
      ValueError: The table is not cut over the devices as the sharding says.
    """
    mesh, shards = sharding.mesh, sharding.shards
    place = sharding.named(sharding.by_device)
    shape = (mesh.size, shards.num_shards + 1, kernels.RECORD_WORDS)
    if isinstance(weight, jax.ShapeDtypeStruct):
        struct: Any = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=place)
        return struct
    cut = sharding.named(sharding.table)
    for name, part in (("weight", weight), ("scale", scale)):
        lies, wanted = (x.devices_indices_map(part.shape) for x in (part.sharding, cut))
        if lies != wanted:
            raise ValueError(
                f"the {name} of layer index {layer} lies as {part.sharding}; to be "
                f"read by peers it must be cut as {cut}: EngramSharding.place_table, "
                "or jax.device_put, does that"
            )
    jax.block_until_ready((weight, scale))  # before a peer reads it
    rows = np.stack([shards.row_start[layer], shards.row_end[layer]], axis=1)
    records = {}
    sizes = [x.addressable_shards[0].data.nbytes for x in (weight, scale)]
    known = _known_addresses(mesh, _own_addresses(weight, scale), sizes)
    for holders in _groups(sharding):
        for shard, reader in enumerate(holders):
            if reader.process_index == jax.process_index():
                places = [known(reader, holder) for holder in holders]
                record = kernels.make_record(places, rows, shard)[None]
                records[reader] = jax.device_put(record, reader)
    mine = [records[device] for device in mesh.devices.flat if device in records]
    return jax.make_array_from_single_device_arrays(shape, place, mine)


def check_addresses(layer: int, weight: Array, scale: Array, recorded: Array) -> None:
    """Refuse a table that no longer lies where its addresses were recorded.

    Args:
      layer: The layer's index, from 0.
      weight: The table's values.
      scale: Its scales.
      recorded: What `record_addresses` gave.

    Raises:
      ValueError: One of its shards, of this process, lies elsewhere.
    """
    now = _own_addresses(weight, scale)
    entries = {
        part.device: np.asarray(part.data)[0, -1]
        for part in recorded.addressable_shards
    }
    moved = [
        device
        for device, entry in entries.items()
        # A table of other devices has no part on this one.
        if entry[:4].copy().view("<u8").tolist() != now.get(device)
    ]
    if moved:
        raise ValueError(
            f"the table of layer index {layer} does not lie where its addresses were "
            f"recorded on {len(moved)} of {len(entries)} devices (it was replaced, "
            "copied or restored), and others would read other memory. Call its "
            "embedding's record_addresses() after putting a table in place"
        )


def _own_addresses(weight: Array, scale: Array) -> dict[Any, list[int]]:
    """Where values and scales lie on each device of this process."""
    of_weight, of_scale = (
        {
            part.device: part.data.unsafe_buffer_pointer()
            for part in x.addressable_shards
        }
        for x in (weight, scale)
    )
    return {device: [at, of_scale.get(device, 0)] for device, at in of_weight.items()}


def _groups(sharding: "EngramSharding") -> npt.NDArray[Any]:
    """Devices in lines that each hold all of a table, shard by shard."""
    names = sharding.mesh.axis_names
    whole = [name for name in names if name not in sharding.table_axes]
    order = [names.index(name) for name in (*whole, *sharding.table_axes)]
    devices = sharding.mesh.devices.transpose(order)
    return devices.reshape(-1, sharding.shards.num_shards)


def _known_addresses(
    mesh: Mesh, own: dict[Any, list[int]], sizes: list[int]
) -> Callable[[Any, Any], list[int]]:
    """A function that says where one device finds the shard of another."""
    devices, rank = list(mesh.devices.flat), jax.process_index()
    if {device.process_index for device in devices} == {rank}:
        return lambda reader, holder: own[holder]
    # Of each part: the handle of its allocation, the bytes of that, the place in it.
    mine = np.zeros((len(devices), 2, 3), np.uint64)
    with contextlib.ExitStack() as stack:
        with agreement("exporting the memory of tables"):
            numbers = dict[int, int]()
            for place, device in enumerate(devices):
                number = device.local_hardware_id
                for part, address in enumerate(own.get(device, ())):
                    found = gpu_driver.find_allocation(number, address, sizes[part])
                    mine[place, part] = found
                    numbers[found[0]] = number
            given = list[int]()
            for handle in _handles(mine):
                given.append(gpu_driver.export_allocation(numbers[handle], handle))
                stack.callback(os.close, given[-1])
            exchange = stack.enter_context(open_exchange(rank))
        doors, parts = _gather_doors(f"{machine()} {exchange.name}", mine)
        # Each in an agreement of its own, so that no process waits in them.
        with agreement("connecting to those that hold tables"):
            names = dict[int, str]()
            for process, door in enumerate(doors):
                host, name = door.rsplit(" ", 1)
                if host != machine():
                    whose = f"that of process {process}"
                    raise OSError(f"the memory is on another host, {whose}")
                if process != rank:
                    names[process] = name
            exchange.connect(names)
        with agreement("giving the memory of tables"):
            exchange.give(given)
        with agreement("opening the memory of tables"):
            taken = {
                process: dict(zip(_handles(parts[process]), some, strict=True))
                for process, some in exchange.take().items()
            }
            opened = dict[tuple[Any, Any], list[int]]()
            for reader, (place, holder) in itertools.product(own, enumerate(devices)):
                number, process = reader.local_hardware_id, holder.process_index
                opened[reader, holder] = own.get(holder) or [
                    gpu_driver.map_allocation(
                        number, process, handle, size, taken[process][handle]
                    )
                    + offset
                    for handle, size, offset in parts[process][place].tolist()
                ]
    return lambda reader, holder: opened[reader, holder]


def _handles(parts: npt.NDArray[np.uint64]) -> list[int]:
    """The allocations that a process's parts lie in, in the order they are given."""
    return np.unique(parts[parts[..., 1] > 0][:, 0]).tolist()


def _gather_doors(
    door: str, parts: npt.NDArray[np.uint64]
) -> tuple[list[str], list[npt.NDArray[np.uint64]]]:
    """By process: machine and name of its socket, and where its parts lie."""
    block = os.fsencode(door).ljust(_DOOR_BYTES, b"\0") + parts.tobytes()
    blocks = multihost_utils.process_allgather(np.frombuffer(block, np.uint8))
    known = [row.tobytes() for row in np.asarray(blocks).reshape(-1, len(block))]
    return (
        [os.fsdecode(text[:_DOOR_BYTES].rstrip(b"\0")) for text in known],
        [
            np.frombuffer(text, np.uint64, offset=_DOOR_BYTES).reshape(parts.shape)
            for text in known
        ],
    )

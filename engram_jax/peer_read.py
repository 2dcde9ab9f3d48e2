"""Where rows can be read from the peers' memory, and where their tables lie.

Within one process a GPU reads another's memory by its address, over NVLink or PCIe. So
a device needs no collective for rows that others hold, only their tables' addresses
(`record_addresses`), which stay what they are while nobody replaces the tables.
"""

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from . import kernels

if TYPE_CHECKING:  # it takes `mesh_reason` from here
    from .sharding import EngramSharding


def mesh_reason(mesh: Mesh | AbstractMesh) -> str | None:
    """Say why the devices of a mesh cannot read each other's memory, or give None.

    Args:
      mesh: The devices. Those that exist on paper only (to compile for) are taken for
        connected.

    Returns:
      The reason, for a message.
    """
    if isinstance(mesh, AbstractMesh):
        return "the mesh is abstract, without devices"
    devices = list(mesh.devices.flat)
    processes = {device.process_index for device in devices}
    if processes != {jax.process_index()}:
        return (
            f"its devices belong to {len(processes)} processes, and an address is of "
            "one process only"
        )
    for device in devices:
        reason = kernels.device_reason(device)
        if reason is not None:
            return reason
    numbers = [device.local_hardware_id for device in devices]
    if None in numbers:
        return None
    for one, other in np.ndindex(len(numbers), len(numbers)):
        if one != other and not _can_reach(numbers[one], numbers[other]):
            return f"{devices[one]} cannot reach the memory of {devices[other]}"
    return None


@functools.cache
def _can_reach(one: int, other: int) -> bool:
    """Ask the driver; JAX lets all GPUs reach each other that can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    devices, answer = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    calls = [driver.cuInit(0)]
    for device, number in zip(devices, (one, other), strict=True):
        calls.append(driver.cuDeviceGet(ctypes.byref(device), number))
    calls.append(driver.cuDeviceCanAccessPeer(ctypes.byref(answer), *devices))
    return not any(calls) and answer.value == 1


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

    Where tables have several copies, a device reads those of its own replica.

    Args:
      sharding: How the table lies on the mesh.
      layer: The layer's index, from 0.
      weight: The table's values, as `EngramSharding.place_table` makes them.
      scale: Its scales.

    Returns:
      uint32 [devices, S + 1, 8], laid out by `sharding.by_device`:
      `kernels.make_record` of each device. Of shapes without arrays, the shape.
    """
    place = sharding.named(sharding.by_device)
    if isinstance(weight, jax.ShapeDtypeStruct):
        shape = (sharding.mesh.size, sharding.shards.num_shards + 1, 8)
        struct: Any = jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=place)
        return struct
    jax.block_until_ready((weight, scale))  # before a peer reads it
    return jax.device_put(_addresses(sharding, layer, weight, scale), place)


def check_addresses(
    sharding: "EngramSharding", layer: int, weight: Array, scale: Array, recorded: Array
) -> None:
    """Refuse a table that no longer lies where its addresses were recorded.

    Args:
      sharding: How the table lies on the mesh.
      layer: The layer's index, from 0.
      weight: The table's values.
      scale: Its scales.
      recorded: What `record_addresses` gave.

    Raises:
      ValueError: One of its shards lies elsewhere.
    """
    now = _addresses(sharding, layer, weight, scale)
    moved = (now != np.asarray(recorded)).any(axis=(1, 2))
    if moved.any():
        raise ValueError(
            f"the table of layer index {layer} does not lie where its addresses were "
            f"recorded (it was replaced, copied or restored), so that {moved.sum()} of "
            f"{len(moved)} devices would read other memory. Call its embedding's "
            "record_addresses() after putting a table in place"
        )


def _addresses(sharding, layer, weight, scale) -> npt.NDArray[np.uint32]:
    mesh, shards = sharding.mesh, sharding.shards
    whole = [name for name in mesh.axis_names if name not in sharding.table_axes]
    order = [mesh.axis_names.index(name) for name in (*whole, *sharding.table_axes)]
    at = [
        {
            part.device: part.data.unsafe_buffer_pointer()
            for part in x.addressable_shards
        }
        for x in (weight, scale)
    ]
    rows = np.stack([shards.row_start[layer], shards.row_end[layer]], axis=1)
    records = {}
    # A line of these devices holds all of a table, shard by shard.
    for holders in mesh.devices.transpose(order).reshape(-1, shards.num_shards):
        places = [[addresses[device] for addresses in at] for device in holders]
        for shard, device in enumerate(holders):
            records[device] = kernels.make_record(places, rows, shard)
    return np.stack([records[device] for device in mesh.devices.flat])

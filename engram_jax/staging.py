"""Buffers in pinned host memory that host threads fill and jitted steps read."""

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding (in pinned host memory) of each array of a buffer."""


@functools.partial(jax.jit, donate_argnums=0)
def _hand_back(arrays):
    """Give the same memory as new arrays, once nothing reads the old ones any more.

    They are donated, so that JAX itself waits for every computation that still reads
    them, and refuses one that comes later.
    """
    return arrays


class StagingBuffer:
    """Arrays in pinned host memory, with NumPy views of the same bytes to write.

    JAX takes arrays for constant. So views may be written only after `wait_for_readers`
    and before a step takes the arrays; then `retire` begins the next round.

    Attributes:
        arrays: what a jitted step takes.

    Args:
        shapes: of each array.
    """

    def __init__(self, shapes: Shapes) -> None:
        key = ((n, x.shape, x.dtype, x.sharding) for n, x in sorted(shapes.items()))
        self.arrays: dict[str, Array] = _maker(tuple(key))()

    def wait_for_readers(self) -> None:
        """Wait until no computation reads the bytes; raises what one of them raised."""
        jax.block_until_ready(self.arrays)

    def is_unread(self) -> bool:
        """Tell whether `wait_for_readers` would not wait."""
        arrays: Any = self.arrays.values()
        return all(array.is_ready() for array in arrays)

    def views(self, name: str) -> list[tuple[tuple[slice, ...], npt.NDArray[Any]]]:
        """Give the bytes of each of this process's shards of an array, to be written.

        Args:
            name: of the array.

        Returns:
            For each shard, which part of the array it holds, and the bytes.
        """
        return [
            (shard.index, host_view(shard.data))
            for shard in self.arrays[name].addressable_shards
        ]

    def retire(self) -> None:
        """End the arrays' use by steps that were not dispatched yet.

        On a GPU this waits until those that were have ended.
        """
        self.arrays = _hand_back(self.arrays)


def host_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Name the host memory of a sharding's devices that they copy from fastest.

    Args:
        sharding: of arrays in device memory.

    Returns:
        The same in pinned host memory.

    Raises:
        ValueError: a device has no such memory.
    """
    for device in sharding.addressable_devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if "pinned_host" not in kinds:
            raise ValueError(
                f"{device} has no pinned_host memory to stage rows in, only "
                f"{', '.join(kinds)}; leave EngramPrefetch out"
            )
    return sharding.with_memory_kind("pinned_host")


def to_device(array: Array) -> Array:
    """Bring an array of any memory to the device, inside jit or not.

    Inside jit the copy starts early and runs beside the step's other work. An array in
    device memory comes back as it is.

    Args:
        array: in host or device memory.

    Returns:
        The array in device memory.
    """
    if jax.typeof(array).memory_space == jax.memory.Space.Device:
        return jnp.asarray(array)
    return jax.device_put(array, jax.memory.Space.Device)


@functools.lru_cache(maxsize=64)
def _maker(key: tuple[Any, ...]) -> Any:
    """Compile a program that makes a buffer's arrays.

    By a program, so that JAX owns the memory: donating an array over NumPy's memory
    ends the process.
    """

    def make():
        return {
            name: jax.device_put(jnp.zeros(shape, dtype), jax.memory.Space.Host)
            for name, shape, dtype, _ in key
        }

    return jax.jit(make, out_shardings={name: sharding for name, *_, sharding in key})


def host_view(array: Array) -> npt.NDArray[Any]:
    """Open the bytes of an array in host memory, without a copy.

    Args:
        array: of one device; kept alive by the caller as long as the view is used.

    Returns:
        Its bytes, in its dtype. Writing to them changes an array that JAX takes for
        constant.
    """
    count = math.prod(array.shape) * array.dtype.itemsize
    if not count:
        return np.empty(array.shape, array.dtype)
    array.block_until_ready()  # what is being copied there has no bytes yet
    memory = (ctypes.c_uint8 * count).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)

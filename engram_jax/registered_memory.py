"""Host memory that GPUs may read: registered with CUDA's driver."""

import logging
import weakref
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from . import gpu_driver
from .kernels.dispatch import missing_gpu_reason

_log = logging.getLogger(__name__)


class RegisteredMemory:
    """Memory that the GPUs of this process may read, as long as this is referred to.

    Attributes:
      address: Where they find it, uint32 [2], its lower 32 bits first.

    Args:
      memory: Its bytes, of one piece, from the start of a page. They stay where they
        are until no GPU reads them any more.

    Raises:
      OSError: There is no GPU that could, or the driver refuses.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        reason = missing_gpu_reason()
        if reason is not None:
            raise OSError(reason)
        first: Any = jax.local_devices()[0]
        numbers = [device.local_hardware_id for device in jax.local_devices()]
        where = gpu_driver.register(
            first.local_hardware_id, memory.ctypes.data, memory.nbytes
        )
        self.address = np.array([where], "<u8").view("<u4")
        release = weakref.finalize(self, _release, numbers, memory)
        release.atexit = False  # the driver's part of it ends with the process


def _release(numbers: list[int], memory: npt.NDArray[np.uint8]) -> None:
    """Run with the memory as an argument, which so outlives its registration."""
    try:
        gpu_driver.unregister(numbers, memory.ctypes.data)
    except OSError as error:
        _log.warning("Memory of a table stays registered with CUDA: %s", error)

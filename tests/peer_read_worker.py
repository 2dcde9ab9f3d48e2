"""One process of a job of two, each with two CPU devices that pass for GPUs.

    python peer_read_worker.py ADDRESS RANK MACHINE FAULT

FAULT, in process 1: "", "allocator" (its memory cannot be exported), "machine" (it is
on another host; MACHINE names a file), "unmapped" (the driver maps nothing), "killed"
or "interrupted" (while it should give).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from driver_stand_in import Driver

from engram_jax import descriptors, gpu_driver, peer_read, processes, sharding

HEARTBEAT_SECONDS = 10


def adopt(driver: Driver, array: jax.Array) -> None:
    """Takes an array's memory for that of GPUs."""
    for shard in array.addressable_shards:
        address, size = shard.data.unsafe_buffer_pointer(), shard.data.nbytes
        driver.allocate(ctypes.string_at(address, size), address)


def break_down(fault: str, driver: Driver, machine: str) -> None:
    """Lets something fail in this process."""

    def end(self, given):
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    if fault == "allocator":
        driver.refused.add("cuMemRetainAllocationHandle")
    if fault == "unmapped":
        driver.refused.add("cuMemMap")
    if fault == "machine":
        processes._BOOT_ID = Path(machine)
    if fault in {"killed", "interrupted"}:
        descriptors.Exchange.give = end


def main(address: str, rank: int, machine: str, fault: str) -> None:
    """Records the addresses of two tables, and reads all rows by them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    processes.initialize(address, 2, rank, heartbeat_seconds=HEARTBEAT_SECONDS)
    # They start a backend.
    from mesh_cases import ranked_rows, stack24

    driver = Driver()
    gpu_driver._driver = lambda: driver
    sharding.mesh_reason = lambda mesh, **_: None
    mesh = jax.make_mesh((4, 1), ("tp", "dp"), (jax.sharding.AxisType.Auto,) * 2)
    layout = stack24().layout
    spread = sharding.EngramSharding.on(mesh, layout, exchange="peer_read")
    if rank == 1:
        break_down(fault, driver, machine)
    parts = [ranked_rows(rows) for rows in layout.num_rows]
    tables = [place(spread, layer, known) for layer, known in enumerate(parts)]
    for part in (*tables[0], *tables[1]):
        adopt(driver, part)
    maps, opened = [], []
    for layer in (0, 1, 0):
        recorded = peer_read.record_addresses(spread, layer, *tables[layer])
        maps.append(driver.calls.count("cuMemMap"))
        opened.append(sorted(os.listdir("/proc/self/fd")))
        for record in recorded.addressable_shards:
            check_rows(np.asarray(record.data)[0, :-1], parts[layer])
    assert opened[0] == opened[1] == opened[2]
    assert not driver.imported
    sys.stdout.write(json.dumps({"maps": maps}) + "\n")


def place(spread, layer: int, parts: tuple[np.ndarray, ...]) -> list[jax.Array]:
    """Puts a table's values and scales on the mesh."""
    values, scale = parts
    return [
        spread.place_table(
            layer, lambda start, end, x=x: x[start:end], x.shape[1], x.dtype
        )
        for x in (values.view(jnp.float8_e4m3fn), scale)
    ]


def check_rows(record: np.ndarray, parts: tuple[np.ndarray, ...]) -> None:
    """Reads every row of a table by the addresses of its shards."""
    seen = 0
    for entry in record:
        *addresses, ends, _ = entry.copy().view("<u8").tolist()
        start, end = ends & 0xFFFFFFFF, ends >> 32
        assert start == seen
        seen = end
        for address, part in zip(addresses, parts, strict=True):
            found = ctypes.string_at(address, (end - start) * part.shape[1])
            assert found == part[start:end].tobytes()
    assert seen == len(parts[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""What a placement takes, against what is there, before anything is allocated."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .checkpoint_files import Placement, placement_bytes
from .config import EngramConfig

SHARED_DIRECTORY_VARIABLE = "ENGRAM_JAX_SHARED_DIRECTORY"
"""Names another directory in memory than ``/dev/shm`` for `placement="shared_host"`."""
PINNED_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_POOL_DEFAULT_GB = 64


@dataclasses.dataclass(frozen=True)
class MemoryRoom:
    """What is available now, in bytes; None where there is no limit to know.

    Attributes:
      host: Of the machine, within this process's memory control groups.
      host_limit: What sets `host`: "the machine" or a control group's path.
      shared: In the directory of shared memory; 0 where there is none.
      shared_directory: That directory.
      device: On the device.
      pinned: In JAX's pool of pinned memory.
      on_cpu: Whether the device is the host's CPU, whose memory is the host's.
    """

    host: int
    host_limit: str
    shared: int
    shared_directory: Path
    device: int | None
    pinned: int | None
    on_cpu: bool

    @classmethod
    def measure(cls, device: Any = None) -> "MemoryRoom":
        """Look at what is available to this process.

        Args:
          device: A JAX device, or None for JAX's default one.
        """
        device = device or jax.local_devices()[0]
        host, limit = host_room()
        directory = shared_directory()
        stats = device.memory_stats() or {}
        on_device = pinned = None
        if device.platform != "cpu":
            if "bytes_limit" in stats:
                on_device = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            gigabytes = os.environ.get(PINNED_POOL_VARIABLE, _PINNED_POOL_DEFAULT_GB)
            pinned = int(gigabytes) << 30
        return cls(
            host,
            limit,
            shared_room(directory),
            directory,
            on_device,
            pinned,
            device.platform == "cpu",
        )


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a placement takes of one process and of its node, and what forbids it.

    Attributes:
      placement: Where the tables live.
      device: Bytes on the device.
      process: Bytes of host memory that each process takes for itself.
      node: Bytes of host memory on the node, all processes together.
      problems: One sentence, with figures, for each thing that does not fit.
      notes: Likewise, for what fits and could take less.
    """

    placement: Placement
    device: int
    process: int
    node: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


def plan_memory(
    config: EngramConfig,
    placement: Placement,
    *,
    processes: int = 1,
    already_shared: int = 0,
    room: MemoryRoom | None = None,
) -> MemoryPlan:
    """Compute what a placement takes, and compare it with what is available.

    Args:
      config: The model's sizes.
      placement: Where the tables shall live.
      processes: Processes on this node that load the checkpoint.
      already_shared: Bytes of the tables that are in shared memory already.
      room: What is available; None measures it.

    Returns:
      The plan; `MemoryPlan.problems` is empty where it fits.

    Example:
      >>> config = EngramConfig(
      ...     layer_ids=(1, 14), num_embeddings=(384006168, 384016682),
      ...     max_ngram_size=4, vocab_base=16000000, n_heads=8, head_dim=256,
      ...     pad_token_id=2, hidden_size=5120, hc_mult=4, rms_norm_eps=1e-20,
      ...     vocab_size=129280)
      >>> room = MemoryRoom(64 << 30, "the machine", 32 << 30, Path("/dev/shm"), None,
      ...                   None, True)
      >>> print(plan_memory(config, "shared_host", room=room).problems[0])
      placement="shared_host" takes 202.758 GB of shared memory on the node, but
      34.360 GB are free in /dev/shm. ...
    """
    room = MemoryRoom.measure() if room is None else room
    taken = placement_bytes(config, placement)
    shared = taken["host"] if placement == "shared_host" else 0
    process = taken["host"] - shared
    on_device = taken["device"]
    if room.on_cpu:
        process, on_device = process + on_device, 0
    node = processes * process + shared
    missing = max(0, shared - already_shared)
    problems = []

    def compare(needed: int, available: int | None, what: str, where: str) -> None:
        if available is not None and needed > available:
            problems.append(
                f'placement="{placement}" takes {gigabytes(needed)} of {what}, but '
                f"{gigabytes(available)} {where}."
            )

    compare(on_device, room.device, "device memory", "are available")
    if missing and not room.shared_directory.is_dir():
        problems.append(
            f'placement="{placement}" needs a directory in memory, but '
            f"{room.shared_directory} does not exist. Mount one, or name another in "
            f"{SHARED_DIRECTORY_VARIABLE}."
        )
    elif missing > room.shared:
        problems.append(
            f'placement="{placement}" takes {gigabytes(missing)} of shared memory on '
            f"the node, but {gigabytes(room.shared)} are free in "
            f"{room.shared_directory}. Enlarge it (mount -o remount,size=..; "
            f"docker run --shm-size), or name another in {SHARED_DIRECTORY_VARIABLE}."
        )
    if placement == "pinned_host" and room.pinned is not None and process > room.pinned:
        problems.append(
            f'placement="{placement}" takes {gigabytes(process)} of pinned memory, but '
            f"JAX's pool is limited to {room.pinned >> 30} GiB. Set "
            f"{PINNED_POOL_VARIABLE} before JAX starts, or use "
            'placement="host" with EngramPrefetch, which needs no such memory.'
        )
    compare(
        processes * process + missing,
        room.host,
        "host memory",
        f"are available (limit: {room.host_limit})",
    )
    notes = []
    if placement == "host" and processes > 1:
        saved = gigabytes((processes - 1) * taken["host"])
        notes.append(
            f'placement="shared_host" would take {saved} less: one copy of the tables '
            f"for the node's {processes} processes."
        )
    return MemoryPlan(
        placement, on_device, process, node, tuple(problems), tuple(notes)
    )


def choose_placement(
    plans: Sequence[MemoryPlan], *, together: bool = False
) -> MemoryPlan:
    """Take the first plan that fits.

    Args:
      plans: In order of preference.
      together: Take the same one in every process of the job; all must call.

    Returns:
      The plan.

    Raises:
      MemoryError: None does; the message has the figures.
    """
    fits = np.array([not plan.problems for plan in plans])
    if together and jax.process_count() > 1:
        everywhere = multihost_utils.process_allgather(fits.astype(np.int32))
        fits = np.asarray(everywhere).reshape(-1, len(plans)).all(0)
    for plan, fit in zip(plans, fits, strict=True):
        if fit:
            return plan
    problems = [
        sentence
        for plan in plans
        if plan.problems
        for sentence in (*plan.problems, *plan.notes)
    ]
    if not problems:
        problems = ["The tables do not fit in another process of this job."]
    if all(plan.placement != "mapped_file" for plan in plans):
        problems.append('placement="mapped_file" leaves the tables in the checkpoint.')
    raise MemoryError(" ".join(problems))


def shared_directory() -> Path:
    """Name the directory in memory that holds shared tables."""
    return Path(os.environ.get(SHARED_DIRECTORY_VARIABLE, "/dev/shm"))


def shared_room(directory: Path) -> int:
    """Find the free bytes of a directory's file system; 0 where there is none."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def host_room(
    meminfo: Path = Path("/proc/meminfo"),
    own_groups: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
) -> tuple[int, str]:
    """Find how many bytes this process can still take, within all its limits.

    Page cache counts as free: the kernel drops it when memory is asked for.

    Args:
      meminfo: The kernel's account of the machine's memory.
      own_groups: The control groups that this process is in.
      groups: Where control groups are mounted.

    Returns:
      The bytes, and what limits them.
    """
    lines = meminfo.read_text(encoding="ascii").splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable:"))
    bounds = [(int(free.split()[1]) * 1024, "the machine")]
    bounds.extend(_group_rooms(own_groups, groups))
    room, limit = min(bounds)
    return max(0, room), limit


def _group_rooms(own_groups: Path, groups: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:  # in a container, its own is the root
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = groups
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = root / path.lstrip("/")
        # A group has no more than any that it lies in.
        while group.is_relative_to(root):
            room = _group_room(group, *names)
            if room is not None:
                yield room, f"control group {group}"
            group = group.parent


def _group_room(group: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = int((group / limit).read_text())
        now = int((group / used).read_text())
    except (OSError, ValueError):
        return None  # no such group, or "max": no limit
    try:
        stat = (group / "memory.stat").read_text().splitlines()
        cached = next(int(x.split()[1]) for x in stat if x.split()[0] == cache)
    except (OSError, StopIteration):
        cached = 0
    return most - now + cached


def gigabytes(count: int) -> str:
    """Write bytes for a message: ``34.360 GB``."""
    return f"{count / 1e9:.3f} GB"

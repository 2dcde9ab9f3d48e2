"""Several processes of one job: started together, and agreed on errors."""

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

_MESSAGE_BYTES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HEARTBEAT_SECONDS = 30
"""After this long without a sign of life, JAX ends the other processes, with a line
that names the one that is missing; JAX's own default is 100 seconds."""


def initialize(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> None:
    """Join the job; call it first, before anything starts a JAX backend.

    `jax.distributed.initialize` with times that let no process wait for long for one
    that has died.

    Args:
        coordinator_address: host:port of process 0, the same for all.
        num_processes: how many processes there are.
        process_id: this one's number, from 0.
        heartbeat_seconds: how long a process may show no sign of life.
    """
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=heartbeat_seconds,
    )


@contextlib.contextmanager
def agreement(what: str) -> Iterator[None]:
    """Run a block in every process; if it fails in one, raise in all.

    Without this, a process that failed to load would leave the others waiting in their
    next collective. In a single process it does nothing.

    Cost: one gather of a kilobyte from each process before the block, which connects
    the processes so that the end of one is noticed at once, and one after it.

    Args:
        what: what the block does, for the message: "load_engram".

    Yields:
        Nothing.

    Raises:
        RuntimeError: it failed in some process; the message has the reason of each
            such process, by rank, and is the same everywhere. Or a process ended.

    Example:
        >>> with agreement("read the table"):
        ...     rows = 3
    """
    if jax.process_count() == 1:
        yield
        return
    _gather("", what)
    error = None
    try:
        yield
    except BaseException as raised:  # Ctrl-C in one process must end the others, too
        error = raised
    reasons = _gather(_reason(error), what)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
    if not failed:
        return
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    listed = "".join(f"\n  process {rank}: {why}" for rank, why in failed.items())
    raise RuntimeError(
        f"{what} failed in {len(failed)} of {jax.process_count()} processes; none goes "
        f"on.{listed}"
    ) from error


def processes_of_node() -> int:
    """Count the job's processes on this machine; all processes must call.

    Containers of one machine count together, since they share its memory.

    Returns:
        1 or more.

    Example:
        >>> processes_of_node()
        1
    """
    if jax.process_count() == 1:
        return 1
    own = machine()
    return _gather(own, "counting a machine's processes").count(own)


def machine() -> str:
    """Name this machine; another start of it has another name.

    Returns:
        The kernel's name for this start, or the machine's own without one.

    Example:
        >>> machine() == machine()
        True
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _gather(message: str, what: str) -> list[str]:
    """Every process's message, by rank."""
    encoded = message.encode()[:_MESSAGE_BYTES]
    block = np.zeros(_MESSAGE_BYTES, np.uint8)
    block[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    try:
        blocks = multihost_utils.process_allgather(block)
    except Exception as error:
        own = f" This process failed, too: {message}." if message else ""
        raise RuntimeError(
            f"{what}: another process of the {jax.process_count()} ended, or cannot be "
            f"reached; this is process {jax.process_index()}.{own} Its own output says "
            f"why, if it was not killed. ({error})"
        ) from error
    return [
        bytes(row[row != 0]).decode(errors="ignore")
        for row in np.asarray(blocks).reshape(jax.process_count(), -1)
    ]

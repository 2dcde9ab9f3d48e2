"""File descriptors between processes of one host: each gives its own to all others.

It takes three steps, so that nobody needs a thread: connect, give, take. What was given
waits in the kernel until it is taken. Let all processes finish a step before any begins
the next: then none waits in here. Otherwise it does, for a limited time.

Sockets have names that are no files' (Linux's abstract ones), so that nothing is left
of them, however a process ends.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

SECONDS = 60.0
"""How long a process waits for another in one step."""
_PER_MESSAGE = 253  # the kernel takes no more
_NUMBER, _CREDENTIALS = struct.Struct("<q"), struct.Struct("3i")


@contextlib.contextmanager
def open_exchange(rank: int, *, seconds: float = SECONDS) -> Iterator["Exchange"]:
    """Open a socket for others to connect to, until the block ends.

    Args:
      rank: This process's number among those that take part.
      seconds: How long to wait for another process in one step.

    Yields:
      What takes the three steps.
    """
    with contextlib.ExitStack() as stack:
        name = f"engram_jax-{secrets.token_hex(8)}"
        door = stack.enter_context(_new_socket(seconds))
        door.bind(f"\0{name}")
        door.listen(socket.SOMAXCONN)
        yield Exchange(rank, name, door, stack, seconds)


class Exchange:
    """Takes the steps; `open_exchange` makes it.

    Attributes:
      name: Of the socket, ASCII without spaces, for the others.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        door: socket.socket,
        stack: contextlib.ExitStack,
        seconds: float,
    ) -> None:
        self.name = name
        self._rank, self._door, self._stack = rank, door, stack
        self._seconds = seconds
        self._peers = dict[int, socket.socket]()

    def connect(self, names: Mapping[int, str]) -> None:
        """Connect to the other processes. They need not answer yet.

        Args:
          names: Of each of the other processes, by number: its `name`.

        Raises:
          OSError: One is not there, or of another user; the message names it.
        """
        for peer, name in names.items():
            connection = self._stack.enter_context(_new_socket(self._seconds))
            with self._named(peer, f"cannot be reached by its socket {name}"):
                try:
                    connection.connect(f"\0{name}")
                except ConnectionRefusedError as error:
                    raise OSError(
                        "it has ended, or its network is another; processes of several "
                        "containers need one in common, that of the host"
                    ) from error
                user = _user(connection)
                if user != os.geteuid():
                    raise PermissionError(
                        f"it is of user {user}, and descriptors are for processes of "
                        f"one user, here {os.geteuid()}"
                    )
                connection.send(_NUMBER.pack(self._rank))
            self._peers[peer] = connection

    def give(self, descriptors: Sequence[int]) -> None:
        """Give descriptors to each of the others, once it has connected.

        Args:
          descriptors: Any number. They stay open here, too.

        Raises:
          OSError: One did not connect in time, or is gone; the message names it.
        """
        waiting, end = set(self._peers), time.monotonic() + self._seconds
        while waiting:
            try:
                left = end - time.monotonic()
                if left <= 0:  # strangers may connect again and again
                    raise TimeoutError
                self._door.settimeout(left)
                connection, _ = self._door.accept()
            except TimeoutError as error:
                missing = ", ".join(f"process {peer}" for peer in sorted(waiting))
                raise TimeoutError(
                    f"{missing} did not connect within {self._seconds:g} s"
                ) from error
            with connection:
                connection.settimeout(self._seconds)
                peer = _who(connection)
                if peer in waiting:
                    waiting.remove(peer)
                    with self._named(peer, "cannot be given descriptors"):
                        _send(connection, descriptors)

    def take(self) -> dict[int, list[int]]:
        """Take what the others give.

        Returns:
          By the number of the process that gave them: descriptors, in its order, open
          until the exchange ends.

        Raises:
          OSError: One gave less than all in time; the message names it.
        """
        taken = dict[int, list[int]]()
        for peer, connection in self._peers.items():
            with self._named(peer, "did not give all descriptors"):
                taken[peer] = self._receive(connection)
        return taken

    def _receive(self, connection: socket.socket) -> list[int]:
        taken = list[int]()
        while True:
            size = _NUMBER.size, _PER_MESSAGE
            message, some, flags, _ = socket.recv_fds(connection, *size)
            for descriptor in some:
                self._stack.callback(os.close, descriptor)
                os.set_inheritable(descriptor, False)
            taken += some
            if flags & socket.MSG_CTRUNC:
                raise OSError("too many are open here: raise the limit, ulimit -n")
            if not message:
                raise OSError(f"it ended after {len(taken)}")
            if len(taken) == _NUMBER.unpack(message)[0]:
                return taken

    @contextlib.contextmanager
    def _named(self, peer: int, what: str) -> Iterator[None]:
        """Name the process that an error has to do with."""
        try:
            yield
        except TimeoutError as error:
            late = f"process {peer} {what}: no answer within {self._seconds:g} s"
            raise TimeoutError(late) from error
        except OSError as error:
            raise OSError(f"process {peer} {what}: {error}") from error


def _new_socket(seconds: float) -> socket.socket:
    # Messages stay whole, so that each says how many descriptors there are in all.
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(seconds)
    return made


def _user(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    level, name = socket.SOL_SOCKET, socket.SO_PEERCRED
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(level, name, _CREDENTIALS.size)
    )
    return user


def _who(connection: socket.socket) -> int | None:
    """The number of the process that connected, or None if it is none of them."""
    if _user(connection) != os.geteuid():
        return None
    try:
        message = connection.recv(_NUMBER.size)
    except (ConnectionError, TimeoutError):
        return None
    return _NUMBER.unpack(message)[0] if len(message) == _NUMBER.size else None


def _send(connection: socket.socket, descriptors: Sequence[int]) -> None:
    count = _NUMBER.pack(len(descriptors))
    for start in range(0, max(len(descriptors), 1), _PER_MESSAGE):
        some = descriptors[start : start + _PER_MESSAGE]
        socket.send_fds(connection, [count], some)

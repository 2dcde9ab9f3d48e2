"""Descriptors between processes: all arrive in order, or an error names who is gone."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from pathlib import Path

import pytest
from descriptors_worker import make_file
from worker_processes import TESTS, run_together

from engram_jax import descriptors

WORKER = str(TESTS / "descriptors_worker.py")


def run(folder, processes, files=1, seconds=60.0, fault=""):
    given = [str(files), str(seconds), fault]
    programs = [
        [WORKER, str(folder), str(processes), str(rank), *given]
        for rank in range(processes)
    ]
    # The module by itself, so that the workers need not wait for JAX.
    package = os.path.dirname(descriptors.__file__)
    return run_together(programs, {"PYTHONPATH": package})


def open_pair(stack, seconds=0.5):
    """Two ends within this process: the steps are the same, and none waits."""
    pair = [
        stack.enter_context(descriptors.open_exchange(rank, seconds=seconds))
        for rank in range(2)
    ]
    for rank, exchange in enumerate(pair):
        exchange.connect({1 - rank: pair[1 - rank].name})
    return pair


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


# --- Real processes -------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "files"), [(3, 2), (2, 300)])
def test_each_process_has_the_files_of_all_others(tmp_path, processes, files):
    """300 are more than one message holds."""
    for code, output in run(tmp_path, processes, files):
        assert (code, output.splitlines()[-1]) == (0, "all came")


def test_a_process_that_never_connects_is_named(tmp_path):
    first, silent, last = run(tmp_path, 3, seconds=2, fault="silent")
    for code, output in (first, last):
        assert code == 1
        assert "TimeoutError: process 1 did not connect within 2 s" in output
    assert silent[0] == 0


def test_a_process_that_ends_before_it_gives_is_named(tmp_path):
    """Nothing is left of its socket."""
    left, gone = run(tmp_path, 2, fault="ends")
    assert gone[0] == 9
    assert left[0] == 1
    assert left[1].splitlines()[-1].startswith("OSError: process 1 ")
    name = (tmp_path / "1").read_text()
    assert name not in Path("/proc/net/unix").read_text()


# --- Within one process ---------------------------------------------------------------


@pytest.fixture
def stack():
    before = open_descriptors()
    with contextlib.ExitStack() as made:
        yield made
    assert open_descriptors() == before


def test_no_descriptors_are_given_too(stack):
    one, other = open_pair(stack)
    file = make_file("one")
    stack.callback(os.close, file)
    one.give([file])
    other.give([])
    assert one.take() == {1: []}
    ((taken,),) = other.take().values()
    assert os.pread(taken, 9, 0) == b"one"
    assert not os.get_inheritable(taken)


def test_another_user_is_given_nothing(stack, monkeypatch):
    """Anybody may connect to a socket without a file."""
    one, other = open_pair(stack)
    file = make_file("one")
    stack.callback(os.close, file)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(TimeoutError, match=r"process 1 did not connect within 0\.5 s"):
        one.give([file])
    with pytest.raises(OSError, match="process 0 did not give all"):
        other.take()


def test_nothing_is_taken_from_another_user(stack, monkeypatch):
    one, other = (
        stack.enter_context(descriptors.open_exchange(rank)) for rank in range(2)
    )
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        OSError, match=f"process 1 .* of user {user}, .* here {user + 1}"
    ):
        one.connect({1: other.name})


def test_strangers_do_not_keep_a_process_waiting(stack, monkeypatch):
    """However many connect, and whatever they say."""
    one, _ = open_pair(stack)
    accept, strangers = socket.socket.accept, []

    def accept_and_connect(door):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0{one.name}")
            strangers.append(stranger.send(b"another"))
        return accept(door)

    one._peers[2] = one._peers[1]  # one that never connects
    monkeypatch.setattr(socket.socket, "accept", accept_and_connect)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"process 2 did not connect within 0\.5 s"):
        one.give([])
    assert time.monotonic() - began < 10
    assert len(strangers) > 1


def test_a_process_that_gives_nothing_in_time_is_named(stack):
    one, other = open_pair(stack)
    one.give([])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"process 1 did not give .* within 0\.5 s"):
        one.take()
    assert time.monotonic() - began < 10
    other.give([])
    assert one.take() == {1: []}


def test_one_that_gave_some_and_ended_is_named(stack, monkeypatch):
    one, other = open_pair(stack)
    file = make_file("some")
    stack.callback(os.close, file)
    monkeypatch.setattr(
        descriptors,
        "_send",
        lambda connection, some: descriptors.socket.send_fds(
            connection, [descriptors._NUMBER.pack(2)], some[:1]
        ),
    )
    other.give([file, file])
    with pytest.raises(OSError, match=r"process 1 did not give all .* ended after 1"):
        one.take()


def test_a_process_whose_socket_is_gone_is_named(stack):
    one = stack.enter_context(descriptors.open_exchange(0))
    with descriptors.open_exchange(1) as other:
        name = other.name
    with pytest.raises(OSError, match=r"process 1 cannot be reached .* it has ended"):
        one.connect({1: name})


def test_one_that_ends_after_all_connected_is_named(stack):
    one = stack.enter_context(descriptors.open_exchange(0))
    with descriptors.open_exchange(1) as other:
        one.connect({1: other.name})
        other.connect({0: one.name})
    with pytest.raises(OSError, match="process 1 cannot be given descriptors: "):
        one.give([])
    with pytest.raises(OSError, match="process 1 did not give all descriptors: "):
        one.take()


def test_too_many_open_descriptors_are_an_error(stack):
    """Pitfall: the kernel leaves out those for which there is no room."""
    one, other = open_pair(stack)
    files = [make_file("one") for _ in range(5)]
    for file in files:
        stack.callback(os.close, file)
    other.give(files)
    one.give([])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = set(open_descriptors())
    free = [number for number in range(999) if str(number) not in known]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[3], hard))  # room for three
    try:
        with pytest.raises(OSError, match=r"process 1 .* raise the limit, ulimit -n"):
            one.take()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Descriptors between processes: all arrive in order, or an error names who is gone."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest
from descriptors_worker import make_file
from worker_processes import TESTS, run_together

from engram_jax import descriptors

WORKER = str(TESTS / "descriptors_worker.py")


@pytest.fixture
def temporary(monkeypatch):
    """A directory with a short name, where sockets are made."""
    folder = Path(tempfile.mkdtemp(prefix="sock"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def run(folder, temporary, processes, files=1, seconds=60.0, fault=""):
    given = [str(files), str(seconds), fault]
    programs = [
        [WORKER, str(folder), str(processes), str(rank), *given]
        for rank in range(processes)
    ]
    # The module by itself, so that the workers need not wait for JAX.
    package = os.path.dirname(descriptors.__file__)
    return run_together(programs, {"TMPDIR": str(temporary), "PYTHONPATH": package})


def open_pair(stack, seconds=0.5):
    """Two ends within this process: the steps are the same, and none waits."""
    pair = [
        stack.enter_context(descriptors.open_exchange(rank, seconds=seconds))
        for rank in range(2)
    ]
    for rank, exchange in enumerate(pair):
        exchange.connect({1 - rank: pair[1 - rank].path})
    return pair


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


# --- Real processes -------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "files"), [(3, 2), (2, 300)])
def test_each_process_has_the_files_of_all_others(
    tmp_path, temporary, processes, files
):
    """300 are more than one message holds."""
    for code, output in run(tmp_path, temporary, processes, files):
        assert (code, output.splitlines()[-1]) == (0, "all came")
    assert not list(temporary.iterdir())


def test_a_process_that_never_connects_is_named(tmp_path, temporary):
    first, silent, last = run(tmp_path, temporary, 3, seconds=2, fault="silent")
    for code, output in (first, last):
        assert code == 1
        assert "TimeoutError: process 1 did not connect within 2 s" in output
    assert silent[0] == 0
    assert not list(temporary.iterdir())


def test_a_process_that_ends_before_it_gives_is_named(tmp_path, temporary):
    left, gone = run(tmp_path, temporary, 2, fault="ends")
    assert gone[0] == 9
    assert left[0] == 1
    assert left[1].splitlines()[-1].startswith("OSError: process 1 ")
    # What a process leaves that was ended from outside, others cannot remove.
    assert len(list(temporary.iterdir())) == 1


# --- Within one process ---------------------------------------------------------------


@pytest.fixture
def stack(temporary):
    before = open_descriptors()
    with contextlib.ExitStack() as made:
        yield made
    assert open_descriptors() == before
    assert not list(temporary.iterdir())


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


def test_no_other_user_can_connect(stack, monkeypatch):
    one, _ = open_pair(stack)
    folder = os.path.dirname(one.path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"a process of user {user} connected"):
        one.give([])


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
        path = other.path
    with pytest.raises(OSError, match=r"process 1 cannot be reached .* set by TMPDIR"):
        one.connect({1: path})


def test_one_that_ends_after_all_connected_is_named(stack):
    one = stack.enter_context(descriptors.open_exchange(0))
    with descriptors.open_exchange(1) as other:
        one.connect({1: other.path})
        other.connect({0: one.path})
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


def test_a_directory_with_too_long_a_name_is_refused(stack, temporary, monkeypatch):
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with (
        pytest.raises(OSError, match="at most 107 are possible: set TMPDIR"),
        descriptors.open_exchange(0),
    ):
        pass
    deep.rmdir()

"""Tables of two processes, each of which reads the other's memory by addresses."""

from __future__ import annotations

import json

import pytest
from test_multiprocess import free_address
from worker_processes import TESTS, run_together


@pytest.fixture
def run(tmp_path):
    machine = tmp_path / "boot_id"
    machine.write_text("11111111-2222-3333-4444-555555555555\n")

    def call(fault=""):
        worker, address = str(TESTS / "peer_read_worker.py"), free_address()
        programs = [
            [worker, address, str(rank), str(machine), fault] for rank in range(2)
        ]
        return run_together(programs, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"})

    return call


def test_each_process_reads_all_rows_of_the_other_s_tables(run):
    """Each part is mapped once by each reading device, and not again."""
    for code, output in run():
        assert code == 0, output
        # Two devices here read two parts of two devices there.
        assert json.loads(output.splitlines()[-1]) == {"maps": [8, 16, 16]}


@pytest.mark.parametrize(
    ("fault", "failed", "said"),
    [
        (
            "allocator",
            "exporting the memory of tables failed in 1 of 2 processes",
            "process 1: OSError: other processes can read memory of JAX's default "
            "allocator only; XLA_PYTHON_CLIENT_ALLOCATOR is cuda_async: leave it unset",
        ),
        (
            "machine",
            "connecting to those that hold tables failed in 2 of 2 processes",
            "process 1: OSError: the memory is on another host, that of process 0",
        ),
        (
            "unmapped",
            "opening the memory of tables failed in 1 of 2 processes",
            "process 1: OSError: cuMemMap: CUDA_ERROR_1 (1)",
        ),
        (
            "interrupted",
            "giving the memory of tables failed in 1 of 2 processes",
            "process 1: KeyboardInterrupt: ",
        ),
    ],
)
def test_what_fails_in_one_process_is_every_process_error(run, fault, failed, said):
    results = run(fault)
    for code, output in results if fault != "interrupted" else results[:1]:
        assert code not in (0, None)
        assert failed in output
        assert said in output
    assert results[1][0] not in (0, None)


def test_a_process_that_is_killed_ends_the_other(run):
    (code, output), (killed, _) = run("killed")
    assert killed == -9
    assert code not in (0, None)
    assert "giving the memory of tables: another process of the 2 ended" in output

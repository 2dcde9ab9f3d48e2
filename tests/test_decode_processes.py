"""scripts/decode_processes.py: two processes decode as one does, and notice an end."""

from __future__ import annotations

import json
import os
import signal

import benchmark_record
import decode_processes
import jax
import pytest


@pytest.fixture
def run(capsys):
    """Runs the script; returns exit code and output."""

    def call(*arguments):
        code = decode_processes.main(["--device", "cpu", "--seconds", "60", *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_two_processes_decode_what_one_does(run, tmp_path):
    code, output = run("--steps", "40", "--output", str(tmp_path / "out.jsonl"))
    assert code == 0, output
    assert "all tokens agree" in output
    lines = [line for line in output.splitlines() if "; tokens " in line]
    assert len({line.split("; tokens ")[1] for line in lines}) == 1
    jobs = [line.split(" on cpu:")[0] for line in lines]
    assert jobs == [
        "2 processes, 2 devices, collective, process 0",
        "2 processes, 2 devices, collective, process 1",
        "1 process, 2 devices, collective, process 0",
        "1 process, 1 device, process 0",
    ]
    results = {r.name: r for r in benchmark_record.latest(tmp_path / "out.jsonl")}
    ours = "2 processes, 2 devices, collective"
    ratio = results[f"decode loop of {ours} against one device, T = 16"]
    times = results[f"decode loop ({ours}), T = 16"].value
    assert (
        ratio.value
        == times / results["decode loop (1 process, 1 device), T = 16"].value
    )
    assert ratio.holds is None  # CPUs are not judged


@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_one_process_ends_the_other(run, killed):
    arguments = ("--steps", "1000000", "--kill-at", "20", "--kill", str(killed))
    code, output = run(*arguments)
    assert code == 0, output
    assert f"process {killed} was killed; process {1 - killed} ended after" in output


def fake_job(monkeypatch, codes, ends, outputs, digests=()):
    def run_job(options, folder, job):
        processes = job.processes
        for rank in range(processes):
            result = {
                "digest": digests[rank] if processes > 1 else digests[-1],
                "devices": 1,
                "platform": "cpu",
                "call_us": [1.0],
                "loop_us": [1.0],
            }
            decode_processes._result(folder, job, rank).write_text(json.dumps(result))
        return codes[:processes], ends[:processes], outputs[:processes]

    monkeypatch.setattr(decode_processes, "run_job", run_job)


@pytest.mark.parametrize(
    ("digests", "code"), [("aaa", 0), ("aba", 1), ("aab", 1), ("bba", 1)]
)
def test_tokens_that_differ_are_a_failure(run, monkeypatch, digests, code):
    fake_job(monkeypatch, [0, 0], [1.0, 1.0], ["", ""], digests)
    found, output = run()
    assert found == code
    assert ("TOKENS DIFFER" in output) == bool(code)


@pytest.mark.parametrize(
    ("peers", "alone", "agree", "said"),
    [
        ("aaa", "a", True, "all tokens agree"),
        ("bbb", "a", True, "2 processes, 2 devices, peer_read: other tokens"),
        ("aaa", "b", True, "1 process, 1 device: other tokens"),
        # Of the same program: in two processes, and in two against one.
        ("aba", "a", False, "TOKENS DIFFER: 2 processes, 2 devices, peer_read"),
        ("bba", "a", False, "TOKENS DIFFER: 2 processes, 2 devices, peer_read"),
    ],
)
def test_only_the_same_program_must_round_alike(peers, alone, agree, said, capsys):
    job = decode_processes.Job
    found = {
        job(2, 2): [{"digest": "a"}] * 2,
        job(2, 2, "peer_read"): [{"digest": digest} for digest in peers[:2]],
        job(1, 2): [{"digest": "a"}],
        job(1, 2, "peer_read"): [{"digest": peers[2]}],
        job(1, 1): [{"digest": alone}],
    }
    assert decode_processes._agree(found) is agree
    assert said in capsys.readouterr().out


def test_a_process_that_hangs_is_a_failure(run, monkeypatch):
    fake_job(monkeypatch, [0, None], [1.0, None], ["", "where it stood"], "aaa")
    code, output = run()
    assert code == 1
    assert "collective: process 1 hung: 60.0 s" in output
    assert "where it stood" in output


@pytest.mark.parametrize(
    ("code", "end", "said", "found"),
    [
        (1, 15.0, "RuntimeError: decode: another process of the 2 ended", 0),
        (1, 15.0, "RuntimeError: something else", 1),  # not that of the other's end
        (0, 15.0, "decode: another process of the 2 ended", 1),  # no error
        (1, 99.0, "decode: another process of the 2 ended", 1),  # too late
        (None, None, "", 1),  # it hangs
    ],
)
def test_how_the_others_end_is_judged(run, monkeypatch, code, end, said, found):
    fake_job(monkeypatch, [code, -signal.SIGKILL], [end, 10.0], [said, ""], "aaa")
    assert run("--kill-at", "3")[0] == found


def test_a_process_that_was_not_killed_shows(run, monkeypatch):
    fake_job(monkeypatch, [0, 0], [1.0, 1.0], ["", ""], "aaa")
    code, output = run("--kill-at", "3")
    assert code == 1
    assert "process 1 was not killed" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "1"], "at least 2"),
        (["--kill-at", "3", "--kill", "2"], "within 0..1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        decode_processes.main(arguments)
    assert said in capsys.readouterr().err


# --- On GPUs --------------------------------------------------------------------------


@pytest.fixture
def run_on_gpus(capsys, monkeypatch):
    """Runs the script on two GPUs, beside this process that has most of them."""
    if len(jax.devices()) < 2:
        pytest.skip(reason=f"needs 2 GPUs; {len(jax.devices())} is here")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.08")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", os.environ.get("NCCL_NVLS_ENABLE", "0"))

    def call(*arguments):
        code = decode_processes.main(["--seconds", "120", *arguments])
        return code, capsys.readouterr().out

    return call


@pytest.mark.gpu
def test_two_gpus_in_two_processes_decode_as_in_one(run_on_gpus, tmp_path):
    output_file = str(tmp_path / "out.jsonl")
    code, output = run_on_gpus("--steps", "1000", "--output", output_file)
    assert code == 0, output
    for form in ("collective", "peer_read"):
        assert f"2 processes, 2 devices, {form}, process 1 on gpu" in output


@pytest.mark.gpu
@pytest.mark.parametrize("killed", [0, 1])
def test_the_end_of_a_gpu_s_process_ends_the_other(run_on_gpus, killed):
    arguments = ("--steps", "1000000", "--kill-at", "100", "--kill", str(killed))
    code, output = run_on_gpus(*arguments)
    assert code == 0, output

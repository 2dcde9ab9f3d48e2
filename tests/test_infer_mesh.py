"""scripts/infer.py over a mesh, in one process and in two, and what it refuses."""

from __future__ import annotations

import infer
import infer_mesh
import pytest

CHECKED = (
    "row numbers",
    "rows",
    "outputs",
    "row numbers, as on one device",
    "rows, as on one device",
    "outputs, as on one device",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint with DeepSeek's tokenizer in it."""
    from make_checkpoint import make_checkpoint

    directory = tmp_path_factory.mktemp("infer") / "checkpoint"
    make_checkpoint(directory, tokenizer_file=infer.find_tokenizer(None, None))
    return directory


@pytest.fixture
def run(checkpoint, tmp_path, capfd):
    """Runs the script on a few tokens; returns exit code, output and errors."""

    def call(*arguments, tokens=20):
        gates = tmp_path / "gates.png"
        common = ["--checkpoint", str(checkpoint), "--gates", str(gates)]
        sizes = ["--max-tokens", str(tokens), "--chunk", "8", "--decode", "2"]
        code = infer.main([*common, *sizes, *arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err, gates.exists()

    return call


def assert_agreed(output: str) -> None:
    lines = [line.strip() for line in output.splitlines()]
    for name in CHECKED:
        assert any(
            line.startswith(name + " ") and " yes: " in line for line in lines
        ), output


def test_eight_devices_agree_with_one(run):
    code, output, errors, drawn = run("--mesh", "tp=2,dp=4")
    assert code == 0, output + errors
    assert drawn
    assert_agreed(output)
    assert "8 of 8 devices" in output


def test_two_processes_agree_with_one_device(run, monkeypatch):
    """The same job as two local processes; only the first one reports."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, output, errors, drawn = run("--processes", "2")
    assert code == 0, output + errors
    assert drawn
    assert_agreed(output)
    assert "2 of 2 devices" in output
    assert output.count("What ran") == 1


def test_an_error_in_the_processes_is_the_job_s(run, monkeypatch, checkpoint):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, _, errors, drawn = run("--processes", "2", "--tokenizer", "none.json")
    assert code == 2
    assert not drawn
    assert errors.count("error: ") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "tp=2,pp=2"], "it must be sizes of tp (tensor) and dp (data)"),
        (["--mesh", "tp=0"], "it must be sizes of tp"),
        (["--mesh", "tp=3", "--processes", "2"], "must be divided evenly"),
        (["--processes", "2", "--process-id", "0"], "go together"),
        (
            ["--processes", "2", "--process-id", "2", "--coordinator", "a:1"],
            "must be within 0..1",
        ),
        (["--mesh", "tp=8,dp=8"], "needs 64 devices; 8 are here"),
    ],
)
def test_jobs_that_cannot_be_are_refused(run, arguments, message, monkeypatch):
    if "dp=8" in arguments[-1]:
        monkeypatch.setattr("jax.config.update", lambda name, value: None)
    code, _, errors, _ = run(*arguments)
    assert code == 2
    assert message in errors


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    options = infer.parse_arguments(["--mesh", "tp=2,dp=2", "--processes", "2"])
    shares = [infer_mesh.own_gpus(options, rank) for rank in range(2)]
    assert shares == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert infer_mesh.own_gpus(options, 0) == {}

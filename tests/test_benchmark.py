"""scripts/benchmark.py: it measures what it says, judges rightly, and keeps records."""

import json
import math

import benchmark
import benchmark_cpu
import benchmark_record
import numpy as np
import pytest
from benchmark_record import Result

from engram_jax import EngramConfig, EngramLayout, build_compressed_token_map


def test_requirements_are_judged():
    assert Result("s", "n", 3.0, "x").holds is None
    assert Result("s", "n", 3.0, "x", at_least=3).holds is True
    assert Result("s", "n", 2.9, "x", at_least=3).holds is False
    assert Result("s", "n", 3.0, "ms", at_most=3).holds is True
    assert Result("s", "n", 3.1, "ms", at_most=3).holds is False
    assert Result("s", "n", math.nan, "ms", at_most=3).holds is False
    assert Result("s", "n", 3.0, "ms", at_most=3).required == "at most 3 ms"


def test_functions_are_measured_in_turns():
    calls = []
    samples = benchmark_record.measure_in_turns(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3
    )
    assert "".join(calls) == "abababab"  # one round to warm up
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


def test_records_keep_every_sample_and_their_origin(tmp_path):
    path = tmp_path / "results" / "cpu.jsonl"
    origin = benchmark_record.provenance()
    old = Result("hash", "speed", 1.0, "x", (1.0, 2.0), at_least=3)
    new = Result("hash", "speed", 4.0, "x", (4.0,), at_least=3, detail={"tokens": 7})
    benchmark_record.append(path, [old], origin)
    benchmark_record.append(path, [new], origin)
    assert benchmark_record.latest(path) == [new]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["samples"] for line in lines] == [[1.0, 2.0], [4.0]]
    assert {"time", "commit", "device", "cpu", "versions"} <= lines[0][
        "provenance"
    ].keys()
    assert benchmark_record.markdown([new]).splitlines()[-1] == (
        "| speed | 4 x | at least 3 x |"
    )


def test_results_of_each_device_have_their_file():
    name = benchmark_record.results_file("NVIDIA H200").name
    assert name == "nvidia_h200.jsonl"


@pytest.mark.parametrize(("value", "code"), [(5.0, 0), (1.0, 1)])
def test_a_requirement_that_fails_is_the_exit_code(
    value, code, tmp_path, monkeypatch, capsys
):
    result = Result("hash", "speed", value, "x", at_least=3)
    suites = {"hash": lambda: iter([result]), "other": lambda: iter([])}
    monkeypatch.setattr(benchmark_cpu, "SUITES", suites)
    arguments = ["--device", "cpu", "--output", str(tmp_path / "out.jsonl")]
    assert benchmark.main([*arguments, "--suites", "hash"]) == code
    assert ("FAILS" in capsys.readouterr().out) == bool(code)
    assert benchmark_record.latest(tmp_path / "out.jsonl") == [result]
    assert benchmark.main([*arguments, "--markdown"]) == 0
    assert "| speed |" in capsys.readouterr().out
    assert benchmark.main([*arguments, "--suites", "nothing"]) == 2
    assert "no suite nothing; there are hash, other" in capsys.readouterr().err


def test_the_numpy_hash_is_the_published_one(golden, v41):
    data = golden("hash_v41")
    token_map, _ = build_compressed_token_map(benchmark_cpu.tokenizer_file())
    layout = EngramLayout.from_config(EngramConfig.from_dict(v41["config"]))
    rows = benchmark_cpu.hash_in_numpy(data["ids"], token_map, layout)
    np.testing.assert_array_equal(rows, data["expected_no_dead"])


def test_the_hash_is_measured():
    device, numpy, ratio = benchmark_cpu.measure_hash(tokens=512, rounds=3)
    assert device.value > 0
    assert numpy.value > 0
    assert ratio.samples == tuple(
        slow / fast for slow, fast in zip(numpy.samples, device.samples, strict=True)
    )


def test_the_cache_of_the_token_map_is_faster():
    built, cached = benchmark_cpu.measure_token_map(rounds=1)
    assert 5 * cached.value < built.value


def test_loading_keeps_to_the_size_of_the_tables():
    device, mapped = benchmark_cpu.measure_loading(table_bytes=100_000_000)
    assert 0.95 < device.value < 1.2
    assert mapped.value < 0.25


def test_the_import_starts_no_backend_and_brings_no_torch(tmp_path, monkeypatch):
    assert benchmark_cpu.import_seconds("engram_jax") > 0
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "starter.py").write_text("import jax\njax.devices()\n")
    with pytest.raises(AssertionError, match="starter needs a backend"):
        benchmark_cpu.import_seconds("starter")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "torcher.py").write_text("import torch\n")
    with pytest.raises(AssertionError, match="torcher imports PyTorch"):
        benchmark_cpu.import_seconds("torcher")

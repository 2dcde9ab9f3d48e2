"""The GPU benchmark's arithmetic: grouping of kernels, verdicts, the picture."""

from __future__ import annotations

import benchmark_gpu as gpu
import benchmark_record
import matplotlib as mpl
import plot_benchmark
import pytest
from benchmark_peers import compare

mpl.use("agg")


PEERS = {
    "copy": {"GB/s": {"0": 4000.0}},
    "hash": {"vllm": {"1": 4.0, "4096": 5.0}, "sglang": {"4096": 6.0}},
    "lookup": {"vllm": {"4096": 90.0}, "sglang": {"1": 1.2, "4096": 60.0}},
    "gate": {"sglang": {"1": 2.0, "4096": 130.0}, "vllm": {"4096": 180.0}},
    "wkv_bf16": {"cublas": {"1": 80.0, "4096": 1600.0}},
    "lookup_host": {"sglang": {"1": 3.0}},
}


def result(operation, variant, tokens, us, size=None):
    return gpu.kernel_result(operation, variant, tokens, [us], size)


def verdicts(*results):
    return {r.name: r for r in compare(list(results), PEERS)}


def test_ratios_are_judged():
    found = verdicts(
        result("hash", "pallas", 1, 3.0),
        result("lookup", gpu.CACHED, 1, 1.3),
        result("lookup", "pallas", 1, 1.1),
        result("gate", "pallas", 1, 1.0),
        result("wkv", "ordered", 1, 40.0),
        result("wkv", "auto", 1, 50.0),
    )
    assert found["hash / vLLM, T = 1"].value == 0.75
    assert found["hash / vLLM, T = 1"].holds is True
    assert found["lookup (rows in cache) / SGLang, T = 1"].holds is False
    assert found["gate / SGLang, T = 1"].holds is True
    assert found["wkv (ordered) / cuBLAS bfloat16, T = 1"].holds is True
    assert found["wkv (auto) / cuBLAS bfloat16, T = 1"].holds is None
    assert found["hash (vllm), T = 4096"].value == 5.0
    assert "lookup_host (sglang), T = 1" not in found  # not measured in this run


def test_shares_of_the_copy_rate_are_judged():
    found = verdicts(
        result("copy", "xla", 0, 1000.0, 4_000_000_000),
        result("gate", "pallas", 4096, 100.0, 390_000_000),
        result("lookup", "pallas", 4096, 25.0, 70_000_000),
    )
    assert found["gate: share of the copy rate, T = 4096"].value == 0.975
    assert found["gate: share of the copy rate, T = 4096"].holds is True
    assert found["lookup: share of the copy rate, T = 4096"].holds is False


def test_whole_steps_are_judged_against_the_best_of_each_peer():
    found = verdicts(
        result("prefill", "auto", 4096, 3400.0),
        result("prefill_without_projection", "auto", 4096, 310.0),
        result("decode_kernels", "auto", 1, 100.0),
        result("decode_async", "auto", 1, 109.0),
    )
    rows = found["hash, rows and gate of two layers / best of each peer, T = 4096"]
    assert rows.value == 310 / (5 + 2 * 60 + 2 * 130)
    output = found[
        "hash to output of two layers / best of each peer and cuBLAS, T = 4096"
    ]
    assert output.value == 3400 / (5 + 2 * 60 + 2 * 130 + 2 * 1600)
    assert found["decode step, asynchronous loop, T = 1"].holds is True


@pytest.mark.parametrize(
    ("run", "is_kernel", "expected"),
    [
        # Two calls of two kernels each.
        ([("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 4.0)], False, [3000.0, 7000.0]),
        # One kernel serves both calls: only the mean is known.
        ([("a", 1.0), ("b", 2.0), ("b", 3.0)], False, [3000.0]),
        # In another order they cannot be told apart, either.
        ([("a", 1.0), ("a", 1.0), ("b", 2.0), ("b", 4.0)], False, [4000.0]),
        # The copies of what is kept of a kernel's result do not count.
        ([("k", 1.0), ("slice", 9.0), ("k", 2.0)], True, [1000.0, 2000.0]),
    ],
)
def test_kernels_are_grouped_by_call(run, is_kernel, expected, monkeypatch):
    class Profiler:
        @staticmethod
        def measure(function, *, aggregate, iterations):
            del function, aggregate, iterations
            return lambda calls: (None, [run])

    monkeypatch.setattr(gpu, "profiler", Profiler)
    assert gpu.kernel_times(len, [(), ()], is_kernel=is_kernel) == expected


def test_times_are_drawn(tmp_path):
    results = [
        result(name, variant, tokens, 2.0 * tokens)
        for name in ("hash", "wkv")
        for variant in ("pallas", "vllm", "other")
        for tokens in (1, 16)
    ]
    picture = tmp_path / "gpu.png"
    plot_benchmark.draw(results, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.png"]
    with pytest.raises(ValueError, match="no kernel times"):
        plot_benchmark.draw([benchmark_record.Result("s", "n", 1.0, "x")], picture)


def test_kernel_times_become_a_table_by_tokens():
    text = benchmark_record.markdown(
        [
            result("hash", "pallas", 1, 1.25),
            result("hash", "vllm", 4096, 1234.5),
            benchmark_record.Result("peers", "a ratio", 0.5, "x", at_most=0.8),
        ]
    )
    assert text.splitlines() == [
        "| µs | by | T = 1 | T = 4096 |",
        "| --- | --- | ---: | ---: |",
        "| hash | pallas | 1.25 |  |",
        "| hash | vllm |  | 1234 |",
        "",
        "| measured | value | required |",
        "| --- | ---: | --- |",
        "| a ratio | 0.5 x | at most 0.8 x |",
    ]

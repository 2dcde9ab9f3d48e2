"""scripts/benchmark.py --mesh: the same numbers everywhere, and times told apart."""

from __future__ import annotations

import types

import benchmark
import benchmark_mesh
import benchmark_record
import device_times
import jax
import jax.numpy as jnp
import measured_mesh
import measured_programs
import mesh_stacks
import numpy as np
import pytest
from device_times import Event
from measured_programs import Program, Times
from mesh_cases import mesh

from engram_jax import EngramLayout, EngramSharding
from engram_jax.shards import exchanges_of

CONFIG = mesh_stacks.with_rows(mesh_stacks.SMALL, 24 * 1200)
LAYOUT = EngramLayout.from_config(CONFIG)
PAUSE = 1e6 * device_times.APART_SECONDS


# --- Arrays made on the devices -------------------------------------------------------


def test_tables_hold_what_numpy_says():
    for layer, rows in enumerate(LAYOUT.num_rows):
        table = mesh_stacks.make_table(CONFIG, LAYOUT, layer)
        got = np.concatenate([np.asarray(part).view(np.uint8) for part in table], 1)
        wanted = mesh_stacks.known_rows(layer, np.arange(rows), CONFIG.head_dim)
        np.testing.assert_array_equal(got, wanted)
        values = wanted[:, : CONFIG.head_dim]
        assert len(np.unique(values)) == 254  # all but the two NaN
        assert not np.isin(values, [127, 255]).any()


@pytest.mark.parametrize(
    ("shape", "cut"), [((2, 1), None), ((2, 2), None), ((3, 1), "rows")]
)
def test_each_shard_holds_its_rows(shape, cut):
    sharding = EngramSharding.on(mesh(*shape), LAYOUT, cut=cut)
    for layer in range(2):
        table = mesh_stacks.make_table(CONFIG, LAYOUT, layer, sharding)
        got = np.concatenate([np.asarray(part).view(np.uint8) for part in table], 1)
        shards = got.reshape(sharding.shards.num_shards, -1, got.shape[1])
        for shard, held in enumerate(shards):
            start = sharding.shards.row_start[layer, shard]
            end = sharding.shards.row_end[layer, shard]
            rows = np.arange(start, end)
            wanted = mesh_stacks.known_rows(layer, rows, CONFIG.head_dim)
            np.testing.assert_array_equal(held[: end - start], wanted)


def test_smaller_tables_have_the_same_columns():
    for rows in (24 * 3000, 32_000_000):
        config = mesh_stacks.with_rows(mesh_stacks.V41, rows)
        layout = EngramLayout.from_config(config)
        assert layout.n_hash_cols == 24
        assert all(0.5 * rows < found <= rows for found in layout.num_rows)


def test_batches_have_the_tokens_that_they_say():
    for tokens, requests in ((1, 1), (16, 16), (4096, 64)):
        batch = mesh_stacks.make_batch(CONFIG, tokens, 0)
        assert len(batch["input_ids"]) == len(batch["positions"]) == tokens
        assert batch["query_start_loc"].tolist()[-1] == tokens
        assert len(batch["query_start_loc"]) == requests + 1


# --- Timelines ------------------------------------------------------------------------


def line(*events):
    return [Event(name, start, us) for name, start, us in events]


def test_a_timeline_is_cut_where_every_gpu_stood_still():
    zero = line(("a", 0, 10), ("b", 12, 3), ("a", 5 * PAUSE, 11), ("b", 5.1 * PAUSE, 4))
    one = line(("a", 1, 20), ("b", 22, 5), ("a", 5 * PAUSE, 21))
    first, second = device_times.split_runs([zero, one], 2)
    assert first.sums == [13, 25]
    assert first.spans == [15, 26]
    assert second.sums == [15, 21]
    assert device_times.median_of([first, second], max) == 23
    assert device_times.median_of([first, second], min) == 14
    assert device_times.split_runs([zero, one], 3) is None
    assert device_times.split_runs([], 1) is None


def test_a_long_kernel_is_no_pause():
    busy = line(("a", 0, 4 * PAUSE), ("b", 4.1 * PAUSE, 1))
    (run,) = device_times.split_runs([busy], 1)
    assert len(run.devices[0]) == 2


def test_times_are_added_up_by_kernel():
    runs = device_times.split_runs(
        [
            line(("void gather<256>(int)", 0, 4), ("loop_add_fusion_3", 5, 2)),
            line(("void gather<256>(int)", 0, 6), ("loop_add_fusion.12", 7, 2)),
        ],
        1,
    )
    assert device_times.by_name(runs) == {"gather": 5.0, "loop_add_fusion": 2.0}


def test_only_gpus_streams_are_read(monkeypatch):
    def thing(name, **more):
        return types.SimpleNamespace(name=name, **more)

    def events(*names):
        started = enumerate(names)
        return [thing(n, start_ns=1e3 * i, duration_ns=500) for i, n in started]

    planes = [
        thing("/host:CPU", lines=[thing("python", events=events("x"))]),
        thing("/device:GPU:1", lines=[thing("Stream #3(Compute)", events=events("b"))]),
        thing(
            "/device:GPU:0",
            lines=[
                thing("Stream #9", events=events("a", "c")),
                thing("Stream #8", events=events("d")),
                thing("XLA Ops", events=events("again")),
            ],
        ),
    ]
    fake = types.SimpleNamespace(
        from_file=lambda path: types.SimpleNamespace(planes=planes)
    )
    monkeypatch.setattr(jax.profiler, "ProfileData", fake)
    zero, one = device_times.read_timelines("profile")
    assert [event.name for event in zero] == ["a", "d", "c"]
    assert [(event.start, event.us) for event in one] == [(0.0, 0.5)]


def test_timelines_that_do_not_fit_are_said(monkeypatch, capsys):
    """Here a machine without GPUs that says it has some: walls are left."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    add = jax.jit(lambda x: x + 1)
    assert device_times.trace([lambda: add(1.0)] * 2) is None
    assert "do not fit 2 calls: [] events" in capsys.readouterr().out


def test_without_counters_the_reason_is_known():
    counters = device_times.LinkCounters(2)
    assert counters.reason
    ran = []
    assert counters.per_call(lambda: ran.append(1), 5) is None
    assert ran == [1]


# --- What is measured -----------------------------------------------------------------


def test_forms_cover_every_exchange_once(capsys):
    spread = measured_mesh.MeasuredMesh({"tp": 1, "dp": 2}, [4])
    forms = spread.forms(("packed", "bfloat16"), 4)
    kinds = [(form.exchange, form.row_format) for form in forms.values()]
    assert len(kinds) == len(set(kinds))
    # CPU devices do not read their peers' memory.
    possible = set(exchanges_of("heads")) - {"peer_read"}
    assert {exchange for exchange, _ in kinds} == possible
    assert "exchange='peer_read' cannot run on this mesh" in capsys.readouterr().out
    assert next(iter(forms.values())).exchange == "all_to_all"  # the library's choice
    tensor = measured_mesh.MeasuredMesh({"tp": 2, "dp": 1}, [4])
    forms = tensor.forms(("packed",), 4)
    choices = {(f.sequence_parallel, f.shard_projection) for f in forms.values()}
    assert choices == {(False, True), (False, False), (True, False), (True, True)}
    assert len(tensor.forms(("packed",), 4)) == len(set(forms.values()))


@pytest.mark.parametrize("axes", ["tp=2", "tp=2,dp=2"])
def test_a_mesh_is_measured_on_cpus(axes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured_programs, "ROUND_SECONDS", 0.002)
    output = tmp_path / "out.jsonl"
    arguments = ["--device", "cpu", "--mesh", axes, "--output", str(output)]
    assert benchmark.main([*arguments, "--tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert "us to enqueue it" in printed
    results = benchmark_record.latest(output)
    measured = [r for r in results if r.unit == "us"]
    variants = {r.detail["variant"] for r in measured if "step" in r.suite}
    assert benchmark_mesh.ONE in variants
    assert len(variants) >= 3
    assert all(r.detail["mesh"] == axes and r.value > 0 for r in measured)
    assert all(r.holds is None for r in results)  # CPUs are not judged
    loops = [r for r in measured if r.detail["operation"] == "rows loop"]
    bytes_of = {r.detail["variant"]: r.detail.get("bytes_received") for r in loops}
    assert any(moved and moved["rows"] > 0 for moved in bytes_of.values())
    assert benchmark.main([*arguments, "--markdown"]) == 0
    assert f"| step loop, {axes} | one GPU |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --device or --mesh"),
        (["--mesh", "tp=2", "--device", "host"], "leave it out"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert said in capsys.readouterr().err


def test_a_wrong_mesh_is_refused(capsys):
    assert benchmark.main(["--device", "cpu", "--mesh", "pp=2"]) == 2
    assert "tp=2,dp=4" in capsys.readouterr().err


@pytest.mark.parametrize("replica", [0, 1])
def test_outputs_that_differ_are_not_timed(replica):
    bench = measured_mesh.MeasuredMesh({"tp": 1, "dp": 2}, [4])
    forms = dict(list(bench.forms(("packed",), 4).items())[:1])
    programs = benchmark_mesh._step_programs(bench, forms, 4)
    benchmark_mesh._check(bench, programs, forms, 4)
    (name,) = forms
    right = programs[name]

    def wrong(*operands):
        return right.call(*operands).at[4 * replica + 1].add(jnp.bfloat16(0.25))

    programs[name] = Program(wrong, right.leaves, right.batches, right.start)
    with pytest.raises(AssertionError, match=f"replica {replica}: off from one GPU"):
        benchmark_mesh._check(bench, programs, forms, 4)


def test_rows_are_compared_bit_for_bit():
    packed = jnp.asarray(mesh_stacks.known_rows(0, np.arange(6), 32))[:, None, None]
    assert benchmark_mesh._rows_equal(packed, packed)
    decoded = jnp.zeros((6, 1, 1, 32), jnp.bfloat16)
    assert not benchmark_mesh._rows_equal(decoded, packed)
    assert not benchmark_mesh._rows_equal(packed.at[3, 0, 0, 32].add(1), packed)


def made_up_times(step: float, kernels: list[list[float]] | None = None) -> Times:
    runs = None
    if kernels is not None:
        runs = [
            device_times.Run(tuple((Event("k", 0, us),) for us in each))
            for each in kernels
        ]
    return Times([step] * 5, [2 * step] * 5, [step / 2] * 5, runs)


@pytest.fixture
def judged(monkeypatch):
    monkeypatch.setattr(measured_mesh.MeasuredMesh, "judged", True)


@pytest.mark.parametrize(
    ("tokens", "step", "holds"),
    [(32, 62.0, True), (32, 63.0, False), (4, 115.0, True), (4, 116.0, False)],
)
def test_the_fastest_form_is_judged(judged, tokens, step, holds, capsys):
    bench = measured_mesh.MeasuredMesh({"tp": 2, "dp": 1})
    forms = bench.forms(("packed",), 4)
    times = {name: made_up_times(900.0) for name in forms}
    fastest = list(forms)[-1]
    times[fastest] = made_up_times(step, [[10.0, 20.0]])
    times[benchmark_mesh.ONE] = made_up_times(100.0)
    loop, call = benchmark_mesh._judge_step(bench, times, forms, tokens)
    assert loop.holds is holds
    assert loop.detail["fastest"] == fastest
    assert "kernels 20.0 us on a GPU: k 15" in loop.detail["where"][0]
    assert call.holds is (holds if tokens == 4 else None)
    assert f"takes {900 / step:.2f} of the fastest" in capsys.readouterr().out


def test_a_plain_all_to_all_is_the_measure_of_the_packed_one(judged):
    bench = measured_mesh.MeasuredMesh({"tp": 1, "dp": 2})
    forms = bench.forms(("packed",), 4)
    name = next(n for n, form in forms.items() if form.exchange == "all_to_all")
    plain = benchmark_mesh.PLAIN + name
    times = {name: made_up_times(100.0, [[50.0, 60.0]] * 2)}
    times[plain] = made_up_times(59.0, [[40.0, 45.0]] * 2)
    forms = {name: forms[name]}
    (result,) = benchmark_mesh._judge_rows(bench, "rows", forms, times, 32, None)
    assert result.value == pytest.approx(0.59)
    assert result.holds is False
    assert result.detail["kernels"] == pytest.approx(0.8)
    times[plain] = made_up_times(61.0)
    (result,) = benchmark_mesh._judge_rows(bench, "rows", forms, times, 32, None)
    assert result.holds is True


@pytest.mark.parametrize(
    ("tokens", "us", "traded", "judged_as"),
    [
        (32, 70.0, 117.0, [True, True]),
        (32, 71.0, 117.0, [False, False]),
        (4, 6.0, 7.0, [True, None]),
        (4, 6.1, 7.0, [False, None]),
    ],
)
def test_peer_reads_are_judged(judged, monkeypatch, tokens, us, traded, judged_as):
    """By the slowest GPU's kernels, against a collective that waits for nobody."""
    bench = measured_mesh.MeasuredMesh({"tp": 1, "dp": 2})
    forms = bench.forms(("packed",), 4)
    trade = next(form for form in forms.values() if form.exchange == "all_to_all")
    gather = next(form for form in forms.values() if form.exchange == "all_gather")
    monkeypatch.setattr(
        measured_mesh.MeasuredMesh,
        "exchange_of",
        # A stand-in for what CPU devices do not have.
        lambda self, form, tokens: "peer_read" if form is gather else form.exchange,
    )
    forms = {"peer_read, packed": gather, "all_to_all, packed": trade}
    times = {
        "peer_read, packed": made_up_times(9.0, [[us, us - 3]] * 3),
        "all_to_all, packed": made_up_times(9.0, [[traded + 40, traded]] * 3),
    }
    suite = "rows of one layer"
    results = list(benchmark_mesh._judge_rows(bench, suite, forms, times, tokens, 0))
    assert [result.value for result in results] == [us, us / traded]
    assert [result.holds for result in results] == judged_as

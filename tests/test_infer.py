"""scripts/infer.py, the main job: what it prints, writes, compares and refuses."""

import dataclasses
import json
import tempfile

import infer
import infer_report
import infer_stream
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engram_jax import kernels, load_engram

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint with DeepSeek's tokenizer in it."""
    from make_checkpoint import make_checkpoint

    directory = tmp_path_factory.mktemp("infer") / "checkpoint"
    make_checkpoint(directory, tokenizer_file=infer.find_tokenizer(None, None))
    return directory


@pytest.fixture(scope="module")
def stack(checkpoint):
    return load_engram(checkpoint, backend="xla")


@pytest.fixture
def main(tmp_path, capsys):
    """Runs the script; returns exit code, output and errors."""

    def run(*arguments):
        gates = tmp_path / "gates.png"
        code = infer.main([*map(str, arguments), "--gates", str(gates)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_demo_shows_rows_and_agrees_with_itself(main, tmp_path, v41):
    code, output, errors = main()
    assert code == 0, output + errors
    # The second occurrence of " Way", as " way", has its compressed id.
    lines = {
        line.split()[0]: line.split() for line in output.splitlines() if line.strip()
    }
    assert lines["2"][1:4] == ["·Way", "13823", "1461"]
    assert lines["7"][1:5] == ["·way", "1722", "1461", "#2"]
    # Rows are V4.1's: within the first head of each n-gram size.
    columns = [(0, 0), (0, 8), (0, 16), (1, 0)]
    flat = [[p for size in layer for p in size] for layer in v41["primes"]]
    for row, (layer, column) in zip(lines["2"][-4:], columns, strict=True):
        start = v41["offsets"][layer][column]
        assert start <= int(row) < start + flat[layer][column]
    for name in ("row numbers", "rows", "outputs"):
        assert f"{name}  " in output
    assert output.count("yes: ") == 3
    assert "NO" not in output
    assert output.count("tokens/s") == 2
    assert (tmp_path / "gates.png").read_bytes().startswith(PNG)


def test_a_users_text_and_checkpoint(main, checkpoint, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Schöne Grüße aus Köln. " * 40)
    code, output, _ = main(
        "--text", text, "--checkpoint", checkpoint, "--placement", "mapped_file",
        "--max-tokens", 50, "--chunk", 7, "--decode", 9, "--show", 3,
    )  # fmt: skip
    assert code == 0
    assert "of this checkpoint" in output
    assert "mapped_file (--placement)" in output
    assert "all 50 tokens" in output


@pytest.mark.parametrize(("chunk", "decode"), [(64, 0), (5, 3), (64, 99), (1, 0)])
def test_any_cut_gives_what_one_pass_gives(chunk, decode, stack):
    ids = np.array([11, 270, 270, 5, 99, 270, 5, 99, 1722, 128000, 7], np.int32)
    streamed, _ = infer_stream.compute_as_stream(
        stack, ids, prefill_tokens=max(len(ids) - decode, 0), chunk=chunk
    )
    whole = infer_stream.compute_at_once(stack, ids)
    np.testing.assert_array_equal(streamed.hashes, whole.hashes)
    np.testing.assert_array_equal(streamed.outputs, whole.outputs)
    for ours, theirs in zip(streamed.rows, whole.rows, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("exact", [True, False])
def test_the_comparison_sees_every_difference(stack, exact):
    ids = np.arange(5, dtype=np.int32)
    hidden = infer_stream.stand_in_hidden_states(ids, stack.config)
    whole = infer_stream.compute_at_once(stack, ids)

    def compare(**changes):
        changed = dataclasses.replace(whole, **changes)
        results = infer_stream.compare(changed, whole, hidden, exact=exact)
        return [agrees for _, agrees, _ in results]

    assert compare() == [True, True, True]
    assert compare(hashes=whole.hashes + 1) == [False, True, True]
    other_rows = [whole.rows[0], whole.rows[1] ^ 1]
    assert compare(rows=other_rows) == [True, False, True]
    bits = whole.outputs.view(np.uint16)
    last_bit = (bits ^ 1).view(whole.outputs.dtype)
    assert compare(outputs=last_bit) == [True, True, not exact]
    four_more = (bits + 4).view(whole.outputs.dtype)
    assert compare(outputs=four_more) == [True, True, False]
    not_a_number = np.full_like(whole.outputs, np.nan)
    assert compare(outputs=not_a_number) == [True, True, False]


def test_a_disagreement_is_reported_with_exit_code_1(main, monkeypatch):
    def wrong(*args, **kwargs):
        return [("outputs", False, "3 of 4 values differ")]

    monkeypatch.setattr(infer_stream, "compare", wrong)
    monkeypatch.setattr(infer_report, "draw_gates", lambda *arguments: 20)
    code, output, _ = main("--max-tokens", 20)
    assert code == 1
    assert "NO: 3 of 4 values differ" in output


def test_an_interruption_leaves_nothing(main, monkeypatch, tmp_path):
    made = []

    def interrupted(stack, ids, **others):
        made.extend(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(infer_stream, "compute_as_stream", interrupted)
    code, _, errors = main()
    assert code == 130
    assert "Stopped" in errors
    assert made
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"caf\xe9 au lait", "is not UTF-8")],
)
def test_a_text_without_text_is_refused(content, message, main, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(content)
    code, _, errors = main("--text", text)
    assert code == 2
    assert errors.startswith(f"error: {text} {message}")


def test_missing_files_are_refused_by_name(main, tmp_path):
    missing = tmp_path / "missing"
    code, _, errors = main("--text", missing)
    assert (code, str(missing) in errors) == (2, True)
    code, _, errors = main("--checkpoint", missing)
    assert (code, str(missing) in errors) == (2, True)
    code, _, errors = main("--tokenizer", missing)
    assert (code, str(missing) in errors) == (2, True)


def test_a_checkpoint_with_another_tokenizer_is_refused(main, checkpoint, tmp_path):
    other = json.loads((checkpoint / "tokenizer.json").read_text())
    other["model"]["vocab"] = dict(list(other["model"]["vocab"].items())[:300])
    other["model"]["merges"] = []
    other["added_tokens"] = []
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(other))
    code, _, errors = main("--checkpoint", checkpoint, "--tokenizer", file)
    assert code == 2
    assert "another tokenizer" in errors


@pytest.mark.parametrize(
    "arguments", [["--chunk", "0"], ["--max-tokens", "0"], ["--decode", "-1"]]
)
def test_sizes_that_cannot_work_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        infer.parse_arguments(arguments)
    assert caught.value.code == 2
    assert f"{arguments[0]} must be at least" in capsys.readouterr().err


def test_a_long_text_is_cut_between_characters(tmp_path):
    text = tmp_path / "text"
    text.write_text("é" * 100, encoding="utf-8")
    assert infer.read_text(text, 7) == "ééé"
    assert infer.read_text(text, 200) == "é" * 100


def test_tables_that_do_not_fit_stay_in_the_file(monkeypatch, checkpoint):
    import engram_jax

    def load(directory, *, tokenizer, placement="device"):
        if placement == "device":
            raise MemoryError("takes 203 GB, 1 GB are available")
        return placement

    monkeypatch.setattr(engram_jax, "load_engram", load)
    stack, why = infer.load_stack(checkpoint, checkpoint, None)
    assert (stack, why) == (
        "mapped_file", "mapped_file (takes 203 GB, 1 GB are available)",
    )  # fmt: skip


@pytest.mark.parametrize(("streams", "width"), [(1, 256), (4, 256), (4, 33)])
def test_gates_do_not_depend_on_how_many_tokens_run_together(streams, width):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    hidden, kv = draw(96, streams, width), draw(96, (streams + 1) * width)
    q, k = draw(streams, width), draw(streams, width)
    gate = jax.jit(lambda h, kv: kernels.gate(h, kv, q, k, eps=1e-20, backend="xla"))
    whole = np.asarray(gate(hidden, kv))
    for size in (1, 3, 16, 32):
        parts = [
            np.asarray(gate(hidden[start : start + size], kv[start : start + size]))
            for start in range(0, 96, size)
        ]
        np.testing.assert_array_equal(
            np.concatenate(parts).view(np.uint16), whole.view(np.uint16), str(size)
        )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (6336, "6.3 kB"), (203e9, "203.0 GB"),
     (5e13, "50000.0 GB")],
)  # fmt: skip
def test_bytes_are_written_in_decimal_units(count, text):
    assert infer_report.bytes_text(count) == text

"""The script that makes checkpoints: any size, sparse at V4.1's, whole or not."""

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import make_checkpoint as script
import numpy as np
import pytest
from flax import nnx

from engram_jax.check import check_checkpoint
from engram_jax.checkpoint import load_engram
from engram_jax.checkpoint_files import open_checkpoint
from engram_jax.safetensors_file import map_tensor
from engram_jax.vocabulary import CACHE_DIR_VARIABLE

TINY_OPTIONS = ["--vocab-base", "50", "--head-dim", "32", "--hidden-size", "32"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> None:
    cache = tmp_path_factory.getbasetemp() / "make_checkpoint_cache"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(cache))


@pytest.fixture(autouse=True)
def keep_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_small_checkpoint_fits_and_loads(tmp_path, capsys):
    assert script.main([str(tmp_path / "out"), *TINY_OPTIONS]) == 0
    assert "GB on disk" in capsys.readouterr().out
    report = check_checkpoint(tmp_path / "out")
    assert report.fits
    stack = load_engram(tmp_path / "out")
    hidden = jnp.ones((10, 4, 32), jnp.bfloat16)

    @nnx.jit
    def run(stack, ids, hidden):
        batch = stack.batch(ids, jnp.arange(10), jnp.array([0, 10]))
        return stack(1, hidden, batch)

    out = run(stack, jnp.arange(10), hidden)
    assert jnp.isfinite(out).all()
    assert not jnp.array_equal(out, hidden)


def test_sizes_prefix_and_padding_are_the_users(tmp_path):
    options = ["--layers", "2", "5", "7", "--heads", "3", "--max-ngram-size", "3"]
    options += ["--padding-rows", "9", "--hc-mult", "2", "--prefix", "model."]
    assert script.main([str(tmp_path / "out"), *TINY_OPTIONS, *options]) == 0
    files = open_checkpoint(tmp_path / "out")
    assert files.prefix == "model."
    assert files.config.layer_ids == (2, 5, 7)
    assert (files.config.n_hash_cols, files.config.hc_mult) == (6, 2)
    assert check_checkpoint(tmp_path / "out").fits


def test_equal_seeds_make_equal_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.main([str(tmp_path / name), *TINY_OPTIONS, "--seed", str(seed)])
    shards = [next((tmp_path / n).glob("*00001*")).read_bytes() for n in "abc"]
    assert shards[0] == shards[1] != shards[2]


def test_tables_hold_no_nan(tmp_path):
    script.make_checkpoint(tmp_path / "out")
    for parts in open_checkpoint(tmp_path / "out").layers.values():
        for part, info in parts.items():
            values = np.asarray(map_tensor(info)[:1000]).astype(np.float32)
            assert np.isfinite(values).all(), part


def test_sparse_checkpoint_of_v41_opens_at_once_and_reads_its_last_rows(tmp_path):
    """Pitfall: int32 byte offsets overflow at rows 8,388,608 and 268,435,456."""
    assert script.main([str(tmp_path / "out"), "--sparse"]) == 0
    size = sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    disk = sum(f.stat().st_blocks * 512 for f in (tmp_path / "out").iterdir())
    assert size > 203e9
    assert disk < 20e6
    assert check_checkpoint(tmp_path / "out").fits

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    stack = load_engram(tmp_path / "out", placement="mapped_file")
    assert time.monotonic() - start < 2
    for layer in stack.layers.values():
        last = layer.embedding.num_rows - 1
        assert last > 384_000_000
        rows = [*script.SPARSE_ROWS, last]
        ids = jnp.array([*rows, 8_388_606, last - 1, last + 1, -1])
        packed = np.asarray(layer.embedding.lookup_packed(ids))
        for row, got in zip(rows, packed, strict=False):
            wanted = [
                script.sparse_row("embed.weight", row, 256),
                script.sparse_row("embed.scale", row, 8),
            ]
            np.testing.assert_array_equal(got, np.concatenate(wanted))
        assert not packed[len(rows) :].any()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 300_000, f"{growth} KiB more"


def test_sparse_rows_differ():
    rows = [*script.SPARSE_ROWS, 384_006_167, 384_016_681]
    for part, width in (("embed.weight", 256), ("embed.scale", 8)):
        seen = {script.sparse_row(part, row, width).tobytes() for row in rows}
        assert len(seen) == len(rows)


def test_interruption_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "random_pieces", interrupted)
    assert script.main([str(tmp_path / "out"), *TINY_OPTIONS]) == 130
    assert "nothing was left behind" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_the_middle_leave_nothing(tmp_path, number):
    process = subprocess.Popen(
        [
            sys.executable,
            script.__file__,
            str(tmp_path / "out"),
            "--vocab-base",
            "2000000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*/.model*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told_without_a_traceback(tmp_path, capsys):
    (tmp_path / "keep").write_text("1")
    assert script.main([str(tmp_path), *TINY_OPTIONS]) == 1
    assert "not an empty directory" in capsys.readouterr().err
    assert script.main([str(tmp_path / "x"), "--head-dim", "33"]) == 1
    assert "engram_head_dim is 33" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_checkpoint_larger_than_the_disk_is_refused_at_once(tmp_path, capsys):
    options = ["--vocab-base", "80000000", "--head-dim", "25600"]
    assert script.main([str(tmp_path / "out"), *options]) == 1
    assert "bytes; the disk has" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_own_tokenizer_sets_the_vocabulary(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    vocab = {"a": 0, "A": 1, "b": 2}
    Tokenizer(models.WordLevel(vocab, unk_token="a")).save(str(path))
    options = [str(tmp_path / "out"), *TINY_OPTIONS, "--tokenizer", str(path)]
    assert script.main(options) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["engram_compressed_vocab_size"]) == (3, 2)
    assert load_engram(tmp_path / "out").hash_state.vocab_size == 3


def test_without_deepseeks_tokenizer_the_map_comes_later(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_tokenizer", lambda given: given)
    assert script.main([str(tmp_path / "out"), *TINY_OPTIONS]) == 0
    names = {Path(p).name for p in (tmp_path / "out").iterdir()}
    assert not {"tokenizer.json", "engram.json"} & names
    assert "no tokenizer.json, so load_engram needs" in capsys.readouterr().err
    assert check_checkpoint(tmp_path / "out").fits

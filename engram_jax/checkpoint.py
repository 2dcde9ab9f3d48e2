"""Load and save Engram layers in the published checkpoint layout."""

import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from .checkpoint_files import (
    INDEX_NAME,
    SIDE_FILE_NAME,
    CheckpointFiles,
    Placement,
    check_fingerprint,
    expected_tensors,
    open_checkpoint,
    placement_bytes,
    tensor_name,
)
from .config import EngramConfig
from .embedding import ParallelEngramEmbedding, RowStorage
from .hash_state import NgramHashState
from .host_storage import MappedFileTable, PinnedHostTable, available_host_memory
from .kernels import Backend
from .layer import Engram
from .layout import EngramLayout
from .safetensors_file import (
    DTYPES,
    SafetensorsWriter,
    TensorInfo,
    map_tensor,
    read_rows,
    whole_directory,
)
from .stack import EngramStack
from .vocabulary import build_compressed_token_map, fingerprint

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_PINNED_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_POOL_DEFAULT_GB = 64


def load_engram(
    checkpoint_dir: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    placement: Placement = "device",
    mesh: jax.sharding.Mesh | None = None,
    backend: Backend | None = None,
) -> EngramStack:
    """Load the Engram layers of a checkpoint in the published layout.

    Headers are checked before any data is read: names, dtypes, shapes, the index, the
    token map's size and, where ``engram.json`` pins it, its fingerprint. So is the
    memory that the tables take.

    Args:
      checkpoint_dir: A directory with ``config.json`` and ``model.safetensors``, or
        shards and ``model.safetensors.index.json``. Other tensors are left alone, and
        shards without Engram tensors need not be there.
      tokenizer: What `build_compressed_token_map` takes, or a token map (integers
        [V]); None takes ``tokenizer.json`` in the directory.
      placement: Where the tables live. ``"device"``: in device memory.
        ``"pinned_host"``: in page-locked host memory. ``"mapped_file"``: in the
        checkpoint's files, which must stay as they are; takes no memory.
      mesh: Devices to spread the tables over; None uses JAX's default device.
      backend: Form of every operation: None chooses, or ``"pallas"``, ``"xla"``,
        ``"pallas_interpret"``.

    Returns:
      The stack, ready to call.

    Raises:
      FileNotFoundError: A file that is needed is missing.
      MemoryError: The tables do not fit; the message has the figures.
      NotImplementedError: The placement is not available, or a mesh is given.
      TypeError: The tokenizer is of an unknown kind.
      ValueError: Anything in the checkpoint or the tokenizer does not fit; the
        message names it.
    """
    if placement not in get_args(Placement):
        listed = ", ".join(map(repr, get_args(Placement)))
        raise ValueError(f"placement is {placement!r}; it must be one of {listed}.")
    if placement == "shared_host":
        raise NotImplementedError(
            'placement="shared_host" is not available in this release; "mapped_file" '
            "shares one copy among the processes of a machine, too: the page cache's."
        )
    if mesh is not None:
        raise NotImplementedError(
            "Loading onto a mesh is not available in this release; pass mesh=None."
        )
    files = open_checkpoint(checkpoint_dir)
    token_map = _token_map(files, tokenizer)
    layout = EngramLayout.from_config(files.config, int(token_map.max()) + 1)
    check_fingerprint(fingerprint(token_map), files.token_map_sha256, files.directory)
    hash_state = NgramHashState(layout, token_map, backend=backend)
    _check_memory(files.config, placement)
    layers = {
        layer_id: Engram(
            _load_table(
                parts["embed.weight"], parts["embed.scale"], placement, backend
            ),
            _to_device(parts["wkv.weight"]),
            _to_device(parts["wkv.scale"]),
            _to_device(parts["q_weight"]),
            _to_device(parts["k_weight"]),
            eps=files.config.rms_norm_eps,
            backend=backend,
        )
        for layer_id, parts in files.layers.items()
    }
    _log.info("Loaded %s: tables in placement %r.", files.directory, placement)
    return EngramStack(files.config, hash_state, layers)


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
      OSError: The disk has less room than the checkpoint takes.
      ValueError: A table or projection is not FP8, the prefix does not end with a
        dot, or the tokenizer is not the stack's.
    """
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


def _token_map(files: CheckpointFiles, tokenizer: Any) -> npt.NDArray[np.int32]:
    if isinstance(tokenizer, np.ndarray | jax.Array):
        token_map = np.asarray(tokenizer)
        if (
            token_map.ndim != 1
            or token_map.dtype.kind not in "iu"
            or not token_map.size
        ):
            raise ValueError(
                f"tokenizer is an array of dtype {token_map.dtype} and shape "
                f"{token_map.shape}; a token map is integers of shape [V]."
            )
        return token_map.astype(np.int32)
    if tokenizer is None:
        tokenizer = files.directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise FileNotFoundError(
                f"{tokenizer} does not exist; pass tokenizer= (a tokenizer.json, a "
                "tokenizer, or a token map)."
            )
    return build_compressed_token_map(tokenizer)[0]


def _default_device() -> Any:
    # Where arrays go unless told otherwise, whatever jax_default_device says.
    return next(iter(jnp.zeros(()).devices()))


def _check_memory(config: EngramConfig, placement: Placement) -> None:
    """Refuse what cannot fit, with the figures, before anything is allocated."""
    needed = placement_bytes(config, placement)
    device = _default_device()
    stats = device.memory_stats() or {}
    if device.platform == "cpu":
        available = {"host": available_host_memory()}
        needed = {"host": needed["device"] + needed["host"]}
    else:
        available = {"host": available_host_memory()}
        if "bytes_limit" in stats:
            used = stats.get("bytes_in_use", 0)
            available["device"] = stats["bytes_limit"] - used
        if needed["host"]:
            limit = int(os.environ.get(_PINNED_POOL_VARIABLE, _PINNED_POOL_DEFAULT_GB))
            if needed["host"] > limit << 30:
                raise MemoryError(
                    f'placement="{placement}" takes {_gigabytes(needed["host"])} of '
                    f"pinned memory, but JAX's pool is limited to {limit} GiB. Set "
                    f"{_PINNED_POOL_VARIABLE} before JAX starts, or use "
                    'placement="mapped_file".'
                )
    for where, room in available.items():
        if needed[where] > room:
            raise MemoryError(
                f'placement="{placement}" takes {_gigabytes(needed[where])} of {where} '
                f"memory, but {_gigabytes(room)} are available. "
                'placement="mapped_file" leaves the tables in the checkpoint.'
            )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def _load_table(
    weight: TensorInfo, scale: TensorInfo, placement: Placement, backend: Backend | None
) -> ParallelEngramEmbedding:
    if placement == "mapped_file":
        return ParallelEngramEmbedding.from_storage(MappedFileTable(weight, scale))
    if placement == "pinned_host":
        return ParallelEngramEmbedding.from_storage(
            PinnedHostTable(_for_host(weight), _for_host(scale))
        )
    return ParallelEngramEmbedding(
        _to_device(weight), _to_device(scale), backend=backend
    )


def _for_host(info: TensorInfo) -> npt.NDArray[Any]:
    """Give a tensor to JAX so that its copy in host memory is the only one.

    On a CPU JAX uses aligned memory as it is, a mapped file's, too. A GPU's page-locked
    memory is a copy, and of the mapping only what is being copied is resident.
    """
    if _default_device().platform == "cpu":
        return read_rows(info, 0, info.shape[0])
    return map_tensor(info)


def _to_device(info: TensorInfo) -> jax.Array:
    """Load a tensor; E8M0 scales become bytes."""
    if _default_device().platform == "cpu":
        # JAX uses the aligned memory as it is, so the tensor exists once.
        return jax.device_put(_bytes_of_scales(read_rows(info, 0, info.shape[0])))
    return _in_pieces(info)


def _in_pieces(info: TensorInfo) -> jax.Array:
    """Fill a device array piece by piece, in place."""
    rows = info.shape[0]
    step = max(1, _CHUNK_BYTES * rows // max(info.nbytes, 1))
    result = jnp.zeros(info.shape, _bytes_of_scales(read_rows(info, 0, 0)).dtype)
    for start in range(0, rows, step):
        piece = _bytes_of_scales(read_rows(info, start, min(start + step, rows)))
        # Waiting keeps one piece in host memory instead of a queue of them.
        result = _put_rows(result, piece, start).block_until_ready()
    return result


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(table: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(table, rows, start, 0)


def _bytes_of_scales(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.uint8) if array.dtype == DTYPES["F8_E8M0"] else array


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

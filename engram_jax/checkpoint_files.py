"""Find and check the Engram tensors of a checkpoint directory, without JAX."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .config import QUANT_BLOCK, EngramConfig
from .safetensors_file import TensorInfo, read_header, unique_keys

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SIDE_FILE_NAME = "engram.json"
"""File that pins the token map: ``{"token_map_sha256": "..."}``."""

Placement = Literal["device", "pinned_host", "host", "shared_host", "mapped_file"]

_NAME = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d+)\.engram\.(?P<part>.*)")
_MOST_PROBLEMS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """Say where each Engram tensor of a checkpoint lies; all of them fit the config.

    Attributes:
      directory: The checkpoint's directory.
      config: The sizes in its ``config.json``.
      prefix: What tensor names have before ``layers.``.
      layers: By layer id, each part (such as ``embed.weight``) of that layer.
      token_map_sha256: The fingerprint that ``engram.json`` pins, or None.
    """

    directory: Path
    config: EngramConfig
    prefix: str
    layers: dict[int, dict[str, TensorInfo]]
    token_map_sha256: str | None


def open_checkpoint(directory: str | os.PathLike[str]) -> CheckpointFiles:
    """Read a checkpoint's config, index and headers, and check them; no data is read.

    Args:
      directory: The checkpoint: ``config.json`` with ``model.safetensors.index.json``
        and its shards, or with ``model.safetensors``.

    Returns:
      Where the tensors lie.

    Raises:
      FileNotFoundError: The directory or a file that is needed is missing.
      ValueError: The config has no Engram or cannot work; a file is damaged; a tensor
        is missing, given twice, unknown, or has another dtype or shape; the index
        disagrees with a header.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; give a checkpoint's.")
    config = EngramConfig.from_pretrained(directory)
    tensors = find_tensors(directory)
    prefix, problems = match_tensors(config, tensors)
    if problems:
        shown = problems[:_MOST_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more.")
        raise ValueError(f"{directory} does not fit its config: " + " ".join(shown))
    layers = {
        layer_id: {part: tensors[tensor_name(prefix, layer_id, part)] for part in parts}
        for layer_id, parts in expected_tensors(config).items()
    }
    return CheckpointFiles(directory, config, prefix, layers, read_side_file(directory))


def tensor_name(prefix: str, layer_id: int, part: str) -> str:
    """Spell a tensor's published name: ``layers.1.engram.embed.weight``."""
    return f"{prefix}layers.{layer_id}.engram.{part}"


def expected_tensors(
    config: EngramConfig,
) -> dict[int, dict[str, tuple[str, tuple[int, ...]]]]:
    """List dtype and shape of every tensor that a config's Engram layers have.

    Args:
      config: The model's sizes.

    Returns:
      By layer id and part, the format's dtype name and the shape.

    Example:
      >>> sizes = EngramConfig(
      ...     layer_ids=(1,), num_embeddings=(60,), max_ngram_size=3, vocab_base=7,
      ...     n_heads=2, head_dim=32, pad_token_id=2, hidden_size=64, hc_mult=2,
      ...     rms_norm_eps=1e-20, vocab_size=100)
      >>> expected_tensors(sizes)[1]["embed.scale"]
      ('F8_E8M0', (60, 1))
    """
    out_width = (config.hc_mult + 1) * config.hidden_size
    in_width = config.n_hash_cols * config.head_dim
    streams = (config.hc_mult, config.hidden_size)
    return {
        layer_id: {
            "embed.weight": ("F8_E4M3", (rows, config.head_dim)),
            "embed.scale": ("F8_E8M0", (rows, config.head_dim // QUANT_BLOCK)),
            "wkv.weight": ("F8_E4M3", (out_width, in_width)),
            "wkv.scale": (
                "F8_E8M0",
                (math.ceil(out_width / QUANT_BLOCK), in_width // QUANT_BLOCK),
            ),
            "q_weight": ("BF16", streams),
            "k_weight": ("BF16", streams),
        }
        for layer_id, rows in zip(config.layer_ids, config.num_embeddings, strict=True)
    }


def find_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Read the header of every shard of a checkpoint.

    A shard without Engram tensors may be missing, so that a partial download will do.

    Args:
      directory: The checkpoint's directory.

    Returns:
      Every tensor by name, other layers' included.

    Raises:
      FileNotFoundError: There is neither index nor single file, or a shard that has
        Engram tensors is missing.
      ValueError: A file is damaged, a tensor is given twice, or the index disagrees
        with a shard's header.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if not index.is_file():
        if not single.is_file():
            raise FileNotFoundError(
                f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}."
            )
        return read_header(single)
    weight_map = _read_index(index)
    shards = set(weight_map.values())
    if single.is_file() and SINGLE_NAME not in shards:
        raise ValueError(
            f"{directory} has {SINGLE_NAME} and also {INDEX_NAME}, which does not name "
            "it; remove the one that is not meant."
        )
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(shards):
        path = directory / shard
        if not path.is_file():
            needed = [n for n, s in weight_map.items() if s == shard and _engram(n)]
            if needed:
                raise FileNotFoundError(
                    f"{path} does not exist; {INDEX_NAME} says that it holds "
                    f"{needed[0]}. Download it."
                )
            continue
        for name, info in read_header(path).items():
            if name in tensors:
                raise ValueError(
                    f"{name} is given twice: in {tensors[name].path.name} and in "
                    f"{shard}. Remove one."
                )
            tensors[name] = info
    _check_index(index, weight_map, tensors)
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map from tensors to files.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{path} places {name} in {shard!r}; it must be the name of a file in "
                "the same directory."
            )
    return weight_map


def _check_index(
    path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    for name, info in tensors.items():
        if weight_map.get(name) != info.path.name:
            stated = weight_map.get(name)
            says = f"places it in {stated}" if stated else "does not name it"
            raise ValueError(
                f"{path.name} disagrees with the shards: {info.path.name} holds "
                f"{name}, the index {says}."
            )
    for name, shard in weight_map.items():
        if name not in tensors and (path.parent / shard).is_file():
            raise ValueError(
                f"{path.name} disagrees with the shards: it places {name} in {shard}, "
                "whose header does not have it."
            )


def _engram(name: str) -> re.Match[str] | None:
    return _NAME.fullmatch(name)


def match_tensors(
    config: EngramConfig, tensors: Mapping[str, TensorInfo]
) -> tuple[str, list[str]]:
    """Compare a checkpoint's Engram tensors with what its config wants.

    Args:
      config: The model's sizes.
      tensors: All tensors by name.

    Returns:
      The prefix of the names, and one sentence for each thing that does not fit.
    """
    found = {name: match for name in tensors if (match := _engram(name))}
    if not found:
        wanted = tensor_name("", config.layer_ids[0], "embed.weight")
        return "", [f"No tensor is named like {wanted}, with or without a prefix."]
    prefixes = sorted({match["prefix"] for match in found.values()})
    if len(prefixes) > 1:
        listed = ", ".join(repr(prefix) for prefix in prefixes)
        return prefixes[0], [
            f"Engram tensors have several prefixes ({listed}); all must have the same."
        ]
    (prefix,) = prefixes
    expected = {
        tensor_name(prefix, layer_id, part): wanted
        for layer_id, parts in expected_tensors(config).items()
        for part, wanted in parts.items()
    }
    problems = []
    for name, (dtype, shape) in expected.items():
        if name not in tensors:
            problems.append(f"{name} is missing; wanted: {dtype} {list(shape)}.")
            continue
        info = tensors[name]
        if info.dtype != dtype:
            problems.append(f"{name} has dtype {info.dtype}; wanted: {dtype}.")
        if info.shape != shape:
            problems.append(
                f"{name} has shape {list(info.shape)}; wanted: {list(shape)}."
            )
    # A tensor that nobody reads is as wrong as one that is missing.
    problems.extend(
        f"{name} is none of the Engram tensors of layers {list(config.layer_ids)}, "
        "which config.json lists."
        for name in found
        if name not in expected
    )
    return prefix, problems


def read_side_file(directory: Path) -> str | None:
    """Read the token map's fingerprint that ``engram.json`` pins.

    Args:
      directory: The checkpoint's directory.

    Returns:
      64 hexadecimal digits, or None where there is no such file.

    Raises:
      ValueError: The file is damaged.
    """
    path = directory / SIDE_FILE_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    digest = content.get("token_map_sha256") if isinstance(content, dict) else None
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(
            f"{path} gives token_map_sha256 as {digest!r}; it must be 64 lower-case "
            "hexadecimal digits."
        )
    return digest


def check_fingerprint(found: str, pinned: str | None, directory: Path) -> None:
    """Refuse a token map that is not the one a checkpoint was made with.

    Args:
      found: Fingerprint of the map at hand.
      pinned: What ``engram.json`` says, or None.
      directory: The checkpoint's directory, for the message.

    Raises:
      ValueError: The two differ.
    """
    if pinned is not None and found != pinned:
        raise ValueError(
            f"The token map's SHA-256 is {found}, but {directory / SIDE_FILE_NAME} "
            f"pins {pinned}: it comes from another tokenizer, and every row would be "
            "another. Use the tokenizer that the checkpoint was made with."
        )


def placement_bytes(config: EngramConfig, placement: Placement) -> dict[str, int]:
    """Compute the memory that loading a checkpoint takes.

    Args:
      config: The model's sizes.
      placement: Where the tables shall live.

    Returns:
      Bytes on the device (``"device"``) and in host memory beyond it (``"host"``): of
      each process, or of the node for ``"shared_host"``. A mapped file needs none; the
      kernel's page cache takes what is free.

    Example:
      >>> from pathlib import Path
      >>> v41 = EngramConfig(
      ...     layer_ids=(1, 14), num_embeddings=(384006168, 384016682),
      ...     max_ngram_size=4, vocab_base=16000000, n_heads=8, head_dim=256,
      ...     pad_token_id=2, hidden_size=5120, hc_mult=4, rms_norm_eps=1e-20,
      ...     vocab_size=129280)
      >>> placement_bytes(v41, "device")["device"] // 10**9
      203
    """
    tables = rest = 0
    for parts in expected_tensors(config).values():
        for part, (dtype, shape) in parts.items():
            nbytes = math.prod(shape) * (2 if dtype == "BF16" else 1)
            if part.startswith("embed."):
                tables += nbytes
            else:
                rest += nbytes
    on_device = placement == "device"
    in_host = placement in ("pinned_host", "host", "shared_host")
    return {
        "device": rest + (tables if on_device else 0),
        "host": tables if in_host else 0,
    }

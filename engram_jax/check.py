"""Say line by line whether a checkpoint fits: ``python -m engram_jax check DIR``."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from .checkpoint_files import (
    Placement,
    check_fingerprint,
    expected_tensors,
    find_tensors,
    match_tensors,
    placement_bytes,
    read_side_file,
    tensor_name,
)
from .config import EngramConfig
from .host_storage import available_host_memory
from .layout import EngramLayout
from .safetensors_file import TensorInfo
from .vocabulary import build_compressed_token_map, fingerprint


@dataclasses.dataclass(frozen=True)
class Finding:
    """Hold one line of the report.

    Attributes:
      topic: What was looked at.
      fits: True, False, or None where it could not be checked or only informs.
      text: What was found and, where it does not fit, what is wanted.
    """

    topic: str
    fits: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Hold everything that was found out about a checkpoint.

    Attributes:
      directory: The checkpoint's directory.
      findings: The lines, in the order in which things were looked at.
      memory: Bytes by placement and by where they are taken.
      token_map_sha256: The token map's fingerprint, if it could be made.
    """

    directory: str
    findings: tuple[Finding, ...]
    memory: dict[str, dict[str, int]]
    token_map_sha256: str | None

    @property
    def fits(self) -> bool:
        """Whether nothing was found that would keep the checkpoint from loading."""
        return all(finding.fits is not False for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as what ``--json`` prints."""
        return {"fits": self.fits} | dataclasses.asdict(self)


def check_checkpoint(directory: str | Path, tokenizer: Any = None) -> Report:
    """Look at a checkpoint's config, index, headers and tokenizer; read no tensor.

    Unlike `load_engram` this goes on after the first thing that does not fit.

    Args:
      directory: The checkpoint's directory.
      tokenizer: What `build_compressed_token_map` takes; None takes
        ``tokenizer.json`` in the directory, which may be missing.

    Returns:
      The report.
    """
    directory = Path(directory)
    findings: list[Finding] = []

    def attempt(topic: str, action: Callable[[], Any]) -> Any:
        """Return the action's result, or note why there is none."""
        try:
            return action()
        except (OSError, TypeError, ValueError) as error:
            findings.append(Finding(topic, False, str(error)))
            return None

    if not directory.is_dir():
        text = f"{directory} is no directory; give a checkpoint's"
        return Report(str(directory), (Finding("files", False, text),), {}, None)
    config = attempt("config", lambda: EngramConfig.from_pretrained(directory))
    if config is not None:
        findings.append(Finding("config", True, _describe(config)))
    tensors = attempt("files", lambda: find_tensors(directory))
    if tensors is not None:
        files = {info.path.name for info in tensors.values()}
        text = f"{len(tensors)} tensors in {len(files)} files; headers are sound"
        findings.append(Finding("files", True, text))
    if config is not None and tensors is not None:
        findings.extend(_check_tensors(config, tensors))

    size, digest = None, None
    source = tokenizer
    if source is None and (directory / "tokenizer.json").is_file():
        source = directory / "tokenizer.json"
    if source is None:
        text = (
            "no tokenizer.json here; pass --tokenizer to check one, and tokenizer= to "
            "load_engram"
        )
        findings.append(Finding("tokenizer", None, text))
    else:
        built = attempt("tokenizer", lambda: build_compressed_token_map(source))
        if built is not None:
            size, digest = built[1], fingerprint(built[0])
            findings.append(_check_tokenizer(config, len(built[0]), size))
    pinned = attempt("fingerprint", lambda: read_side_file(directory))
    if digest is not None:
        attempt("fingerprint", lambda: check_fingerprint(digest, pinned, directory))
        if pinned is None:
            text = f"{digest} (SHA-256 of the token map; no engram.json pins it)"
            findings.append(Finding("fingerprint", None, text))
        elif pinned == digest:
            text = f"{digest}, as engram.json pins it"
            findings.append(Finding("fingerprint", True, text))
    if config is not None:
        findings.extend(_check_layout(config, size))

    memory = {}
    if config is not None:
        memory = {name: placement_bytes(config, name) for name in get_args(Placement)}
        findings.extend(_describe_memory(memory))
    return Report(str(directory), tuple(findings), memory, digest)


def _describe(config: EngramConfig) -> str:
    return (
        f"Engram on layers {list(config.layer_ids)}, n-grams of 2 to "
        f"{config.max_ngram_size} tokens, {config.n_heads} heads each: "
        f"{config.n_hash_cols} rows of {config.head_dim} values a token and layer; "
        f"{config.hc_mult} streams of width {config.hidden_size}"
    )


def _check_tensors(
    config: EngramConfig, tensors: dict[str, TensorInfo]
) -> list[Finding]:
    prefix, problems = match_tensors(config, tensors)
    findings = []
    for layer_id, parts in expected_tensors(config).items():
        for part, (dtype, shape) in parts.items():
            name = tensor_name(prefix, layer_id, part)
            info = tensors.get(name)
            if info is not None and (info.dtype, info.shape) == (dtype, shape):
                text = f"{name}: {dtype} {list(shape)} in {info.path.name}"
                findings.append(Finding("tensor", True, text))
    findings.extend(Finding("tensor", False, problem) for problem in problems)
    return findings


def _check_tokenizer(config: EngramConfig | None, length: int, size: int) -> Finding:
    text = f"{length} token ids map to {size} compressed ids"
    if config is None:
        return Finding("tokenizer", None, text)
    stated = config.compressed_vocab_size
    if stated is not None and size != stated:
        wanted = f"; engram_compressed_vocab_size is {stated}: another tokenizer"
        return Finding("tokenizer", False, text + wanted)
    if config.pad_token_id >= length:
        wanted = f"; engram_pad_token_id {config.pad_token_id} is not among them"
        return Finding("tokenizer", False, text + wanted)
    if length != config.vocab_size:
        text += f" (vocab_size is {config.vocab_size})"
    return Finding("tokenizer", True, text)


def _check_layout(config: EngramConfig, size: int | None) -> list[Finding]:
    # The primes do not depend on the compressed size, which has its own line.
    known = config.compressed_vocab_size or size or 1
    try:
        layout = EngramLayout.from_config(config, known)
    except ValueError as error:
        return [Finding("layout", False, str(error))]
    findings = []
    for index, layer_id in enumerate(config.layer_ids):
        rows, needed = config.num_embeddings[index], layout.num_rows[index]
        primes = layout.primes[index]
        text = (
            f"layer {layer_id}: {rows} rows; its {layout.n_hash_cols} primes from "
            f"{primes.min()} to {primes.max()} need {needed}"
        )
        if rows > needed:
            text += f" ({rows - needed} rows of padding)"
        findings.append(Finding("layout", True, text))
    return findings


def _describe_memory(memory: dict[str, dict[str, int]]) -> list[Finding]:
    available = available_host_memory()
    findings = [
        Finding(
            "memory",
            None,
            f"{placement}: {taken['device'] / 1e9:.3f} GB on the device, "
            f"{taken['host'] / 1e9:.3f} GB of host memory for "
            + ("the node" if placement == "shared_host" else "each process"),
        )
        for placement, taken in memory.items()
    ]
    text = f"{available / 1e9:.3f} GB of host memory are available here"
    return [*findings, Finding("memory", None, text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments.

    Args:
      parser: The command's own parser.
    """
    parser.add_argument("directory", type=Path, help="the checkpoint's directory")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json; none: the checkpoint's own"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Check what the arguments name.

    Args:
      options: The parsed arguments.

    Returns:
      The report to print, and the exit code: 1 where something does not fit, else 0.
    """
    report = check_checkpoint(options.directory, options.tokenizer)
    code = 0 if report.fits else 1
    if options.json:
        return json.dumps(report.to_dict(), indent=1), code
    signs = {True: "ok   ", False: "WRONG", None: "     "}
    lines = [
        f"{signs[finding.fits]} {finding.topic:<11} {finding.text}"
        for finding in report.findings
    ]
    wrong = sum(finding.fits is False for finding in report.findings)
    verdict = f"{options.directory} fits."
    if wrong:
        things = "thing does" if wrong == 1 else "things do"
        verdict = f"{wrong} {things} not fit; {options.directory} cannot be loaded."
    return "\n".join([*lines, "", verdict]), code

"""Read the sizes of a model's Engram layers from its ``config.json``."""

import dataclasses
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUANT_BLOCK = 32
"""Number of values that share one E8M0 scale."""

MAX_TABLE_ROWS = 2**31 - 1
"""Largest number of rows that int32 row ids can address."""

_PUBLISHED_NAMES = {
    "layer_ids": "engram_layer_ids",
    "num_embeddings": "engram_num_embeddings",
    "max_ngram_size": "engram_max_ngram_size",
    "vocab_base": "engram_vocab_size",
    "n_heads": "engram_n_heads",
    "head_dim": "engram_head_dim",
    "pad_token_id": "engram_pad_token_id",
    "compressed_vocab_size": "engram_compressed_vocab_size",
    "hidden_size": "hidden_size",
    "hc_mult": "hc_mult",
    "rms_norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_SMALLEST = {
    "max_ngram_size": 2,
    "vocab_base": 1,
    "n_heads": 1,
    "head_dim": QUANT_BLOCK,
    "hidden_size": 1,
    "hc_mult": 1,
    "vocab_size": 1,
    "pad_token_id": 0,
}
_SMALLEST_NORMAL_FLOAT32, _ABOVE_FLOAT32 = 2.0**-126, 2.0**128


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """Hold the sizes of a model's Engram layers, checked when made.

    Field names are this library's; messages, `from_dict` and `to_dict` use the
    names that published ``config.json`` files use, given here in parentheses.

    Attributes:
      layer_ids: Decoder layers that have an Engram, counted from 0
        (``engram_layer_ids``).
      num_embeddings: Rows of each layer's table, in the order of `layer_ids`
        (``engram_num_embeddings``).
      max_ngram_size: Largest n-gram, in tokens; sizes 2 to this one are hashed
        (``engram_max_ngram_size``).
      vocab_base: Where the search for bucket counts starts (``engram_vocab_size``).
      n_heads: Hash heads per n-gram size (``engram_n_heads``).
      head_dim: Values of a table row (``engram_head_dim``).
      pad_token_id: Token that stands for places without a token, in the
        tokenizer's ids (``engram_pad_token_id``).
      hidden_size: Width of one residual stream (``hidden_size``).
      hc_mult: Residual streams (``hc_mult``).
      rms_norm_eps: Added to mean squares, above 0 (``rms_norm_eps``).
      vocab_size: Token ids of the model (``vocab_size``).
      compressed_vocab_size: Ids of the compressed vocabulary, or None where the
        token map decides (``engram_compressed_vocab_size``).

    Raises:
      TypeError: A field has another type than its own.
      ValueError: A field's value cannot work.

    Example:
      >>> config = EngramConfig.from_dict({
      ...     "engram_layer_ids": [1], "engram_num_embeddings": [60],
      ...     "engram_max_ngram_size": 3, "engram_vocab_size": 7,
      ...     "engram_n_heads": 2, "engram_head_dim": 32,
      ...     "engram_pad_token_id": 2, "hidden_size": 64, "hc_mult": 2,
      ...     "rms_norm_eps": 1e-20, "vocab_size": 100})
      >>> config.n_hash_cols, config.num_layers
      (4, 1)
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_base: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    hidden_size: int
    hc_mult: int
    rms_norm_eps: float
    vocab_size: int
    compressed_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in _PUBLISHED_NAMES:
            object.__setattr__(self, name, _typed(name, getattr(self, name)))
        for name, smallest in _SMALLEST.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(
                    f"{_label(name)} is {value}; it must be at least {smallest}."
                )
        self._check_layers()
        self._check_sizes()

    def _check_layers(self) -> None:
        ids, rows = self.layer_ids, self.num_embeddings
        if not ids:
            raise ValueError(f"{_label('layer_ids')} is empty: no layer has an Engram.")
        if len(ids) != len(rows):
            raise ValueError(
                f"{_label('num_embeddings')} has {len(rows)} entries for {len(ids)} "
                f"entries of {_label('layer_ids')}; give one row count per layer."
            )
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(
                f"{_label('layer_ids')} names layer {twice} more than once; a layer "
                "has at most one Engram."
            )
        if min(ids) < 0:
            raise ValueError(
                f"{_label('layer_ids')} holds {min(ids)}; decoder layers are counted "
                "from 0."
            )
        for layer_id, count in zip(ids, rows, strict=True):
            if not 1 <= count <= MAX_TABLE_ROWS:
                raise ValueError(
                    f"{_label('num_embeddings')} gives layer {layer_id} {count} rows; "
                    f"a table has 1 to {MAX_TABLE_ROWS} rows, since row ids are int32."
                )

    def _check_sizes(self) -> None:
        if self.head_dim % QUANT_BLOCK:
            raise ValueError(
                f"{_label('head_dim')} is {self.head_dim}; it must be a multiple of "
                f"{QUANT_BLOCK}, the number of values that share one scale."
            )
        if self.vocab_size > MAX_TABLE_ROWS:
            raise ValueError(
                f"{_label('vocab_size')} is {self.vocab_size}; token ids are int32, so "
                f"it must be at most {MAX_TABLE_ROWS}."
            )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"{_label('pad_token_id')} is {self.pad_token_id}, outside the "
                f"vocabulary of {self.vocab_size} ids (vocab_size)."
            )
        size = self.compressed_vocab_size
        if size is not None and not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"{_label('compressed_vocab_size')} is {size}; it must be between 1 "
                f"and vocab_size = {self.vocab_size}, since every compressed id stands "
                "for at least one token."
            )

    @property
    def n_hash_cols(self) -> int:
        """Count the hash columns of a token: one per n-gram size and head."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def num_layers(self) -> int:
        """Count the layers that have an Engram."""
        return len(self.layer_ids)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "EngramConfig":
        """Read the sizes from the contents of a ``config.json``.

        All fields come from one place: ``config["text_config"]`` if that names
        Engram layers, else the top level.

        Args:
          config: The parsed file.

        Returns:
          The checked config.

        Raises:
          TypeError: `config`, ``text_config`` or a field has the wrong type.
          ValueError: No layer has an Engram, a field is missing, or a value
            cannot work.

        Example:
          >>> EngramConfig.from_dict({"model_type": "llama"})
          Traceback (most recent call last):
          ValueError: The config has no Engram: engram_layer_ids is missing, null or \
empty, both at the top level and under text_config.
        """
        source = _engram_section(config)
        fields: dict[str, Any] = {}
        for name, published in _PUBLISHED_NAMES.items():
            value = source.get(published)
            if value is None and name != "compressed_vocab_size":
                raise ValueError(
                    f"The config has engram_layer_ids but {published} is missing or "
                    "null; an Engram model's config.json states it."
                )
            fields[name] = _typed(name, value)
        return cls(**fields)

    @classmethod
    def from_pretrained(cls, path_or_dir: str | os.PathLike[str]) -> "EngramConfig":
        """Read the sizes from a ``config.json`` or the directory that holds one.

        Args:
          path_or_dir: The file, or a model's directory.

        Returns:
          The checked config.

        Raises:
          FileNotFoundError: There is no such file.
          TypeError: A field has the wrong type.
          ValueError: The file is not JSON, or as in `from_dict`.
        """
        path = Path(path_or_dir)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; give a model's directory or its config.json."
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from error
        try:
            return cls.from_dict(config)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields under their published names, ready for JSON.

        Returns:
          A dict that `from_dict` turns into an equal config. It has no
          ``engram_compressed_vocab_size`` where that is None.
        """
        result: dict[str, Any] = {}
        for name, published in _PUBLISHED_NAMES.items():
            value = getattr(self, name)
            if value is not None:
                result[published] = list(value) if isinstance(value, tuple) else value
        return result


def _label(name: str) -> str:
    return _PUBLISHED_NAMES[name]


def _engram_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"The config is a {type(config).__name__}; it must be a JSON object."
        )
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise TypeError(
            f"text_config is a {type(text).__name__}; it must be a JSON object."
        )
    for section in (text, config):
        if section is not None and section.get("engram_layer_ids") not in (
            None,
            [],
            (),
        ):
            return section
    raise ValueError(
        "The config has no Engram: engram_layer_ids is missing, null or empty, both "
        "at the top level and under text_config."
    )


def _typed(name: str, value: Any) -> Any:
    """Return the value in the type of its field, or refuse it by name."""
    if name in ("layer_ids", "num_embeddings"):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise TypeError(
                f"{_label(name)} is {value!r}; it must be a list of integers."
            )
        return tuple(_integer(name, item) for item in value)
    if name == "rms_norm_eps":
        return _epsilon(value)
    if name == "compressed_vocab_size" and value is None:
        return None
    return _integer(name, value)


def _integer(name: str, value: Any) -> int:
    # bool is an int to Python, and JSON's true would pass for 1.
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{_label(name)} is {value!r}; it must be an integer.")


def _epsilon(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"rms_norm_eps is {value!r}; it must be a number.")
    try:
        # A Python float is weakly typed in JAX: a NumPy float64 would pull the
        # float32 gate to float64 where 64-bit types are on.
        eps = float(value)
    except TypeError as error:
        raise TypeError(f"rms_norm_eps is {value!r}; it must be a number.") from error
    except OverflowError:  # an integer beyond float64
        eps = math.inf
    if not _SMALLEST_NORMAL_FLOAT32 <= eps < _ABOVE_FLOAT32:
        raise ValueError(
            f"rms_norm_eps is {eps}; it must be a number from 2**-126 up that float32 "
            "holds, or the norm of an all-zero stream would be infinite in float32."
        )
    return eps

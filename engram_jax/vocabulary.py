"""Compress a tokenizer's vocabulary: tokens that read alike share one id."""

import hashlib
import logging
import os
import tempfile
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "ENGRAM_JAX_CACHE_DIR"
"""Environment variable that names the directory of cached token maps."""

_CACHE_FORMAT = "engram-token-map-1"
_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Stands for a lone space while blanks are stripped, so that it is not emptied.
_SPACE_STAND_IN = "\ue000"
_DIGEST_BYTES = hashlib.sha256().digest_size


def build_compressed_token_map(
    tokenizer: "Tokenizer | str | os.PathLike[str] | Any",
    *,
    allow_gaps: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[npt.NDArray[np.int32], int]:
    """Map every token id to the id of its normalised text.

    Each id is decoded alone. The text is normalised (NFKC, marks stripped, lower
    case, runs of blanks to one space, ends stripped) and ids whose results are
    equal share a compressed id; compressed ids are numbered in the order in which
    ids 0, 1, 2, .. first produce them. A token that is not valid UTF-8 by itself
    is its own key, and so is a text that normalises to nothing.

    Only the tokenizer's data is read; no code that comes with a model runs. The
    map is kept on disk, keyed by the whole serialised tokenizer and by the versions
    of the normaliser, so that another tokenizer never gets it.

    Cost: about 0.6 s for 129,280 ids; from the cache about 10 ms for a path and 70
    ms for a tokenizer object (which must be serialised first).

    Args:
      tokenizer: A ``tokenizers.Tokenizer``, a fast tokenizer of ``transformers``,
        or the path of a ``tokenizer.json`` or of the directory that holds it.
      allow_gaps: Whether ids without a token are allowed; they get the compressed
        id of the empty text.
      cache_dir: Directory of cached maps. None takes the one that the environment
        variable ``ENGRAM_JAX_CACHE_DIR`` names, else ``engram_jax`` in the user's
        cache directory. A cache that cannot be read or written is only logged.

    Returns:
      The map, int32 [V], and the size K of the compressed vocabulary (the largest
      compressed id plus one). V counts added tokens too.

    Raises:
      FileNotFoundError: There is no file at the path.
      TypeError: `tokenizer` is none of the above.
      ValueError: The file is no tokenizer, or the tokenizer has no tokens, or has
        ids without a token and `allow_gaps` is False.

    Example:
      >>> from tokenizers import Tokenizer, models
      >>> words = Tokenizer(models.WordLevel({"The": 0, "the": 1, "Café": 2}, "the"))
      >>> token_map, size = build_compressed_token_map(words)
      >>> token_map.tolist(), size
      ([0, 0, 1], 2)
    """
    if isinstance(tokenizer, str | os.PathLike):
        path = _tokenizer_file(Path(tokenizer))
        serialised = path.read_bytes()
        loaded = None
    else:
        path = None
        loaded = _rust_tokenizer(tokenizer)
        serialised = loaded.to_str().encode("utf-8")
    cache_file = _cache_file(serialised, allow_gaps, cache_dir)
    token_map = None if cache_file is None else _read_cache(cache_file)
    if token_map is None:
        if loaded is None:
            loaded = _parse_tokenizer(serialised, path)
        token_map = _compress(loaded, allow_gaps)
        if cache_file is not None:
            _write_cache(cache_file, token_map)
    return token_map, int(token_map.max()) + 1


def fingerprint(token_map: npt.ArrayLike) -> str:
    """Identify a token map by the SHA-256 of its int32 little-endian bytes.

    Two maps of one size can differ; every table row that a model learned belongs
    to one map only.

    Args:
      token_map: Compressed ids, [V].

    Returns:
      64 hexadecimal digits.

    Example:
      >>> fingerprint([0, 1, 1])[:16]
      '45adb8cb9992e0cb'
    """
    return hashlib.sha256(np.asarray(token_map).astype("<i4").tobytes()).hexdigest()


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a tokenizer.json or the directory that "
            "holds one."
        )
    return path


def _rust_tokenizer(tokenizer: Any) -> "Tokenizer":
    from tokenizers import Tokenizer

    # transformers' fast tokenizers wrap the Rust one; used as they are, they would
    # also clean up spaces while decoding.
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(inner, Tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; it must be a "
            "tokenizers.Tokenizer, a fast tokenizer of transformers, or the path of a "
            "tokenizer.json. Slow (pure Python) tokenizers are not supported."
        )
    return inner


def _parse_tokenizer(serialised: bytes, path: Path | None) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(serialised)
    except Exception as error:  # The Rust side raises bare Exception.
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error


def _compress(tokenizer: "Tokenizer", allow_gaps: bool) -> npt.NDArray[np.int32]:
    normalise = _normaliser()
    id_of_key: dict[str, int] = {}
    compressed: list[int] = []
    for token_id, text in enumerate(_decoded(tokenizer, allow_gaps)):
        if _REPLACEMENT_CHARACTER in text:
            # Part of a character's bytes: the text says nothing, the raw token does.
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalise(text) or text
        compressed.append(id_of_key.setdefault(key, len(id_of_key)))
    return np.array(compressed, np.int32)


def _decoded(tokenizer: "Tokenizer", allow_gaps: bool) -> list[str]:
    """Decode each id alone, once it is clear which ids there are."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size == 0:
        raise ValueError("The tokenizer has no tokens.")
    texts = tokenizer.decode_batch(
        [[i] for i in range(size)], skip_special_tokens=False
    )
    # An id without a token decodes to nothing. As many tokens as ids below `size`, so
    # one that lies beyond leaves a hole here.
    holes = (i for i, text in enumerate(texts) if not text)
    hole = next((i for i in holes if tokenizer.id_to_token(i) is None), None)
    if hole is None:
        return texts
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if not allow_gaps:
        raise ValueError(
            f"The tokenizer has {size} tokens but its largest id is {largest}: id "
            f"{hole} has no token. Pass allow_gaps=True if the model was trained so."
        )
    more = [[i] for i in range(size, largest + 1)]
    return texts + tokenizer.decode_batch(more, skip_special_tokens=False)


def _normaliser() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE_STAND_IN),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_STAND_IN, " "),
        ]
    ).normalize_str


def _cache_file(
    serialised: bytes, allow_gaps: bool, cache_dir: str | os.PathLike[str] | None
) -> Path | None:
    if cache_dir is None:
        cache_dir = os.environ.get(CACHE_DIR_VARIABLE) or _user_cache_dir()
    if cache_dir is None:
        return None
    versions = (
        _CACHE_FORMAT,
        _tokenizers_version(),
        unicodedata.unidata_version,
        f"allow_gaps={allow_gaps}",
    )
    digest = hashlib.sha256("\n".join(versions).encode() + b"\n" + serialised)
    return Path(cache_dir) / f"token_map_{digest.hexdigest()}.bin"


def _user_cache_dir() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "engram_jax"
    try:
        return Path.home() / ".cache" / "engram_jax"
    except RuntimeError as error:  # a container's user without an entry or $HOME
        _log.warning(
            "Token maps are not cached: %s Name a directory in %s.",
            error,
            CACHE_DIR_VARIABLE,
        )
        return None


def _tokenizers_version() -> str:
    from importlib import metadata

    return metadata.version("tokenizers")


def _read_cache(path: Path) -> npt.NDArray[np.int32] | None:
    """Read a cached map: its SHA-256, then its int32 values, little-endian."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("Ignoring the token map cache %s: %s", path, error)
        return None
    digest, values = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if not values or hashlib.sha256(values).digest() != digest:
        _log.warning("The token map cache %s is damaged; building the map anew.", path)
        return None
    return np.frombuffer(values, "<i4").astype(np.int32)


def _write_cache(path: Path, token_map: npt.NDArray[np.int32]) -> None:
    values = token_map.astype("<i4").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(values).digest() + values)
            # Readers see the whole file or none, also while several processes write.
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _log.warning("Cannot write the token map cache %s: %s", path, error)

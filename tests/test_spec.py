"""Specs that are right round-trip; specs that are wrong in twenty-odd ways each get one clear answer."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.errors import SpecError
from service.spec import MAX_SPEC_CHARACTERS, Spec, load_spec, parse_spec, require_kind

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))

GOOD: dict[str, Any] = {
    "scenario": "good",
    "model": {"preset": "deepseek-custom"},
    "train": {"seq_len": 1024, "per_device_batch": 2, "attention": "dot_product"},
    "mesh": {"topology": "v5p-8", "fsdp": 2, "context": 2},
    "moe": {"ragged_buffer_factor": 0.125, "dropless": {"token_chunks": 4}},
    "programs": ["candidate", "dropless"],
}

# path to change, value to set, path the problem must name, words its message must hold, words its legal part must hold
WRONG: dict[str, tuple[str, Any, str, str, str]] = {
    "unknown section": ("trian", {}, "trian", "did you mean train?", "train"),
    "unknown field": ("train.seq_length", 1, "train.seq_length", "did you mean seq_len?", "seq_len"),
    "unknown preset": ("model.preset", "deepseek-v3-671", "model.preset", "did you mean deepseek-v3-671b?", "tiny"),
    "unknown field of the model": ("model.mla.kv_rank", 4, "model.mla.kv_rank", "unknown field", "kv_lora_rank"),
    "unknown topology name": ("mesh.topology", "v5p-7", "mesh.topology", "names count cores", "v5p-512"),
    "not a TPU": ("mesh.topology", "h100-8", "mesh.topology", "not a TPU that can be mocked", "v5p"),
    "shape with too few dims": ("mesh.topology", "v5p:4x4", "mesh.topology", "has 2 dims; v5p has 3", "v5p:4x8x8"),
    "shape of half hosts": ("mesh.topology", "v5p:3x3x1", "mesh.topology", "not whole hosts", "v5p:4x8x8"),
    "axes against devices": ("mesh.fsdp", 4, "mesh", "multiply to 8 (fsdp 4 × context 2) and v5p-8 (2x2x1 chips) has 4 devices", "fsdp 2"),
    "data against slices": ("mesh.slices", 3, "mesh.data", "no multiple of 3 slices", "a multiple of 3"),
    "batch not whole": ("train.per_device_batch", 0.3, "train.per_device_batch", "1.2 sequences", "1/4"),
    "batch against its axes": (
        "train.per_device_batch",
        0.25,
        "train.per_device_batch",
        "does not divide over data × fsdp × expert = 2",
        "2",
    ),
    "sequence against context": ("train.seq_len", 1023, "train.seq_len", "2 ranks of the context axis", "a multiple of 2"),
    "sequence against load balance": ("train.seq_len", 1022, "train.seq_len", "2 × 2 = 4 chunks", "a multiple of 4"),
    "chunk against halo": (
        "train.seq_len",
        32,
        "train.seq_len",
        "halo of 9 tokens ((kernel_size - 1) × max_ngram) exceeds the 8",
        "36 positions",
    ),
    "heads against tensor": ("mesh.tensor", 3, "model.num_heads", "tensor 3 = 3 shards", "a multiple of 3"),
    "experts against expert": ("mesh.expert", 3, "mesh.expert", "16 experts do not divide over 3 ranks", "a divisor of 16"),
    "width against its axes": ("model.dim", 1026, "model.dim", "fsdp 2 × expert 1 × context 2 = 4 shards", "a multiple of 4"),
    "too many experts a token": (
        "model.experts.num_experts_per_token",
        17,
        "model.experts.num_experts_per_token",
        "17 of 16",
        "at most 16",
    ),
    "groups against experts": (
        "model.experts.num_groups",
        3,
        "model.experts.num_groups",
        "16 experts do not divide in 3",
        "a divisor of 16",
    ),
    "int32 row ids": ("model.engram.base_sizes", [2**28, 2**28], "model.engram.base_sizes", "beyond what int32 row ids", "sum to at most"),
    "int32 row ids by the primes alone": (
        "model.engram",
        {"base_sizes": [2, 2], "num_heads": 400_000},
        "model.engram.num_heads",
        "layer 1 has at least 2,147,",
        "fewer heads",
    ),
    "int32 row ids by the pads": (
        "model.engram",
        {"base_sizes": [2_147_483_629, 17], "num_heads": 1, "layers": [1], "head_dim": 4},
        "model.engram.base_sizes",
        "rows padded for 4 shards are 2,147,483,648",
        "fewer shards",
    ),
    "int32 row ids of tokens": (
        "train.seq_len",
        2**24 - 2**14,
        "train.seq_len",
        "2,145,386,496 row ids of the tokens of each data rank and the 3,625,086 rows",
        "more data ranks",
    ),
    "one base per order": (
        "model.engram.base_sizes",
        [251],
        "model.engram.base_sizes",
        "has 1 of the 2 entries that max_ngram 3 needs",
        "a list of 2, or max_ngram 2",
    ),
    "Engram layer twice": ("model.engram.layers", [1, 1], "model.engram.layers", "[1, 1] names a layer twice", "each layer once"),
    "Engram layer outside": ("model.engram.layers", [1, 6], "model.engram.layers", "names layers [6] of 6", "0 to 5"),
    "dense layers without width": ("model.mlp_dim", None, "model.mlp_dim", "1 dense layers need a width", "positive"),
    "MoE layers without experts": ("model.experts", None, "model.experts", "5 layers are MoE", "every layer dense"),
    "rope of odd width": ("model.mla.qk_rope_head_dim", 15, "model.mla.qk_rope_head_dim", "turns pairs", "even"),
    "striped with Engram": ("context.order", "striped", "context.order", "reads neighbours", "dual_chunk_swap"),
    "order without load balance": (
        "context",
        {"load_balance": False, "order": "dual_chunk_swap"},
        "context.order",
        "context.load_balance is false: the sequence lies in natural order",
        "auto",
    ),
    "striped without load balance": (
        "context",
        {"load_balance": False, "order": "striped"},
        "context.order",
        "load_balance is false",
        "auto",
    ),
    "token chunks": ("moe.dropless.token_chunks", 3, "moe.dropless.token_chunks", "2048 tokens on each device", "a divisor of 2048"),
    "vocabulary chunks": ("train.vocab_chunks", 3, "train.vocab_chunks", "512 positions on each device", "a divisor of 512"),
    "buffer factor": ("moe.ragged_buffer_factor", 0, "moe.ragged_buffer_factor", "0 is out of range", "a factor above 0 and at most 1,024"),
    "huge buffer factor": (
        "moe.ragged_buffer_factor",
        1e300,
        "moe.ragged_buffer_factor",
        "1e+300 is out of range",
        "-1 for the worst case",
    ),
    "dtype": ("train.dtype", "int8", "train.dtype", "'int8' is not one of", "'bfloat16' or 'float32'"),
    "negative": ("train.seq_len", -4, "train.seq_len", "-4 is out of range", "a whole number from 1 to 2,147,483,647"),
    "not a number": (
        "train.learning_rate",
        float("nan"),
        "train.learning_rate",
        "NaN is not a finite number",
        "above 0 and at most 1,000,000",
    ),
    "missing": ("train.seq_len", ..., "train.seq_len", "is missing", "a whole number from 1"),
    "remat name": ("train.remat", {"save": ["atention_out"]}, "train.remat.save", "did you mean attention_out?", "moe_out"),
    "program twice": ("programs", ["candidate", "candidate"], "programs", "names a program twice", "at most once"),
    "no program": ("programs", [], "programs", "has 0 entries", "a list of 1 to 2 entries, each 'candidate' or 'dropless'"),
    "name with spaces": ("scenario", "a b", "scenario", "characters a name cannot have", "at most 100 characters (letters, digits"),
    "no name": ("scenario", "\ud800", "scenario", "holds half a surrogate pair", "at most 100 characters"),
    "long name": ("scenario", "a" * 101, "scenario", "has 101 characters", "text of at most 100 characters"),
    "preset of another type": ("model.preset", ["tiny"], "model.preset", "no such preset", "tiny"),
    "null for a number": ("train.seq_len", None, "train.seq_len", "is null where a whole number belongs", "a whole number from 1"),
    "list for a number": ("train.seq_len", [4], "train.seq_len", "is a list where a whole number belongs", "a whole number from 1"),
    "fraction for a count": ("train.seq_len", 4096.0, "train.seq_len", "is 4096.0 where a whole number belongs", "; write 4096"),
    "number for a name": ("scenario", 7, "scenario", "is 7 where text belongs", 'write "7"'),
    "number for a mapping": ("compiler_options", 7, "compiler_options", "is 7 where a mapping belongs", "of at most 32 entries"),
    "nothing or a mapping": ("model.yarn", 7, "model.yarn", "is 7 where a mapping belongs", "null or a mapping with keys of: factor"),
    "option out of range": (
        "compiler_options",
        {"xla_tpu_max_hbm_size_mib": 2**31},
        "compiler_options.xla_tpu_max_hbm_size_mib",
        "2147483648 is not what",
        "a whole number from 0 to 2,147,483,647",
    ),
    "no topology": ("mesh.topology", ..., "mesh.topology", "is missing", "v5p-512"),
    "option that writes files": (
        "compiler_options",
        {"xla_dump_to": "x"},
        "compiler_options.xla_dump_to",
        "not an option a spec may set",
        "xla_tpu",
    ),
    "option of the wrong type": (
        "compiler_options",
        {"xla_tpu_max_hbm_size_mib": "9"},
        "compiler_options.xla_tpu_max_hbm_size_mib",
        "'9' is not what",
        "a whole number",
    ),
}


STEPS: dict[str, Any] = {
    "scenario": "good-steps",
    "model": {"preset": "deepseek-custom"},
    "train": {"seq_len": 128},
    "mesh": {"fsdp": 2, "expert": 2, "context": 2},
    "moe": {"ragged_buffer_factor": 0.5, "retry_when_tokens_dropped": True},
    "steps": {"devices": "cpu:8"},
}

WRONG_STEPS: dict[str, tuple[str, Any, str, str, str]] = {
    "unknown device": ("steps.devices", "rocm", "steps.devices", "'rocm' names no devices", "auto, gpu, tpu, or cpu:N"),
    "no device": ("steps.devices", "cpu:0", "steps.devices", "'cpu:0' names no devices", "N from 1 to 64"),
    "too many devices": ("steps.devices", "cpu:65", "steps.devices", "'cpu:65' names no devices", "N from 1 to 64"),
    "devices against axes": ("steps.devices", "cpu:4", "steps.devices", "asks for 4 devices and the mesh axes multiply to 8", "cpu:8"),
    "slices without topology": ("mesh.slices", 2, "mesh.slices", "the spec names none", "mesh.topology"),
    "wrong topology beside steps": ("mesh.topology", "v5p-7", "mesh.topology", "names count cores", "v5p-512"),
    "unknown field of steps": ("steps.num_step", 4, "steps.num_step", "did you mean num_steps?", "warmup_steps"),
    "no steps at all": (
        "steps.num_steps",
        0,
        "steps.num_steps",
        "0 is out of range",
        "a whole number from 1 to 10,000 (steps that are timed)",
    ),
    "unknown check": ("steps.checks", ["load_ballance"], "steps.checks.0", "is not one of the legal values", "load_balance"),
    "far look-ahead": ("steps.look_ahead", 2, "steps.look_ahead", "2 is out of range", "a whole number from 0 to 1"),
    "overflow without experts": ("steps.force_overflow", "small_factor", "steps.force_overflow", "no buffer to overflow", "none"),
    "overflow on one rank": ("mesh", {"fsdp": 8}, "steps.force_overflow", "all experts on one rank", "mesh.expert of 2"),
    "skew with room for it": ("moe.ragged_buffer_factor", 1.5, "steps.force_overflow", "sends it up to 2 times the mean", "at most 1,"),
    "skew of the worst case": ("moe.ragged_buffer_factor", -1, "steps.force_overflow", "ragged_buffer_factor -1 has room", "small_factor"),
    "steps section gone": ("steps", ..., "mesh.topology", "is missing", "v5p-512"),
}


def changed(path: str, value: Any, *, of: dict[str, Any] = GOOD) -> dict[str, Any]:
    spec = copy.deepcopy(of)
    *parents, last = path.split(".")
    section = spec
    for name in parents:
        section = section.setdefault(name, {})
    if value is ...:
        del section[last]
    else:
        section[last] = value
    return spec


def problems(data: Any) -> dict[str, tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    return {p.path: (p.message, p.legal) for p in caught.value.problems}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_spec_is_told_where_why_and_what_would_be_legal(name: str) -> None:
    path, value, where, message, legal = WRONG[name]
    found = problems(changed(path, value))
    assert where in found, found
    assert message in found[where][0]
    assert legal in found[where][1]


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_each_wrong_steps_spec_is_told_where_why_and_what_would_be_legal(name: str) -> None:
    path, value, where, message, legal = WRONG_STEPS[name]
    data = changed(path, value, of=STEPS)
    if name in ("overflow on one rank", "skew with room for it", "skew of the worst case"):
        data["steps"]["force_overflow"] = "skewed_router"
    if name == "overflow without experts":
        data["model"] |= {"experts": None, "first_num_dense_layers": 6}
    found = problems(data)
    assert where in found, found
    assert message in found[where][0]
    assert legal in found[where][1]


SCHEMA = Spec.model_json_schema()
PLACED = GOOD | {"model": GOOD["model"] | {"yarn": {}}, "steps": {}}
MISREAD: dict[str, tuple[Any, ...]] = {
    "integer": (True, False, "4", "yes", 4096.0, 4e3, 0.5, "0200", "1:30", float("inf"), None, [1], {}),
    "number": (True, False, "0.5", "on", float("nan"), 10**400, None, [1.0], {}),
    "boolean": (0, 1, 1.0, "yes", "true", "off", None, [True], {}),
    "string": (True, 1, 0.5, [], {}),
}
"""JSON type to values that a lax reader would take for one of it, or trip over."""


def fields_of(schema: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, str, bool]]:
    """Dotted path, JSON type and whether null is legal, of every field that is one value."""
    branches = schema.get("anyOf", [schema])
    chosen = next(branch for branch in branches if branch.get("type") != "null")
    chosen = SCHEMA["$defs"][chosen["$ref"].rpartition("/")[2]] if "$ref" in chosen else chosen
    for name, inner in chosen.get("properties", {}).items():
        yield from fields_of(inner, (*place, name))
    if chosen.get("type") in MISREAD:
        yield ".".join(place), chosen["type"], len(branches) > 1


@pytest.mark.parametrize(("path", "kind", "nullable"), [*fields_of(SCHEMA)])
def test_no_value_is_read_as_one_of_another_type(path: str, kind: str, nullable: bool) -> None:
    for value in MISREAD[kind]:
        if value is None and nullable:
            continue
        told = problems(changed(path, value, of=PLACED))
        message, legal = told[path]
        assert len(legal) > 4, value
        assert not re.search(r"input|valid\b|min_length|\b[gl][te]\b|as the message", f"{message} {legal}"), (message, legal)


def test_a_whole_number_stands_for_a_number_and_null_where_nothing_is_meant() -> None:
    spec = parse_spec(changed("train.learning_rate", 1, of=changed("train.moment_dtype", None)))
    assert (spec.train.learning_rate, spec.train.moment_dtype) == (1.0, None)
    assert type(spec.train.learning_rate) is float


def test_what_a_problem_shows_is_short_and_can_be_spelled_in_json() -> None:
    long = "x" * 5000
    wrong = [
        changed("train.seq_len", long),
        changed("train.seq_len", 10**400),
        changed("train.learning_rate", float("inf")),
        changed("mesh.topology", long),
        changed("model.preset", long),
        changed(f"train.{long}", 1),
        changed("train.remat", {"save": [long]}),
        changed("compiler_options", {long: [long]}),
        changed("programs", [long]),
    ]
    for data in wrong:
        with pytest.raises(SpecError) as caught:
            parse_spec(data)
        text = json.dumps([problem.as_dict() for problem in caught.value.problems], allow_nan=False)
        assert len(text) < 1200, text


def test_striped_is_refused_for_engram_even_where_no_rank_shares_the_sequence() -> None:
    data = changed("context.order", "striped")
    data["mesh"] |= {"fsdp": 4, "context": 1}
    assert list(problems(data)) == ["context.order"]
    data["model"]["engram"] = None
    assert parse_spec(data).context.order == "striped"


def test_an_order_is_refused_once() -> None:
    assert list(problems(changed("context", {"load_balance": False, "order": "striped"}))) == ["context.order"]


def test_a_router_without_a_bias_cannot_be_skewed() -> None:
    data = changed("steps.force_overflow", "skewed_router", of=STEPS)
    assert parse_spec(data).steps is not None
    data["model"]["experts"] = {"bias": False}
    assert "skewed through its bias" in problems(data)["steps.force_overflow"][0]


def test_a_steps_spec_needs_no_topology_and_a_compile_job_does() -> None:
    spec = parse_spec(STEPS)
    require_kind(spec, "steps")
    with pytest.raises(SpecError, match=r"mesh\.topology: is missing"):
        require_kind(spec, "compile")
    with pytest.raises(SpecError, match="steps: is missing"):
        require_kind(parse_spec(GOOD), "steps")
    require_kind(parse_spec(GOOD), "compile")


def test_a_steps_spec_survives_the_way_through_json_and_its_section_is_part_of_the_hash() -> None:
    spec = parse_spec(STEPS)
    assert parse_spec(spec.as_json()) == spec
    assert parse_spec(changed("steps.seed", 1, of=STEPS)).canonical_hash() != spec.canonical_hash()
    assert parse_spec(changed("scenario", ..., of=STEPS)).scenario == "deepseek-custom-cpu-8"


def test_everything_wrong_is_told_in_one_answer() -> None:
    data = changed("train.dtype", "int8")
    data["mesh"]["fsdp"] = 3
    data["model"]["engram"] = {"layers": [9]}
    data["compiler_options"] = {"xla_dump_to": "x"}
    data["extra"] = 1
    assert set(problems(data)) >= {"train.dtype", "mesh", "model.engram.layers", "compiler_options.xla_dump_to", "extra"}


def test_a_wrong_topology_is_told_beside_a_misspelt_axis() -> None:
    assert set(problems({**GOOD, "mesh": {"topology": "v5p-7", "fsdpp": 2}})) == {"mesh.topology", "mesh.fsdpp"}


def test_a_list_is_not_called_short_for_the_entries_that_were_refused() -> None:
    assert list(problems(changed("programs", ["candidat"]))) == ["programs.0"]


def test_a_word_where_a_section_belongs_is_told_what_the_section_holds() -> None:
    message, legal = problems(changed("train", 5))["train"]
    assert message == "is 5 where a mapping belongs"
    assert legal.startswith("a mapping with keys of: seq_len")


def test_an_unknown_preset_is_one_problem_not_one_per_missing_field() -> None:
    assert list(problems(changed("model.preset", "deepsek"))) == ["model.preset"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "line 1"),
        ("a: 1\na: 2", "'a' stands twice"),
        ("a: &x 1\nb: *x", "aliases are not taken"),
        ("a: &x {b: 1}\nc: {<<: *x}", "aliases are not taken"),
        ("1: 2", "key 1 is not a name"),
        ("- a", "this is list"),
        ("", "this is nothing"),
        ("a" * (MAX_SPEC_CHARACTERS + 1), "too long"),
    ],
)
def test_text_that_is_no_spec_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_spec_that_survives_the_way_through_json(path: Path) -> None:
    spec = load_spec(path.read_text())
    again = parse_spec(spec.as_json())
    assert again == spec
    assert again.canonical_hash() == spec.canonical_hash()
    assert spec.scenario == path.stem


def test_the_hash_is_of_what_is_weighed_not_of_how_it_was_written() -> None:
    spec = parse_spec(GOOD)
    assert parse_spec(changed("scenario", "other")).canonical_hash() == spec.canonical_hash()
    assert parse_spec(changed("mesh.topology", "v5p:2x2x1")).canonical_hash() == spec.canonical_hash()
    assert parse_spec(changed("programs", ["dropless", "candidate"])).canonical_hash() == spec.canonical_hash()
    assert parse_spec(changed("train.seq_len", 2048)).canonical_hash() != spec.canonical_hash()
    batches = [parse_spec(changed("train.per_device_batch", value)).canonical_hash() for value in (1, 1.0, ...)]
    assert len(set(batches)) == 1


def test_an_override_changes_only_its_field() -> None:
    plain, spec = parse_spec(GOOD), parse_spec(changed("model.mtp", {"depth": 1}))
    assert spec.model.mtp.depth == 1
    assert spec.model.mtp.loss_weight == plain.model.mtp.loss_weight
    assert spec.model.model_copy(update={"mtp": plain.model.mtp}) == plain.model


def test_the_global_batch_counts_devices_and_may_come_from_a_fraction() -> None:
    assert parse_spec(GOOD).step_config().global_batch == 8
    assert parse_spec(changed("train.per_device_batch", 0.5)).step_config().global_batch == 2


def test_checking_a_spec_loads_no_jax_nor_what_a_client_has_not_installed() -> None:
    code = (
        f"import sys; from service.spec import load_spec; load_spec({yaml.safe_dump(GOOD)!r}); "
        "print([name for name in sorted(sys.modules) if name.partition('.')[0] in ('jax', 'jaxlib', 'flax', 'libtpu', 'numpy')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_scenario_is_named_after_preset_and_topology_when_none_is_given() -> None:
    assert parse_spec(changed("scenario", ...)).scenario == "deepseek-custom-v5p-8"
    assert Spec.model_fields["scenario"].is_required()

"""The schema by which dumps are read is the compiler's own, field by field."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib
import pytest
from google.protobuf import descriptor_pb2

from service.compile.dump import SCHEMA, parse_dump, schema_fields
from service.compile.memory import _ALLOC, _FREE, _SHARE_WITH
from service.compile.shapes import OPAQUE, PRIMITIVE_TYPES, TOKEN, TUPLE
from service.errors import AnalysisError

FILES = ("xla/service/hlo.proto", "xla/xla_data.proto")


@cache
def embedded_files() -> dict[str, Any]:
    """The file descriptors of hlo.proto and xla_data.proto that are embedded in jaxlib's shared library."""
    library = (Path(jaxlib.__file__).parent / "libjax_common.so").read_bytes()
    return {name: _embedded(library, name) for name in FILES}


def _embedded(library: bytes, name: str) -> Any:
    """A serialised file descriptor begins with its own name; it ends where no field of FileDescriptorProto follows."""
    start = library.index(b"\x0a" + bytes([len(name)]) + name.encode())
    numbers = {field.number for field in descriptor_pb2.FileDescriptorProto.DESCRIPTOR.fields}
    position = start
    while True:
        tag, at = _varint(library, position)
        if tag >> 3 not in numbers or tag & 7 not in (0, 2):
            return descriptor_pb2.FileDescriptorProto.FromString(library[start:position])
        length, at = _varint(library, at)
        position = at + length if tag & 7 == 2 else at


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def compiler_messages() -> dict[str, Any]:
    """Message name to descriptor; a nested message goes by its own name, as in the schema."""
    found: dict[str, Any] = {}

    def add(message: Any) -> None:
        found.setdefault(message.name, message)
        for nested in message.nested_type:
            add(nested)

    for file in embedded_files().values():
        for message in file.message_type:
            add(message)
    return found


@pytest.mark.parametrize("name", SCHEMA)
def test_schema_has_the_compilers_field_numbers_and_types(name: str) -> None:
    scalar = {
        descriptor_pb2.FieldDescriptorProto.TYPE_INT32: "int32",
        descriptor_pb2.FieldDescriptorProto.TYPE_INT64: "int64",
        descriptor_pb2.FieldDescriptorProto.TYPE_UINT32: "uint32",
        descriptor_pb2.FieldDescriptorProto.TYPE_UINT64: "uint64",
        descriptor_pb2.FieldDescriptorProto.TYPE_BOOL: "bool",
        descriptor_pb2.FieldDescriptorProto.TYPE_STRING: "string",
        descriptor_pb2.FieldDescriptorProto.TYPE_BYTES: "bytes",
        descriptor_pb2.FieldDescriptorProto.TYPE_ENUM: "int32",
    }
    theirs = {field.number: field for field in compiler_messages()[name].field}
    for number, field_name, kind, repeated in schema_fields(name):
        field = theirs[number]
        is_repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
        described = scalar.get(field.type) or field.type_name.rsplit(".", 1)[-1]
        assert (field.name, described, is_repeated) == (field_name, kind, repeated)


def test_every_field_of_the_schema_is_read() -> None:
    package = Path(__file__).parents[2] / "service" / "compile"
    read = {name for path in package.glob("*.py") for name in re.findall(r"\.([a-z_0-9]+)\b", path.read_text())}
    assert {(message, name) for message in SCHEMA for _, name, _, _ in schema_fields(message) if name not in read} == set()


def _enum(message: str | None, name: str) -> dict[str, int]:
    owner = compiler_messages()[message] if message else embedded_files()["xla/xla_data.proto"]
    return {value.name: value.number for value in next(enum for enum in owner.enum_type if enum.name == name).value}


def test_primitive_types_are_the_compilers() -> None:
    theirs = {number: name.lower() for name, number in _enum(None, "PrimitiveType").items()}
    for number, (name, _) in PRIMITIVE_TYPES.items():
        assert theirs[number] == name
    assert (theirs[TUPLE], theirs[OPAQUE], theirs[TOKEN]) == ("tuple", "opaque_type", "token")
    missing = set(theirs) - set(PRIMITIVE_TYPES) - {0, TUPLE, OPAQUE, TOKEN}
    assert {theirs[number] for number in missing} <= {"buffer"}


def test_heap_event_kinds_are_the_compilers() -> None:
    assert _enum("Event", "Kind") == {"ALLOC": _ALLOC, "FREE": _FREE, "SHARE_WITH": _SHARE_WITH}


@pytest.mark.parametrize(
    ("dump", "reason"),
    [
        (b"", "holds no HLO module"),
        (b"\xff\xff\xff", "truncated or corrupted"),
        (b'{"peak": 1}', "truncated or corrupted"),
        (b"\x0a\x04\x0a\x02ab", "holds no HLO module"),
        (b"\x0a\x04\x1a\x02\x0a\x00", "holds no buffer assignment"),
    ],
)
def test_bytes_that_are_no_dump_are_refused_with_the_reason(dump: bytes, reason: str) -> None:
    with pytest.raises(AnalysisError, match=reason):
        parse_dump(dump)

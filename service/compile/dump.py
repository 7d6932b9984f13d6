"""Parses the compiler's dump (`*.after_optimizations.hlo.pb`, an `xla.HloProto`) with a schema of only the fields that are read here.

The schema is data: one line per message, `number name type`, where a type ending in `*` is repeated and a capital letter names another
message of the table. Field numbers are those of xla/service/hlo.proto and xla/xla_data.proto; tests/compile/test_dump.py holds each
against the descriptors embedded in jaxlib's shared library. Parsing is google.protobuf's own, compiled code; fields that are not named
here are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from service.errors import AnalysisError

SCHEMA: Mapping[str, str] = {
    "HloProto": "1 hlo_module HloModuleProto, 3 buffer_assignment BufferAssignmentProto",
    "HloModuleProto": (
        "1 name string, 6 entry_computation_id int64, 3 computations HloComputationProto*, 8 input_output_alias HloInputOutputAliasProto,"
        " 14 spmd_parameters_shardings OpSharding*, 17 stack_frame_index StackFrameIndexProto"
    ),
    "HloComputationProto": "1 name string, 2 instructions HloInstructionProto*, 5 id int64, 6 root_id int64",
    "HloInstructionProto": (
        "1 name string, 2 opcode string, 3 shape ShapeProto, 7 metadata OpMetadata, 8 literal LiteralProto, 9 parameter_number int64,"
        " 13 tuple_index int64, 26 channel_id int64, 63 comparison_direction string, 35 id int64, 36 operand_ids int64*,"
        " 38 called_computation_ids int64*, 43 backend_config bytes, 47 is_host_transfer bool, 49 replica_groups ReplicaGroup*,"
        " 52 source_target_pairs SourceTarget*, 68 frontend_attributes FrontendAttributes,"
        " 87 collective_device_list CollectiveDeviceListProto, 92 iota_collective_device_list IotaReplicaGroupListProto,"
        " 93 mesh_axes_replica_group_list MeshAxesReplicaGroupListProto"
    ),
    "HloInputOutputAliasProto": "1 entries AliasEntryProto*",
    "AliasEntryProto": "2 parameter_number int64, 3 parameter_shape_index int64*",
    "StackFrameIndexProto": "1 file_names string*, 3 file_locations FileLocation*, 4 stack_frames StackFrame*",
    "FileLocation": "1 file_name_id int32, 3 line int32",
    "StackFrame": "1 file_location_id int32, 2 parent_frame_id int32",
    "ShapeProto": "2 element_type int32, 3 dimensions int64*, 4 tuple_shapes ShapeProto*, 5 layout LayoutProto",
    "LayoutProto": (
        "1 minor_to_major int64*, 6 tiles TileProto*, 16 tail_padding_alignment_in_elements int64, 7 element_size_in_bits int64,"
        " 8 memory_space int64"
    ),
    "TileProto": "1 dimensions int64*",
    "OpMetadata": "2 op_name string, 15 stack_frame_id int32",
    "LiteralProto": "1 shape ShapeProto, 4 s32s int32*, 5 s64s int64*, 6 u32s uint32*, 7 u64s uint64*",
    "ReplicaGroup": "1 replica_ids int64*",
    "SourceTarget": "1 source int64, 2 target int64",
    "FrontendAttributes": "1 map MapEntry*",
    "MapEntry": "1 key string, 2 value string",
    "CollectiveDeviceListProto": "1 replica_groups ReplicaGroup*",
    "IotaReplicaGroupListProto": (
        "1 num_replica_groups int64, 2 num_devices_per_group int64, 3 iota_reshape_dims int64*, 4 iota_transpose_perm int32*"
    ),
    "MeshAxesReplicaGroupListProto": "1 mesh MeshProto, 2 axes AxisRefProto*",
    "MeshProto": "1 axes MeshAxis*, 2 device_ids int64*, 3 iota_transform IotaTransform",
    "MeshAxis": "1 name string, 2 size int64",
    "IotaTransform": "1 reshape_dims int64*, 2 transpose_perm int64*",
    "OpSharding": "1 type int32, 3 tile_assignment_dimensions int64*, 14 named_sharding NamedShardingProto",
    "NamedShardingProto": "2 mesh MeshProto, 3 dim_shardings DimensionSharding*",
    "DimensionSharding": "1 axes AxisRefProto*",
    "AxisRefProto": "1 mesh_axis_index int64, 2 sub_axis_info SubAxis",
    "SubAxis": "1 pre_size int64, 2 size int64",
    "BufferAssignmentProto": (
        "1 logical_buffers LogicalBufferProto*, 3 buffer_allocations BufferAllocationProto*, 4 heap_simulator_traces HeapSimulatorTrace*"
    ),
    "LogicalBufferProto": "1 id int64, 2 size int64, 3 defined_at Location, 4 color int64",
    "Location": "4 instruction_id int64, 3 shape_index int64*",
    "BufferAllocationProto": (
        "1 index int64, 2 size int64, 3 is_thread_local bool, 5 is_entry_computation_parameter bool, 12 is_constant bool,"
        " 6 parameter_number int64, 10 parameter_shape_index int64*, 13 is_parameter_aliased_with_output bool, 7 maybe_live_out bool,"
        " 8 color int64, 9 assigned Assigned*"
    ),
    "Assigned": "1 logical_buffer_id int64, 2 offset int64, 3 size int64",
    "HeapSimulatorTrace": "1 events Event*, 3 buffer_allocation_index int64",
    "Event": "1 kind int32, 2 buffer_id int64, 3 computation_name string, 4 instruction_name string, 5 share_with_canonical_id int64",
}
"""Message to its fields. Enums are read as int32, which is how they are encoded."""

_SCALARS = {
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}


_MODULE_TAG = b"\x0a"
"""Field 1 of an `HloProto`, of wire type 2: length-delimited."""


def schema_fields(message_name: str) -> list[tuple[int, str, str, bool]]:
    """The (number, name, type without `*`, repeated) of each field that is read of one message."""
    fields = []
    for line in SCHEMA[message_name].split(","):
        number, name, kind = line.split()
        fields.append((int(number), name, kind.removesuffix("*"), kind.endswith("*")))
    return fields


@cache
def hlo_proto_class() -> type[Any]:
    """The message class of an `xla.HloProto` with the schema's fields."""
    file = descriptor_pb2.FileDescriptorProto(name="weighbridge/hlo.proto", package="weighbridge", syntax="proto3")
    for message_name in SCHEMA:
        described = file.message_type.add(name=message_name)
        for number, name, kind, repeated in schema_fields(message_name):
            field = described.field.add(name=name, number=number)
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = field.TYPE_MESSAGE, f".weighbridge.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("weighbridge.HloProto"))


def parse_dump(dump: bytes) -> Any:
    """The `HloProto` message in `dump`, with both the module and its buffer assignment present.

    Raises:
        AnalysisError: the bytes are truncated or corrupted, or the buffer assignment is missing (a dump of another stage).
    """
    try:
        proto = hlo_proto_class().FromString(dump)
    except (message.DecodeError, RecursionError) as error:
        raise AnalysisError(
            f"the dump of {len(dump)} bytes is not a complete HloProto ({error}); it was truncated or corrupted: compile again"
        ) from None
    if not proto.hlo_module.computations:
        raise AnalysisError(f"the dump of {len(dump)} bytes holds no HLO module; give the *.after_optimizations.hlo.pb of a finished dump")
    if not proto.buffer_assignment.buffer_allocations:
        raise AnalysisError(
            f"the dump of {len(dump)} bytes holds no buffer assignment; give the *.after_optimizations.hlo.pb, written after it was made"
        )
    return proto


def module_size(dump: bytes) -> int:
    """Bytes that a serialised `HloProto` begins with its module in, tag and length included; 0 where it does not begin with one."""
    if dump[:1] != _MODULE_TAG:
        return 0
    length = 0
    for position, byte in enumerate(dump[1:11], start=1):
        length |= (byte & 0x7F) << 7 * (position - 1)
        if byte < 0x80:
            return position + 1 + length
    return 0


def check_copy(dump: bytes, copy: bytes) -> None:
    """Hold the module in `dump` against the same module as the compiler wrote it once more, in a file of its own.

    Collectives, trip counts and scopes stand in the dump once, and protobuf has no checksum: nothing else tells a damaged byte there. The
    compiler serialises a module alike each time, so the copy is the first bytes of the dump (tests/compile/test_fuzz.py).

    Raises:
        AnalysisError: they differ, or one of them is incomplete.
    """
    size = module_size(dump)
    if 0 < size == len(copy) and dump.startswith(copy):
        return
    equal = next((index for index, (ours, theirs) in enumerate(zip(dump, copy, strict=False)) if ours != theirs), min(len(dump), len(copy)))
    raise AnalysisError(
        f"the module in the dump ({size} bytes) and the compiler's second copy of it ({len(copy)} bytes) part at byte {equal}:"
        " one of them is damaged or incomplete; compile again"
    )

"""Turns what is alive at a point of the timeline into the report's buffers, and all lifetimes into an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.compile.attribution import Attribution, Attributor
from service.compile.hlo import Program
from service.compile.memory import Lifetime, MemoryDump
from service.compile.shapes import dtype_name, layout_text, logical_bytes, shape_at
from service.records import Buffer

MAX_BUFFERS = 200
_SOURCE_ROOT = "service/models/"
_LIFETIME_COLUMNS = ("name", "class", "module", "phase", "dtype", "shape", "bytes", "start_index", "end_index")


@dataclass(frozen=True, slots=True)
class AttributedBuffer:
    """A buffer's stay and what it is."""

    life: Lifetime
    what: Attribution


class BufferBook:
    """The buffers of one program, described as they are asked for."""

    def __init__(self, program: Program, memory: MemoryDump, attributor: Attributor) -> None:
        self._program = program
        self._memory = memory
        self._attributor = attributor
        self._known: dict[int, Attribution] = {}

    def alive_at(self, index: int) -> list[AttributedBuffer]:
        """The buffers alive at a timeline index, largest first."""
        return [AttributedBuffer(life, self._attribution(life)) for life in self._memory.alive_at(index)]

    def _attribution(self, life: Lifetime) -> Attribution:
        if id(life) not in self._known:
            self._known[id(life)] = self._attributor.attribute(life)
        return self._known[id(life)]

    def record(self, buffer: AttributedBuffer) -> Buffer:
        """The buffer as the report shows it."""
        life, what = buffer.life, buffer.what
        return Buffer(
            name=self._name(life),
            class_=what.buffer_class,
            module=what.module,
            module_inferred=what.module_inferred,
            phase=what.phase,
            **self._form(life),
            padded_bytes=life.size,
            scope=what.op_name,
            source=self._source(life),
            start_index=life.start,
            end_index=life.end,
        )

    def _form(self, life: Lifetime) -> dict[str, Any]:
        """Type, shape, layout and logical bytes; a pool has none of its own."""
        if self._memory.is_pool(life):
            return {"dtype": "mixed", "shape": (), "layout": "", "logical_bytes": None}
        shape = self._shape(life)
        return {
            "dtype": dtype_name(shape),
            "shape": tuple(shape.dimensions),
            "layout": layout_text(shape),
            "logical_bytes": logical_bytes(shape),
        }

    def padding_bytes(self, life: Lifetime) -> int:
        """Bytes of a buffer that tile padding takes; 0 where its shape has no elements to count."""
        logical = self._form(life)["logical_bytes"]
        return 0 if logical is None else life.size - logical

    def lifetimes_json(self) -> bytes:
        """Every HBM buffer's stay, so that any point of the timeline can be opened: a JSON table of columns and rows."""
        rows = []
        for life in self._memory.lifetimes:
            what, form = self._attribution(life), self._form(life)
            described = (self._name(life), what.buffer_class, what.module, what.phase, form["dtype"], list(form["shape"]))
            rows.append([*described, life.size, life.start, life.end])
        table = {"num_points": len(self._memory.usage), "columns": _LIFETIME_COLUMNS, "rows": rows}
        return json.dumps(table, separators=(",", ":")).encode()

    def _shape(self, life: Lifetime):  # type: ignore[no-untyped-def]  # a protobuf message has no static type
        buffer = self._memory.buffers[life.buffer_id]
        return shape_at(self._program.instructions[buffer.instruction_id].shape, buffer.shape_index)

    def _name(self, life: Lifetime) -> str:
        if self._memory.is_pool(life):
            return f"allocation {life.allocation} of {1 + len(life.shared_ids)} values"
        buffer = self._memory.buffers[life.buffer_id]
        name = self._program.instructions[buffer.instruction_id].name
        return name + "".join(f"{{{position}}}" for position in buffer.shape_index)

    def _source(self, life: Lifetime) -> str | None:
        """file:line inside the model, of the first of these values that has one; outside a model, of the innermost frame."""
        if self._memory.allocations[life.allocation].parameter is not None or self._memory.is_pool(life):
            # An argument's frames are those of whoever called jit.
            return None
        outside: str | None = None
        for buffer_id in (life.buffer_id, *life.shared_ids):
            instruction = self._program.instructions[self._memory.buffers[buffer_id].instruction_id]
            frames = self._program.frames_of(instruction)
            for frame in frames:
                if _SOURCE_ROOT in frame:
                    return frame[frame.rindex(_SOURCE_ROOT) :]
            if frames and outside is None:
                # Two folders are enough to find the file, and do not tell where the checkout lies.
                outside = "/".join(frames[0].split("/")[-3:])
        return outside


def sum_by(buffers: Iterable[AttributedBuffer]) -> tuple[dict[str, int], dict[str, int]]:
    """(class to bytes, module to bytes), largest first."""
    classes: dict[str, int] = {}
    modules: dict[str, int] = {}
    for buffer in buffers:
        classes[buffer.what.buffer_class] = classes.get(buffer.what.buffer_class, 0) + buffer.life.size
        modules[buffer.what.module] = modules.get(buffer.what.module, 0) + buffer.life.size
    return _largest_first(classes), _largest_first(modules)


def _largest_first(sums: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))

"""The JSON that `weighbridge compile --json` prints and `--out` saves, how it is read again, and the exit code it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.records import FailureKind, Pair, Report, ReportStatus
from service.verdict_text import governing
from weighbridge.exits import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_FITS, EXIT_TIMED_OUT

_SEVERITY = (ReportStatus.FAILED, ReportStatus.DOES_NOT_FIT, ReportStatus.UNKNOWN, ReportStatus.OK)


class DocumentError(ValueError):
    """A file that is not a saved report; says which, and why."""


def exit_code(reports: Mapping[str, Report], pair: Pair | None = None) -> int:
    """The exit code of a spec's reports: the worst of its programs, and of the pair where each program fits alone.

    A program that is too close to tell counts as not answered.
    """
    if any(report.failure is not None and report.failure.kind == FailureKind.KILLED_WALL for report in reports.values()):
        return EXIT_TIMED_OUT
    codes = {
        ReportStatus.FAILED: EXIT_FAILED,
        ReportStatus.DOES_NOT_FIT: EXIT_DOES_NOT_FIT,
        ReportStatus.UNKNOWN: EXIT_FAILED,
        ReportStatus.OK: EXIT_FITS,
    }
    code = codes[worst_status(reports)]
    return EXIT_DOES_NOT_FIT if code == EXIT_FITS and pair is not None and pair.fits is False else code


def worst_status(reports: Mapping[str, Report]) -> ReportStatus:
    """Failed before does_not_fit before unknown before ok."""
    return min((report.status for report in reports.values()), key=_SEVERITY.index)


def document(reports: Mapping[str, Report], pair: Pair | None, spec: Mapping[str, Any]) -> dict[str, Any]:
    """One program: its report. Several: the figures of the one that decides, every report by name, and the pair's. The spec comes last."""
    if len(reports) == 1:
        return next(iter(reports.values())).model_dump(mode="json") | {"spec": dict(spec)}
    decides = governing(tuple(reports.values()))
    assert decides is not None
    plain = decides.model_dump(mode="json")
    shared = ("report_schema", "depth", "topology", "num_devices", "num_parameters", "toolchain")
    return {
        "status": worst_status(reports).value,
        **{name: value for name, value in plain.items() if name.endswith("_bytes")},
        "governing_program": decides.program,
        **{name: plain[name] for name in shared},
        "programs": {name: report.model_dump(mode="json") for name, report in reports.items()},
        "pair": None if pair is None else pair.model_dump(mode="json"),
        "spec": dict(spec),
    }


def to_json(content: Mapping[str, Any]) -> str:
    """Indented JSON with a newline at its end."""
    return json.dumps(content, indent=2) + "\n"


def read_document(path: Path) -> tuple[dict[str, Report], dict[str, Any] | None]:
    """The reports in a saved document, by program, and the spec they are of where the document holds it.

    Raises:
        DocumentError: the file cannot be read, is not JSON, or holds no report of this version.
    """
    try:
        content = json.loads(path.read_text())
        spec = content.pop("spec", None)
        programs = content["programs"].values() if "programs" in content else [content]
        reports = [Report.model_validate(program) for program in programs]
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path} is not JSON: {error}; give what `weighbridge compile --out FILE` saved") from error
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        raise DocumentError(f"{path} holds no report that this version reads; give what `weighbridge compile --out FILE` saved") from error
    return {report.program: report for report in reports}, spec

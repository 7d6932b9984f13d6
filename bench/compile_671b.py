"""How long `weighbridge compile` takes to the exact peak of DeepSeek-V3 671B, cold, beside the whole compile of the same spec.

    ./dev bench compile_671b                   # both examples at depth memory, three runs each; a minute on an idle machine of two cores
    ./dev bench compile_671b --full            # also --depth full, with byte equality: 5 to 10 minutes more for each example
    ./dev bench compile_671b --depths-of-model # also 8 layers against 61

Each run is a new process with an empty data directory, so that nothing is remembered from one to the next, the chip's capacity included.
`answer` is the wall time of the whole command: interpreter start, tracing, compiling, analysis, printing. `rss` is the largest resident
memory of the compiling process. Run it on an idle machine: the load stands above the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
SPECS = ("deepseek-v3-671b-v5p-512", "deepseek-v3-671b-v5p-256")
TARGET_SECONDS = 12.5
"""What an idle machine of two cores must not exceed to the exact peak."""
PEER_SECONDS = {"deepseek-v3-671b-v5p-256": 151.0}
"""MaxText's train_compile of August 2026 on the same kind of machine, idle, dot_product, its best."""
TARGET_DEPTH_RATIO = 1.3
ANALYSIS_SECONDS = 2.0
LAG_RATIO, LAG_SECONDS = 1.2, 1.0
"""The report may come this much later than the buffer assignment, whichever is more."""
COMPARED = ("status", "peak_bytes", "allocated_bytes", "argument_bytes", "alias_bytes", "output_bytes", "temp_bytes")
GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """One command, and what it reported of the program that needs most."""

    answer_seconds: float
    report: dict[str, Any]
    peaks: dict[str, int]
    """Program to its peak bytes."""

    @property
    def rss_bytes(self) -> int:
        return int(self.report["child_peak_rss_bytes"])


def weigh(spec: Path, *options: str) -> Run:
    """Run the command as a person at a shell would, in a directory where nothing has been remembered."""
    with tempfile.TemporaryDirectory() as data_dir:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", "from weighbridge.cli import main; main()", "compile", str(spec), "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"WEIGHBRIDGE_DATA_DIR": data_dir},
            check=False,
        )
        seconds = time.monotonic() - started
    document = json.loads(done.stdout)
    reports = document.get("programs") or {document["program"]: document}
    for report in reports.values():
        if report["status"] == "failed":
            raise SystemExit(f"{spec.name}: {report['failure']['kind']}: {report['failure']['message']}")
    most = max(reports.values(), key=lambda report: report["allocated_bytes"])
    return Run(seconds, most, {name: report["peak_bytes"] for name, report in reports.items()})


def show(label: str, runs: list[Run]) -> Run:
    """Print a row of medians; returns the run with the median answer."""
    median = sorted(runs, key=lambda run: run.answer_seconds)[len(runs) // 2]
    phases = " ".join(
        f"{name.removesuffix('_seconds')} {seconds:.1f}"
        for name, seconds in median.report["timings"].items()
        if seconds is not None and name != "total_seconds"
    )
    print(
        f"{label:<40} {median.answer_seconds:8.1f} s"
        f" {max(run.rss_bytes for run in runs) / GIB:6.2f} GiB {median.report['peak_bytes']:>15,} B   {phases}",
        flush=True,
    )
    return median


def show_lag(run: Run, *, analysis_target_seconds: float) -> None:
    """Print how long after the buffer assignment the report came, and what of it was the analysis, beside their targets."""
    timings = run.report["timings"]
    assigned = sum(timings[f"{phase}_seconds"] for phase in ("start", "topology", "build", "trace", "lower", "buffer_assignment"))
    lag = timings["total_seconds"] - assigned
    analysis = timings["analysis_seconds"]
    verdict = "within" if lag <= max((LAG_RATIO - 1) * assigned, LAG_SECONDS) and analysis <= analysis_target_seconds else "above"
    print(
        f"  reported {lag:.2f} s after the buffers were assigned at {assigned:.1f} s, {analysis:.2f} s of it analysis:"
        f" {verdict} the targets of {LAG_RATIO} times or {LAG_SECONDS:.0f} s, and {analysis_target_seconds:.0f} s"
    )


def main() -> int:
    """Print the table; 1 where bytes differ between the depths, which no load of the machine excuses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs at depth memory, of which the median counts")
    parser.add_argument("--full", action="store_true", help="also compile to the end and compare the bytes")
    parser.add_argument("--depths-of-model", action="store_true", help="also compare 61 layers with 8")
    parser.add_argument("--spec", choices=SPECS, help="only this example")
    arguments = parser.parse_args()

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<40} {'answer':>10} {'rss':>10} {'peak HBM':>17}   phases in seconds")
    is_equal = True
    for name in (arguments.spec,) if arguments.spec else SPECS:
        spec = EXAMPLES / f"{name}.yaml"
        memory = show(name, [weigh(spec) for _ in range(arguments.repeat)])
        verdict = "within" if memory.answer_seconds <= TARGET_SECONDS else "above"
        print(f"  {verdict} the target of {TARGET_SECONDS} s")
        show_lag(memory, analysis_target_seconds=ANALYSIS_SECONDS)
        if name in PEER_SECONDS:
            print(f"  {PEER_SECONDS[name] / memory.answer_seconds:.1f} times as fast as the peer's {PEER_SECONDS[name]:.0f} s")
        if arguments.depths_of_model:
            shallow = show("  with 8 layers", [weigh(spec, "--set", "model.num_layers=8") for _ in range(arguments.repeat)])
            ratio = memory.answer_seconds / shallow.answer_seconds
            print(f"  61 layers take {ratio:.2f} times as long as 8; the target is {TARGET_DEPTH_RATIO}")
        if arguments.full:
            full = show("  --depth full", [weigh(spec, "--depth", "full")])
            different = [field for field in COMPARED if memory.report[field] != full.report[field]]
            is_equal &= not different
            print(
                f"  {full.answer_seconds / memory.answer_seconds:.1f} times as long; "
                + ("bytes equal" if not different else f"DIFFERENT: {different}")
            )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())

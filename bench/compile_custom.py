"""How long both programs of deepseek-custom take to their exact peaks, cold, and that more layers of the same kinds do not take longer.

    ./dev bench compile_custom     # four minutes on an idle machine of two cores

Two children compile at once. `answer` is the wall time of the whole command, as in compile_671b.
"""

from __future__ import annotations

import argparse
import os
import sys

from compile_671b import EXAMPLES, show, show_lag, weigh

SPEC = EXAMPLES / "deepseek-custom-v5p-8.yaml"
TARGET_SECONDS = 60.0
"""What an idle machine of two cores must not exceed to both exact peaks."""
PEER_SECONDS = 315.0
"""MaxText's train_compile of August 2026 on the same kind of machine, idle, one program, its best."""
TARGET_DEPTH_RATIO = 1.4
ANALYSIS_SECONDS = 5.0


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs, of which the median counts")
    repeat = parser.parse_args().repeat

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<40} {'answer':>10} {'rss':>10} {'peak HBM':>17}   phases in seconds")
    both = show("both programs", [weigh(SPEC) for _ in range(repeat)])
    print(f"  {both.peaks}; the target is {TARGET_SECONDS:.0f} s, and the peer takes {PEER_SECONDS:.0f} s for one program")
    show_lag(both, analysis_target_seconds=ANALYSIS_SECONDS)
    one = ["--program", "candidate", "--set", "model.engram.layers=[1,4]"]
    six, more = (
        show(f"candidate, {layers} layers", [weigh(SPEC, *one, "--set", f"model.num_layers={layers}") for _ in range(repeat)])
        for layers in (6, 24)
    )
    ratio = more.answer_seconds / six.answer_seconds
    print(f"  24 layers take {ratio:.2f} times as long as 6; the target is {TARGET_DEPTH_RATIO}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

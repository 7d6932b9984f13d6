"""Published bandwidths of TPU interconnects, and the least time a number of bytes can take over them.

Sources, all per chip: TPU7x, v6e and v5p from the comparison table of https://docs.cloud.google.com/tpu/docs/tpu7x; v5e from
https://cloud.google.com/tpu/docs/v5e (its 6.4 Tbit/s of data-center network per 256-chip pod is 25 Gbit/s per chip); v4 from arXiv
2304.01433, table 4: six links of 50 GB/s each way. Interconnect figures are published for both directions together, so one direction
is half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Bytes per second that one chip can send; None where no figure is published."""

    ici_bytes_per_second: int
    dcn_bytes_per_second: int | None


LINK_SPEEDS: Mapping[str, LinkSpeeds] = {
    "v4": LinkSpeeds(300_000_000_000, None),
    "v5e": LinkSpeeds(200_000_000_000, 3_125_000_000),
    "v5p": LinkSpeeds(600_000_000_000, 6_250_000_000),
    "v6e": LinkSpeeds(400_000_000_000, 12_500_000_000),
    "tpu7x": LinkSpeeds(600_000_000_000, 12_500_000_000),
}
"""By topology family, as the catalogue names it."""


def least_seconds(wire_bytes: int, *, link: str, family: str, devices_per_chip: int) -> float | None:
    """A lower bound of the time a device's bytes take: all links of its chip busy, all of the chip's devices sending alike.

    Real collectives use some of the links and wait for each other, so they take longer; None where no bandwidth is published.
    """
    speeds = LINK_SPEEDS.get(family)
    if speeds is None:
        return None
    rate = speeds.dcn_bytes_per_second if link == "dcn" else speeds.ici_bytes_per_second
    return None if rate is None else wire_bytes * devices_per_chip / rate

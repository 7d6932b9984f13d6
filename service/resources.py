"""Where the files that are not code lie: beside the packages in a checkout, inside `service` in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def resource_directory(name: str) -> Path:
    """The directory `web` or `examples`.

    Raises:
        FileNotFoundError: it is in neither place: the installation is broken.
    """
    for candidate in (_PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name} is neither in {_PACKAGE} nor beside it; install the distribution again")

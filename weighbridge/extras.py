"""Says which extra to install when a command needs a part that a plain client does not bring."""

from __future__ import annotations

import importlib.util

from weighbridge.exits import NoAnswerError

_NEEDS = {
    "service": ("fastapi", "jinja2", "plotly", "psutil", "sqlalchemy", "uvicorn", "zstandard"),
    "compile": ("flax", "jax", "jaxtyping", "libtpu", "psutil"),
}


def require(extra: str, command: str) -> None:
    """Refuse `command` where a package of `extra` is missing, with the line that installs it.

    Raises:
        NoAnswerError: at least one package is missing.
    """
    missing = [name for name in _NEEDS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise NoAnswerError(
            f"`weighbridge {command}` needs {', '.join(missing)}, which this installation lacks; run: pip install 'weighbridge[{extra}]'"
        )

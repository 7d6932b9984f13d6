"""How the service's processes log: one line each on stderr, with the process that wrote it."""

from __future__ import annotations

import logging


def log_to_stderr(process: str) -> None:
    """Set up logging for a process of the service, named in each of its lines; called by its entry point alone."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {process} %(levelname)s %(message)s")
    # It tells at each start, at length, that there is nothing to migrate.
    logging.getLogger("alembic").setLevel(logging.WARNING)

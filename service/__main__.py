"""`python -m service serve|api|worker|upgrade`: the processes of the service, with settings from the environment."""

from __future__ import annotations

import argparse
import sys

from service.errors import ServiceError
from service.settings import Settings, SettingsError


def main() -> int:
    """Run one process of the service; returns its exit code, 2 where the settings or the database cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="API, pages and one worker")
    api = commands.add_parser("api", help="API and pages; workers run elsewhere")
    worker = commands.add_parser("worker", help="claim jobs and run them")
    for process in (serve, api, worker):
        process.add_argument("--stop-on-eof", action="store_true", help="stop when stdin is closed: whoever started this process is gone")
    commands.add_parser("upgrade", help="bring the database to the newest migration")
    arguments = parser.parse_args()
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        return _refuse(error)
    # Each process loads its own part alone.
    match arguments.command:
        case "worker":
            from service.worker.loop import run_worker_process

            return run_worker_process(settings, stop_on_eof=arguments.stop_on_eof)
        case "upgrade":
            from service.storage.store import open_store

            try:
                open_store(settings).close()
            except (ServiceError, SettingsError) as error:
                return _refuse(error)
            return 0
        case _:
            from service.api.server import run_server

            return run_server(settings, with_worker=arguments.command == "serve", stop_on_eof=arguments.stop_on_eof)


def _refuse(error: Exception) -> int:
    print(f"weighbridge: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

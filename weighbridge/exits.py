"""The exit codes of the command, and the error that stands for the one that is easily mistaken: no answer is not a wrong answer."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1
EXIT_BAD_SPEC = 2
EXIT_FAILED = 3
EXIT_TIMED_OUT = 5
EXIT_INTERRUPTED = 130


class NoAnswerError(click.ClickException):
    """The command could not do its work. Click's own errors end with 1, which here would say that a program does not fit."""

    exit_code = EXIT_FAILED


class Commands(click.Group):
    """The group of all commands; what nobody caught is told in full and ends with `EXIT_FAILED`, where Python would end with 1."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        try:
            super().main(*args, **options)
        except Exception:
            traceback.print_exc()
            sys.exit(EXIT_FAILED)
        sys.exit(EXIT_FITS)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, which CI sends, and SIGHUP, which a closed terminal sends, stop the work in order as Ctrl-C does.

    Children are killed and directories removed. A SIGHUP that is ignored stays so: `nohup` is meant to outlive the terminal.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    changed = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)

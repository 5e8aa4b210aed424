"""Command line of `millstream`: subcommands and flags made from the table of settings.

Each role's code is imported only when that role runs, so an API process never loads torch.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from cli import keys
from common import logging, settings
from common.exitcodes import ExitCode
from common.settings import Command, Settings, SettingsError
from common.version import VERSION

_SUMMARY = "An LLM inference server whose nervous system is Redis Streams."

#: Not the hard limit itself, which may be in the millions: some libraries walk through all of them.
_MOST_FILES = 65_536

_ABOUT = {
    Command.SERVE: "Run everything on this machine: Redis and one process per role.",
    Command.API: "Run one API process.",
    Command.TOKENIZER: "Run one tokenizer process.",
    Command.SCHEDULER: "Run one scheduler process with its engine.",
    Command.DETOKENIZER: "Run one detokenizer process.",
    Command.KEYS: "Make, list and take away API keys.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by ``argv`` (this process's own arguments by default); returns the exit code."""
    flags = vars(build_parser().parse_args(argv))
    command = Command(flags.pop("command"))
    try:
        chosen = settings.from_environment(command, flags)
        _raise_file_limit()
        logging.setup(chosen.log_level, chosen.log_format, command, chosen.worker_id)
        return keys.run(chosen, flags) if command is Command.KEYS else _run(command, chosen)
    except SettingsError as error:
        print(f"millstream {command}: {error}", file=sys.stderr)
        return ExitCode.USAGE


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands. Values stay raw text: flags and variables are checked by one code."""
    parser = argparse.ArgumentParser(prog="millstream", description=_SUMMARY)
    parser.add_argument("--version", action="version", version=f"millstream {VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in Command:
        about = _ABOUT[command]
        subparser = subparsers.add_parser(command, help=about, description=about, allow_abbrev=False)
        if command is Command.KEYS:
            keys.add_actions(subparser, partial(_add_settings, command=command))
        else:
            _add_settings(subparser, command=command)
    return parser


def _add_settings(parser: argparse.ArgumentParser, *, command: Command) -> None:
    for setting in settings.settings_of(command):
        shown = f"{setting.spec.help} Default: {setting.spec.default_text.replace('`', '')}."
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            action="append" if setting.spec.kind.many else "store",
            nargs=None if setting.spec.kind.bare is None else "?",
            const=setting.spec.kind.bare,
            metavar=setting.name.rsplit("_", 1)[-1].upper(),
            help=argparse.SUPPRESS if setting.spec.internal else shown.replace("%", "%%"),
        )


def _raise_file_limit() -> None:
    """A stream is an open file, and the usual soft limit of 1,024 would be the first bound to be hit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _exit_at_once(code: int) -> NoReturn:
    """Ends the process without taking the interpreter down: torch and the weights would need seconds."""
    logging.flush()
    os._exit(code)


def _run(command: Command, chosen: Settings) -> int:
    match command:
        case Command.SERVE:
            from cli import serve

            return serve.run(chosen)
        case Command.API:
            from api import server

            return server.run(chosen)
        case Command.TOKENIZER:
            from workers.tokenizer import main as tokenizer

            return tokenizer.run(chosen)
        case Command.SCHEDULER:
            from workers.scheduler import main as scheduler

            _exit_at_once(scheduler.run(chosen))
        case Command.DETOKENIZER:
            from workers.detokenizer import main as detokenizer

            return detokenizer.run(chosen)
        case Command.KEYS:
            raise AssertionError("not a process")

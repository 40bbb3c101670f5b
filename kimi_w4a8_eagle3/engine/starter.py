"""Start processes of SGLang: engines, and the programs that measure them.

A new process imports SGLang, which takes ten seconds of a core. On a CPU kimi-w4a8-laptop forks one that has done so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..base import laptop

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """A module that `run_module` runs as a program, where SGLang alone would not start. laptop can fork it."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-m", "kimi_w4a8_eagle3.sglang_plugin.run_module", self.module, *self.arguments]

    @property
    def alone(self) -> list[str]:
        """The command line without `run_module`, for a GPU."""
        return [sys.executable, "-m", self.module, *self.arguments]


Command = Program | Sequence[str]


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Starter(Protocol):
    """A way to start processes. environ: all variables of the process. log: file descriptor for its output."""

    def prepare(self, command: Command, environ: Mapping[str, str], log: Path) -> None:
        """Start SGLang's imports in the background, for which the first engine would wait."""

    def engine(self, command: Command, environ: Mapping[str, str], log: int) -> Process:
        """Start an engine in a session of its own. The engine gets SIGTERM when this process dies."""

    def program(self, program: Program, changes: Mapping[str, str], log: int) -> Process:
        """Start a program that measures engines. changes: variables added to this process's environment."""


class NewProcess:
    """Starter that uses `subprocess`."""

    def prepare(self, command: Command, environ: Mapping[str, str], log: Path) -> None:
        """Do nothing: a new process cannot be prepared."""

    def engine(self, command: Command, environ: Mapping[str, str], log: int) -> Process:
        return subprocess.Popen(
            words(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def program(self, program: Program, changes: Mapping[str, str], log: int) -> Process:
        return subprocess.Popen(
            program.argv, env={**os.environ, **changes}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def words(command: Command) -> list[str]:
    """Return the words of a command line."""
    return command.argv if isinstance(command, Program) else list(command)


def starter() -> Starter:
    """Return laptop's starter where it is installed, which starts what it cannot fork as new processes."""
    found: Starter | None = laptop.find("starter")
    return found or NewProcess()


def die_with_parent() -> None:
    """In a new child: end when the process that started it dies, for whatever reason (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

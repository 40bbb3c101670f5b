"""Programs of SGLang's, and the words that start them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


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


def words(command: Command) -> list[str]:
    """Return the words of a command line."""
    return command.argv if isinstance(command, Program) else list(command)

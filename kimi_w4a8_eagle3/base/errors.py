"""The one exception that a user sees: what is wrong, where, what was expected, what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unicodedata import category


def on_host(remedy: str) -> str:
    """Name the host's command and settings instead of ours, in a container that launch/docker-run.sh started."""
    command = os.environ.get("KIMI_COMMAND", "")
    if not command:
        return remedy
    remedy = re.sub(r"\bkimi-w4a8 (?=[a-z])", lambda _: f"{command} ", remedy)
    return re.sub(r"--port (?=\d)", "PORT=", remedy.replace("HF_HOME", "MODELS"))


def printable(text: str) -> str:
    """Return foreign text as a terminal may show it: control characters other than a newline are `?`."""
    if text.isprintable():
        return text
    return "".join("?" if category(letter)[0] == "C" and letter != "\n" else letter for letter in text)


@dataclass
class KimiError(Exception):
    """A mistake in the input or the machine that a user can repair.

    The command line prints it as one message without a traceback and exits with `exit_code`.
    """

    what: str
    where: str = ""
    expected: str = ""
    remedy: str = ""
    exit_code: int = 1

    def __str__(self) -> str:
        details = {"where:": self.where, "expected:": self.expected, "to do:": on_host(self.remedy)}
        lines = [self.what, *(f"  {label:<9} {text}" for label, text in details.items() if text)]
        return printable("\n".join(lines))


@dataclass
class UsageError(KimiError):
    """Invalid arguments: exit code 2, as for an option that does not exist."""

    exit_code: int = 2


@contextmanager
def or_end(what: str) -> Iterator[None]:
    """End the process with one message, in places where SGLang would only log an exception."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, KimiError) else f"{what}, so nothing is served: {error!r:.200}"
        raise SystemExit(f"kimi-w4a8: {reason}") from error

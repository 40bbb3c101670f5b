"""All reads of the machine by the doctor: files, limits, packages, ports, the Hub.

`Probe` reads the real machine. Tests subclass it with recorded answers, and `root` lets them use their own /sys, /proc
and /dev.
"""

from __future__ import annotations

import ctypes
import grp
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from huggingface_hub import constants

from ..base.errors import KimiError
from ..base.installed import version_of
from ..engine.process import require_free_port
from ..fetch.hub import ask_hub
from ..machine.aiter_patches import PatchState, patch_states
from ..machine.aiter_regime import Regime, installed_regime
from ..moe.flydsl.objects import GATE as KERNELS
from ..moe.flydsl.objects import CodeObjects, objects_folder


class Process(NamedTuple):
    """A running program."""

    pid: int
    command: str
    owner: str


@dataclass(frozen=True)
class Probe:
    root: Path = Path("/")

    def has_library(self, name: str) -> bool:
        with suppress(OSError):
            return bool(ctypes.CDLL(name))
        return False

    def read(self, path: str) -> str | None:
        """Return a text file's stripped content, or None if unreadable. `path` is relative to `root`."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def usable(self, path: str) -> bool:
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def group_of(self, path: str) -> str:
        """Return the group that owns a file: its name, or its number if the name is unknown, as in containers."""
        number = (self.root / path).stat().st_gid
        try:
            return grp.getgrgid(number).gr_name
        except KeyError:
            return str(number)

    def space(self, path: Path) -> tuple[int, int]:
        """Return (total, free) bytes of the file system on which `path` is or would be created."""
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.total, usage.free

    def limit(self, name: str) -> int | None:
        """Return the soft limit `memlock` (bytes) or `nofile` (files); None means unlimited."""
        soft, _ = resource.getrlimit({"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name])
        return None if soft == resource.RLIM_INFINITY else soft

    def environment(self) -> dict[str, str]:
        """Return the variables that an engine would inherit."""
        return dict(os.environ)

    def package(self, *names: str) -> str | None:
        """Return the version of the first of these distributions that is installed."""
        return version_of(*names)

    def torch_build(self) -> str | None:
        """Return torch's build, read without importing it: `hip 7.2.1`, `cuda 12.8` or `cpu`."""
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = (Path(spec.origin).parent / "version.py").read_text()
        build = re.search(r"^(hip|cuda)\b.*= ?['\"](.+)['\"]$", text, re.MULTILINE)
        return f"{build[1]} {build[2]}" if build else "cpu"

    def plugins(self) -> list[str]:
        return [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]

    def code_objects(self) -> tuple[Path, int]:
        """Return the folder and number of the gfx942 code objects; raise KimiError if they are invalid."""
        objects = CodeObjects(objects_folder({KERNELS: self.environment().get(KERNELS)}))
        return objects.folder, objects.check_all()

    def patches(self) -> list[PatchState]:
        return patch_states()

    def aiter_regime(self) -> Regime:
        return installed_regime()

    def port_problem(self, host: str, port: int) -> str | None:
        try:
            require_free_port(host, port)
        except KimiError as error:
            return error.what
        return None

    def processes(self) -> list[Process]:
        """Return the other processes; the kernel hides command lines of some."""
        return [
            Process(one.pid, " ".join(one.info["cmdline"] or []) or one.info["name"] or "", one.info["username"] or "?")
            for one in psutil.process_iter(["name", "cmdline", "username"])
            if one.pid != os.getpid()
        ]

    def user(self) -> str:
        return psutil.Process().username()

    def cache(self) -> Path:
        return Path(constants.HF_HUB_CACHE)

    def offline(self) -> bool:
        return constants.HF_HUB_OFFLINE

    def ask_hub(self, repo: str, revision: str) -> None:
        """Raise KimiError if the Hub does not answer, or does not give a repository."""
        ask_hub(repo, revision)

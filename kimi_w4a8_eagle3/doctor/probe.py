"""All reads of the machine by the doctor: files, limits, packages, ports, the Hub.

`Probe` reads the real machine. Tests subclass it with recorded answers, and `root` lets them use their own /sys, /proc
and /dev.
"""

from __future__ import annotations

import dataclasses
import grp
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
from huggingface_hub import constants

from ..base.errors import KimiError
from ..engine.process import require_free_port
from ..fetch.audit import Limits
from ..fetch.hub import Hub
from ..fetch.model import Listing
from ..machine.aiter_regime import Regime, installed_regime
from ..machine.installed import distribution
from ..moe.flydsl.objects import GATE as KERNELS
from ..moe.flydsl.objects import CodeObjects, objects_folder
from ..patching import patcher
from ..patching.patcher import PatchReport
from ..patching.patches import load_manifest
from ..recipe.router_settings import RouterSettings


@dataclass(frozen=True)
class Process:
    pid: int
    command: str


@dataclass(frozen=True)
class Probe:
    """The machine at `root`."""

    root: Path = Path("/")

    def has_program(self, name: str) -> bool:
        """True if a program is on the path."""
        return shutil.which(name) is not None

    def read(self, path: str) -> str | None:
        """Return a text file's stripped content, or None if unreadable. `path` is relative to `root`."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Return the matching paths below `root`."""
        return sorted(self.root.glob(pattern))

    def exists(self, path: str) -> bool:
        """True if there is such a file, directory or device."""
        return (self.root / path).exists()

    def usable(self, path: str) -> bool:
        """True if this user may read and write it."""
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

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def python_version(self) -> str:
        """Return the version, such as `3.11.7`."""
        return platform.python_version()

    def package(self, *names: str) -> str | None:
        """Return the version of the first of these distributions that is installed."""
        return distribution(*names)

    def torch_build(self) -> str | None:
        """Return torch's build, read without importing it: `hip 7.2.1`, `cuda 12.8` or `cpu`."""
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = (Path(spec.origin).parent / "version.py").read_text()
        for kind in ("hip", "cuda"):
            for line in text.splitlines():
                name, _, value = line.partition("=")
                if name.split(":")[0].strip() == kind and (version := value.strip().strip("'\"")) != "None":
                    return f"{kind} {version}"
        return "cpu"

    def plugins(self) -> list[str]:
        """Return the names of the installed SGLang plugins."""
        return [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]

    def code_objects(self) -> tuple[Path, int]:
        """Return the folder and number of the gfx942 code objects; raise KimiError if they are invalid."""
        objects = CodeObjects(objects_folder({KERNELS: self.environment(KERNELS)}))
        return objects.folder, objects.check_all()

    def patches(self) -> list[PatchReport]:
        """Return the state of every patch of the manifest."""
        return [patcher.inspect(patch) for patch in load_manifest()]

    def aiter_regime(self) -> Regime:
        """Return how the installed AITER treats page offsets beyond 32 bits."""
        return installed_regime()

    def router_lacks(self) -> list[str] | None:
        """Return the router options that the installed router lacks; None if no router is installed."""
        if importlib.util.find_spec("sglang_router") is None:
            return None
        from sglang_router.router_args import RouterArgs  # optional: sglang-router

        known = {field.name for field in dataclasses.fields(RouterArgs)}
        return sorted(RouterSettings().router_arguments().keys() - known)

    def port_problem(self, host: str, port: int) -> str | None:
        """Return why a server cannot listen there, or None."""
        try:
            require_free_port(host, port)
        except KimiError as error:
            return error.what
        return None

    def processes(self) -> list[Process]:
        """Return all processes that this user may see, except this one."""
        found = []
        for process in psutil.process_iter(["pid", "name", "cmdline"]):
            if process.pid != os.getpid():
                command = " ".join(process.info["cmdline"] or []) or process.info["name"] or ""
                found.append(Process(process.pid, command))
        return found

    def cache(self) -> Path:
        """Return the folder of the Hugging Face cache."""
        return Path(constants.HF_HUB_CACHE)

    def offline(self) -> bool:
        """True if the user disabled access to the Hub (HF_HUB_OFFLINE)."""
        return constants.HF_HUB_OFFLINE

    def listing(self, repo: str, revision: str) -> Listing:
        """Return the Hub's listing of a repository; raise KimiError if the Hub does not answer or refuses."""
        hub = Hub.from_environment()
        return Hub(hub.endpoint, hub.token, Limits(attempts=1)).listing(repo, revision)

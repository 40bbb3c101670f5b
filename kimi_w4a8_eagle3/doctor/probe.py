"""Everything that the doctor asks a machine: files, limits, packages, ports, the Hub.

`Probe` asks the real machine. Tests subclass it with recorded answers; `root` lets them lay out their own /sys, /proc
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
    """A process of this machine."""

    pid: int
    command: str


@dataclass(frozen=True)
class Probe:
    """The machine at `root`."""

    root: Path = Path("/")

    def has_program(self, name: str) -> bool:
        """Whether a program is on the path."""
        return shutil.which(name) is not None

    def read(self, path: str) -> str | None:
        """A text file's content without surrounding blanks; None if it cannot be read. `path` starts at `root`."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Paths below `root` that match."""
        return sorted(self.root.glob(pattern))

    def exists(self, path: str) -> bool:
        """Whether there is such a file, directory or device."""
        return (self.root / path).exists()

    def usable(self, path: str) -> bool:
        """Whether this user may read and write it."""
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def group_of(self, path: str) -> str:
        """The group that owns a file: its name, or its number where the name is unknown (containers)."""
        number = (self.root / path).stat().st_gid
        try:
            return grp.getgrgid(number).gr_name
        except KeyError:
            return str(number)

    def space(self, path: Path) -> tuple[int, int]:
        """(total, free) bytes of the file system on which `path` is or would be created."""
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.total, usage.free

    def limit(self, name: str) -> int | None:
        """The soft limit `memlock` (bytes) or `nofile` (files); None means unlimited."""
        soft, _ = resource.getrlimit({"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name])
        return None if soft == resource.RLIM_INFINITY else soft

    def environment(self, name: str) -> str | None:
        """An environment variable."""
        return os.environ.get(name)

    def python_version(self) -> str:
        """For example `3.11.7`."""
        return platform.python_version()

    def package(self, *names: str) -> str | None:
        """The version of the first of these distributions that is installed."""
        return distribution(*names)

    def torch_build(self) -> str | None:
        """What torch was built for, read without importing it: `hip 7.2.1`, `cuda 12.8` or `cpu`."""
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
        """Names of the SGLang plugins that are installed."""
        return [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]

    def code_objects(self) -> tuple[Path, int]:
        """Where the code objects of the gfx942 kernels lie, and how many; raises KimiError when something is wrong."""
        objects = CodeObjects(objects_folder({KERNELS: self.environment(KERNELS)}))
        return objects.folder, objects.check_all()

    def patches(self) -> list[PatchReport]:
        """The state of every patch of the manifest."""
        return [patcher.inspect(patch) for patch in load_manifest()]

    def aiter_regime(self) -> Regime:
        """What the installed AITER does with page offsets beyond 32 bits."""
        return installed_regime()

    def router_lacks(self) -> list[str] | None:
        """Options that routers are given and the installed one does not take; None where there is no router."""
        if importlib.util.find_spec("sglang_router") is None:
            return None
        from sglang_router.router_args import RouterArgs  # optional: sglang-router

        known = {field.name for field in dataclasses.fields(RouterArgs)}
        return sorted(RouterSettings().router_arguments().keys() - known)

    def port_problem(self, host: str, port: int) -> str | None:
        """Why a server cannot listen there; None if it can."""
        try:
            require_free_port(host, port)
        except KimiError as error:
            return error.what
        return None

    def processes(self) -> list[Process]:
        """All processes that this user may see, except this one."""
        found = []
        for process in psutil.process_iter(["pid", "name", "cmdline"]):
            if process.pid != os.getpid():
                command = " ".join(process.info["cmdline"] or []) or process.info["name"] or ""
                found.append(Process(process.pid, command))
        return found

    def cache(self) -> Path:
        """The Hugging Face cache."""
        return Path(constants.HF_HUB_CACHE)

    def offline(self) -> bool:
        """Whether the user forbade asking the Hub (HF_HUB_OFFLINE)."""
        return constants.HF_HUB_OFFLINE

    def listing(self, repo: str, revision: str) -> Listing:
        """What the Hub says about a repository; KimiError when it does not answer or refuses."""
        hub = Hub.from_environment()
        return Hub(hub.endpoint, hub.token, Limits(attempts=1)).listing(repo, revision)

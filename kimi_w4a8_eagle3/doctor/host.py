"""Checks of the host: ROCm, driver, NUMA, shared memory, devices, limits, running engines."""

from __future__ import annotations

import re

from ..base.finding import Finding
from ..machine.hardware import GIB
from ..recipe.arguments import number
from ..recipe.launch import DEFAULT_PORT
from .facts import Facts
from .result import fail, ok, skip, warn

NOFILE_MINIMUM = 65_536
# SGLang and vLLM rename their workers (`sglang::scheduler_TP0`, `VLLM::Worker_TP0`).
ENGINE = re.compile(r"sglang[.:]|sglang serve|vllm serve|vllm\.entrypoints|VLLM::", re.IGNORECASE)
SHOWN = 4


def rocm(facts: Facts) -> Finding:
    """Check the ROCm user space; the recipes' images carry 7.2."""
    return ok(facts.rocm) if facts.rocm else fail("not installed", "use the ROCm SGLang image (see the Dockerfile)")


def driver(facts: Facts) -> Finding:
    if version := facts.probe.read("sys/module/amdgpu/version"):
        return ok(f"amdgpu {version}")
    if not facts.pci_count:
        return skip("no AMD GPU found")
    if (facts.probe.root / "sys/module/amdgpu").exists():
        return ok(f"amdgpu of kernel {facts.probe.read('proc/sys/kernel/osrelease')} (in-tree driver)")
    return fail("amdgpu is not loaded", "install amdgpu-dkms on the host, then `sudo modprobe amdgpu`")


def numa(facts: Facts) -> Finding:
    """Check the `--numa-node` list of this machine, to which a recipe's `numa-node = auto` resolves."""
    nodes, fixed = facts.machine.numa_nodes, facts.args.get("numa-node")
    if nodes is None:
        remedy = "set the list with --set args.numa-node=..., see `amd-smi static --numa`"
        return warn("the firmware does not report the NUMA node of each GPU", remedy)
    found = "--numa-node " + " ".join(map(str, nodes))
    if isinstance(fixed, list) and fixed != nodes:
        return warn(f"{found}, but the recipe has {' '.join(map(str, fixed))}", "set numa-node = auto in the recipe")
    if not facts.probe.has_library("libnuma.so.1"):
        return warn(f"{found}, but libnuma is missing, with which SGLang binds ranks", "install the package libnuma1")
    return ok(found)


def numa_balancing(facts: Facts) -> Finding:
    """Check that the kernel does not move pages between nodes while GPUs use them."""
    value = facts.probe.read("proc/sys/kernel/numa_balancing")
    if value in (None, "0"):
        return ok("not in this kernel" if value is None else "off")
    return warn(f"on ({value}): page migration stalls the GPUs", "sudo sysctl kernel.numa_balancing=0")


def shared_memory(gpus: int) -> int:
    """Return the bytes for buffers between the ranks of eight GPUs (docker's default is 64 MiB)."""
    return 16 * GIB if gpus else GIB // 16


def shm(facts: Facts) -> Finding:
    """Check the shared memory through which the engine's processes exchange data."""
    path, needed = facts.probe.root / "dev/shm", shared_memory(facts.gpus)
    if not path.is_dir():
        return fail("/dev/shm is missing", "mount a tmpfs there; in docker use --ipc=host or --shm-size 64g")
    total, free = facts.probe.space(path)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free >= needed:
        return ok(found)
    judge = fail if free < GIB // 16 or (facts.gpus and free < GIB) else warn
    remedy = "docker: --ipc=host or --shm-size 64g; host: remount /dev/shm"
    return judge(f"{found}, {needed / GIB:g} GiB needed", remedy)


def devices(facts: Facts) -> Finding:
    """Check that /dev/kfd and the render nodes exist and that this user may open them."""
    probe = facts.probe
    if not facts.count and not facts.pci_count:
        return skip("no AMD GPU found")
    render = [str(path.relative_to(probe.root)) for path in sorted(probe.root.glob("dev/dri/renderD*"))]
    if not (probe.root / "dev/kfd").exists():
        return fail("/dev/kfd is missing", "load amdgpu on the host; in docker pass --device /dev/kfd")
    if len(render) < facts.gpus:
        remedy = "in docker pass --device /dev/dri (the directory, for all GPUs)"
        return fail(f"{len(render)} render nodes in /dev/dri, {facts.gpus} needed", remedy)
    closed = [path for path in ["dev/kfd", *render] if not probe.usable(path)]
    if not closed:
        return ok(f"/dev/kfd and {len(render)} render nodes")
    groups = sorted({probe.group_of(path) for path in closed})
    remedy = f"sudo usermod -aG {','.join(groups)} $USER and log in again; in docker --group-add "
    return fail(f"no access to /{closed[0]}", remedy + " --group-add ".join(groups))


def memlock(facts: Facts) -> Finding:
    """Check the limit of pinned host memory, used for transfers to the GPUs."""
    limit, remedy = facts.probe.limit("memlock"), "docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
    return ok("unlimited") if limit is None else warn(f"{limit / GIB:.2f} GiB", remedy)


def nofile(facts: Facts) -> Finding:
    """Check the limit of open files: shards, sockets, and one connection per running request."""
    limit, wanted = facts.probe.limit("nofile"), NOFILE_MINIMUM if facts.gpus else 1024
    if limit is None or limit >= wanted:
        return ok("unlimited" if limit is None else str(limit))
    return warn(f"{limit}, {wanted} needed", f"ulimit -n {wanted}; docker: --ulimit nofile={wanted}")


def port(facts: Facts) -> Finding:
    """Check that the API's port is free."""
    host, port = str(facts.args.get("host", "127.0.0.1")), number(facts.args, "port", DEFAULT_PORT)
    if problem := facts.probe.port_problem(host, port):
        return fail(problem, "serve on another port: --port 8000")
    return ok(f"{port} on {host} is free")


def processes(facts: Facts) -> Finding:
    """Check for engines of an earlier run, which would hold memory, ports or shared memory."""
    running = facts.probe.processes()
    found = [process for process in running if _is_engine(process.command)]
    if not found and not any(process.command == "kthreadd" for process in running):  # every host has it
        return skip("the host's processes are not visible here; on the host: pgrep -af 'sglang|vllm'")
    if not found:
        return ok("no other engine runs")
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    shown = ", ".join(f"{one.pid} of {one.owner} ({one.command[:50].strip()})" for one in found[:SHOWN])
    what = f"{len(found)} engine processes: {shown}{more}"
    own = [str(one.pid) for one in found if one.owner == facts.probe.user()]
    return warn(what, f"if your engine is not needed: kill {' '.join(own)}") if own else ok(what)


def _is_engine(command: str) -> bool:
    """True for an engine's program or Python module, but not for an editor with its source open."""
    words = command.split()
    module = bool(words) and "python" in words[0] and "-m" in words[:4] and ENGINE.search(" ".join(words[:6]))
    return bool(module or ENGINE.match(command))

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
    if facts.rocm is None:
        return fail("not installed", "use the ROCm SGLang image (see the Dockerfile), or install ROCm 7.2")
    return ok(facts.rocm)


def driver(facts: Facts) -> Finding:
    version = facts.probe.read("sys/module/amdgpu/version")
    if version:
        return ok(f"amdgpu {version}")
    if not facts.pci_count:
        return skip("no AMD GPU found")
    if (facts.probe.root / "sys/module/amdgpu").exists():
        release = facts.probe.read("proc/sys/kernel/osrelease") or "unknown"
        return ok(f"amdgpu of kernel {release} (in-tree driver)")
    return fail("amdgpu is not loaded", "install amdgpu-dkms on the host, then `sudo modprobe amdgpu`")


def numa(facts: Facts) -> Finding:
    """Check the `--numa-node` list of this machine, to which a recipe's `numa-node = auto` resolves."""
    nodes, fixed = facts.machine.numa_nodes, facts.args.get("numa-node")
    if nodes is None:
        return warn(
            "the firmware does not report the NUMA node of each GPU",
            "set the list with --set args.numa-node=..., see `amd-smi static --numa`",
        )
    found = "--numa-node " + " ".join(map(str, nodes))
    if isinstance(fixed, list) and fixed != nodes:
        listed = " ".join(map(str, fixed))
        return warn(f"{found}, but the recipe has {listed}", "set numa-node = auto in the recipe")
    if facts.recipe.environment.get("SGLANG_NUMA_BIND_V2") == "1" and not facts.probe.has_program("numactl"):
        return warn(f"{found}, but numactl is missing, which SGLang needs", "install the package numactl")
    return ok(found)


def numa_balancing(facts: Facts) -> Finding:
    """Check that the kernel does not move pages between nodes while GPUs use them."""
    value = facts.probe.read("proc/sys/kernel/numa_balancing")
    if value is None:
        return ok("not in this kernel")
    if value != "0":
        return warn(f"on ({value}): page migration stalls the GPUs", "sudo sysctl kernel.numa_balancing=0")
    return ok("off")


def shared_memory(gpus: int) -> int:
    """Return the bytes for buffers between the ranks of eight GPUs (docker's default is 64 MiB)."""
    return 16 * GIB if gpus else GIB // 16


def shm(facts: Facts) -> Finding:
    """Check the shared memory through which the engine's processes exchange data."""
    path = facts.probe.root / "dev/shm"
    if not path.is_dir():
        return fail("/dev/shm is missing", "mount a tmpfs there; in docker use --ipc=host or --shm-size 64g")
    total, free = facts.probe.space(path)
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    needed = shared_memory(facts.gpus)
    if free < needed:
        judge = fail if free < GIB // 16 or (facts.gpus and free < GIB) else warn
        return judge(
            f"{found}, {needed / GIB:g} GiB needed", "docker: --ipc=host or --shm-size 64g; host: remount /dev/shm"
        )
    return ok(found)


def devices(facts: Facts) -> Finding:
    """Check that /dev/kfd and the render nodes exist and that this user may open them."""
    probe = facts.probe
    if not facts.count and not facts.pci_count:
        return skip("no AMD GPU found")
    render = [str(path.relative_to(probe.root)) for path in sorted(probe.root.glob("dev/dri/renderD*"))]
    if not (probe.root / "dev/kfd").exists():
        return fail("/dev/kfd is missing", "load amdgpu on the host; in docker pass --device /dev/kfd")
    if len(render) < facts.gpus:
        found = f"{len(render)} render nodes in /dev/dri, {facts.gpus} needed"
        return fail(found, "in docker pass --device /dev/dri (the directory, for all GPUs)")
    closed = [path for path in ["dev/kfd", *render] if not probe.usable(path)]
    if closed:
        groups = sorted({probe.group_of(path) for path in closed})
        joined = ",".join(groups)
        return fail(
            f"no access to /{closed[0]} (group {joined})",
            f"sudo usermod -aG {joined} $USER and log in again; in docker --group-add {' --group-add '.join(groups)}",
        )
    return ok(f"/dev/kfd and {len(render)} render nodes")


def memlock(facts: Facts) -> Finding:
    """Check the limit of pinned host memory, used for transfers to the GPUs."""
    limit = facts.probe.limit("memlock")
    if limit is None:
        return ok("unlimited")
    return warn(f"{limit / GIB:.2f} GiB", "docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; or ulimit -l")


def nofile(facts: Facts) -> Finding:
    """Check the limit of open files: shards, sockets, and one connection per running request."""
    limit, wanted = facts.probe.limit("nofile"), NOFILE_MINIMUM if facts.gpus else 1024
    if limit is None or limit >= wanted:
        return ok("unlimited" if limit is None else str(limit))
    return warn(f"{limit}, {wanted} needed", f"ulimit -n {wanted}; docker: --ulimit nofile={wanted}")


def port(facts: Facts) -> Finding:
    """Check that the API's port is free."""
    host, port = str(facts.args.get("host", "127.0.0.1")), int(number(facts.args, "port", DEFAULT_PORT))
    if problem := facts.probe.port_problem(host, port):
        return fail(problem, "stop that process, or serve with --port 8000")
    return ok(f"{port} on {host} is free")


def processes(facts: Facts) -> Finding:
    """Check for engines of an earlier run, which would hold memory, ports or shared memory."""
    found = {pid: command.strip() for pid, command in facts.probe.processes().items() if _is_engine(command)}
    if not found:
        return ok("no other engine runs")
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    shown = ", ".join(f"{pid} ({command[:50].strip()})" for pid, command in list(found.items())[:SHOWN])
    remedy = f"if they are not needed: kill {' '.join(map(str, found))}"
    return warn(f"{len(found)} engine processes: {shown}{more}", remedy)


def _is_engine(command: str) -> bool:
    """True for an engine's program or Python module, but not for an editor with its source open."""
    words = command.split()
    head = " ".join(words[:6])
    runs_python = bool(words) and "python" in words[0]
    return bool(ENGINE.match(command)) or (runs_python and "-m" in words[:4] and bool(ENGINE.search(head)))

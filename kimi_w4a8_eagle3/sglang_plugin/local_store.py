"""Keep the store by which the ranks of one machine find each other on loopback.

torch's TCPStore has no key and listens on all interfaces, whatever its address. With the host's network it would face
the network. With several machines (`--dist-init-addr`) it stays as it is: their network must be closed to others.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any

from .hooks import Feature

FEATURE = Feature("the store of the ranks on loopback", remove_when="SGLang binds its TCPStore to loopback itself")
LOOPBACK = "127.0.0.1"


@FEATURE.around("sglang.srt.distributed.bootstrap._resolve_dist_init_method")
def resolve_on_loopback(original: Callable[..., str], *, dist_port: int) -> str:
    """Name loopback, unless the operator named an address, and make rank 0 bind to it."""
    from sglang.srt.environ import envs  # SGLang's import order: hooks load before what they change
    from sglang.srt.runtime_context import get_parallel

    if envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE.get() or get_parallel().dist_init_addr:
        return original(dist_port=dist_port)
    # the package has a function of the same name
    vars(importlib.import_module("torch.distributed.rendezvous"))["TCPStore"] = open_store
    return f"tcp://{LOOPBACK}:{dist_port}"


def open_store(host_name: str, port: int, is_master: bool = False, **named: Any) -> Any:
    """Make a TCPStore; a master on loopback gets a socket that is bound there."""
    from torch.distributed import TCPStore  # start-up: imported where a store is made

    if is_master and host_name == LOOPBACK:
        named["master_listen_fd"] = socket.create_server((host_name, port), backlog=1024).detach()
    return TCPStore(host_name=host_name, port=port, is_master=is_master, **named)

"""Bind the store by which the ranks of one machine find each other to loopback.

torch's TCPStore has no key and listens on all interfaces, whatever its address, so another machine could write to it.
With several machines (`--dist-init-addr`) nothing changes: the network between them must be private.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any

from ..hooks import Feature

FEATURE = Feature("the store of the ranks on loopback", remove_when="SGLang binds its TCPStore to loopback itself")
LOOPBACK = "127.0.0.1"


@FEATURE.around("sglang.srt.distributed.bootstrap._resolve_dist_init_method")
def resolve_on_loopback(original: Callable[..., str], *, dist_port: int) -> str:
    """Return an address on loopback and make rank 0 bind to it, unless the operator gave an address."""
    from sglang.srt.environ import envs  # SGLang's import order: hooks load before what they change
    from sglang.srt.runtime_context import get_parallel

    if envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE.get() or get_parallel().dist_init_addr:
        return original(dist_port=dist_port)
    # imported by its path, because `torch.distributed.rendezvous` as an attribute is a function
    vars(importlib.import_module("torch.distributed.rendezvous"))["TCPStore"] = open_store
    return f"tcp://{LOOPBACK}:{dist_port}"


def open_store(host_name: str, port: int, is_master: bool = False, **named: Any) -> Any:
    """Make a TCPStore. A master on loopback gets a socket that is bound to loopback only."""
    from torch.distributed import TCPStore  # start-up: imported where a store is made

    if is_master and host_name == LOOPBACK:
        named["master_listen_fd"] = socket.create_server((host_name, port), backlog=1024).detach()
    return TCPStore(host_name=host_name, port=port, is_master=is_master, **named)

"""The store of the ranks listens on loopback only."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import torch.distributed

from kimi_w4a8_eagle3.sglang_plugin.local_store import LOOPBACK, open_store


def test_a_store_listens_on_loopback_alone() -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    store = open_store(LOOPBACK, port, is_master=True, world_size=1, timeout=timedelta(seconds=30), multi_tenant=True)
    listening = [
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert listening == [LOOPBACK]
    other = open_store(LOOPBACK, port, world_size=1, timeout=timedelta(seconds=30))
    store.set("name", "value")
    assert isinstance(other, torch.distributed.TCPStore) and other.get("name") == b"value"

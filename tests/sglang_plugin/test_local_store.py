"""The store of the ranks listens on loopback only."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import torch.distributed
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.sglang_plugin.upkeep.local_store import LOOPBACK, open_store


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


PROGRAM = """
import importlib, json
from types import SimpleNamespace
from sglang.srt import runtime_context
from sglang.srt.distributed import bootstrap

store = lambda: importlib.import_module("torch.distributed.rendezvous").TCPStore.__module__.split(".")[0]
said = {}
for address in ("192.0.2.1:5000", None):
    parallel = SimpleNamespace(dist_init_addr=address)
    runtime_context.get_parallel = bootstrap.get_parallel = lambda: parallel
    said[str(address)] = [bootstrap._resolve_dist_init_method(dist_port=4711), store()]
print(json.dumps(said))
"""


@BOTH
def test_several_machines_keep_the_address_that_the_operator_gave(newest: bool) -> None:
    assert found(PROGRAM, newest) == {
        "192.0.2.1:5000": ["tcp://192.0.2.1:5000", "torch"],
        "None": ["tcp://127.0.0.1:4711", "kimi_w4a8_eagle3"],
    }

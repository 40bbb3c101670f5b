"""Assign each replica its own GPUs and its own port on loopback."""

from __future__ import annotations

import os
from dataclasses import replace

from ..base.errors import KimiError
from ..door.settings import is_loopback
from ..engine.process import free_port
from ..recipe.launch import Launch


def replica_launches(front: Launch) -> list[Launch]:
    """Return the launches of the recipe's replicas; `front` holds the address and settings that clients see.

    A replica differs from `front` by its GPUs, their NUMA nodes, its address and its door. Raises KimiError when there
    are too few GPUs.
    """
    devices, count = front.machine.devices, front.recipe.options.replicas
    gpus = front.tensor_parallel if devices else 0
    if gpus * count > len(devices):
        raise KimiError(
            f"{count} replicas of {gpus} GPUs need {count * gpus}, this machine has {len(devices)}",
            where="--replicas",
            remedy="start fewer replicas, or run several nodes behind `kimi-w4a8 route`",
        )
    return [_replica(front, number * gpus, gpus) for number in range(count)]


def _replica(front: Launch, first: int, gpus: int) -> Launch:
    args = {**front.args, "host": "127.0.0.1", "port": free_port()}
    if gpus:
        args["base-gpu-id"] = first
        nodes = replace(front.machine, devices=front.machine.devices[first:]).numa_nodes(gpus)
        if nodes is not None and args.get("numa-node") == front.machine.numa_nodes(gpus):
            args["numa-node"] = nodes
    env = {**front.env, "KIMI_DOOR": "closed"}  # only the router needs to reach it
    if is_loopback(front.host):  # without a key, /generate is open behind the router as it is without a router
        env["KIMI_DOOR_NATIVE"] = {**os.environ, **env}.get("KIMI_DOOR_NATIVE") or "keyless"
    return replace(front, args=args, env=env, door=replace(front.door, policy="closed"))

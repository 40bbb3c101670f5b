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

    A single one is `front` itself. One of several differs from it by its GPUs, its address and its door. The NUMA list
    stays, because SGLang looks a GPU up by its number on the machine, not by its rank. Raises KimiError when there are
    too few GPUs.
    """
    if front.recipe.options.replicas == 1:
        return [front]
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
    env = {**front.env, "KIMI_DOOR": "closed"}  # only the router needs to reach it
    if is_loopback(front.host):  # without a key, /generate is open behind the router as it is without a router
        env["KIMI_DOOR_NATIVE"] = {**os.environ, **env}.get("KIMI_DOOR_NATIVE") or "keyless"
    return replace(front, args=args, env=env, door=replace(front.door, policy="closed"))

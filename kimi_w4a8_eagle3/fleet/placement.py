"""Assign each replica its own GPUs and its own port on loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..base.errors import KimiError, UsageError
from ..door.settings import is_loopback
from ..engine.process import free_port
from ..machine.hardware import Machine
from ..recipe.launch import Launch
from ..recipe.schema import ArgValue


def replica_launches(
    front: Launch, count: int, machine: Machine, place: Callable[[Machine, dict[str, ArgValue]], Launch]
) -> Sequence[Launch]:
    """Return the launches of `count` replicas; `front` holds the address and settings that clients see.

    place: renders the recipe on a part of the machine, with some engine arguments replaced. Raises KimiError when there
    are too few GPUs.
    """
    if front.engine != "sglang":
        raise UsageError(
            f"the recipe {front.name!r} serves with {front.engine}",
            where="--replicas",
            expected="a recipe for SGLang, because its router is used",
        )
    gpus = front.tensor_parallel if machine.devices else 0
    if gpus * count > len(machine.devices):
        raise KimiError(
            f"{count} replicas of {gpus} GPUs need {count * gpus}, this machine has {len(machine.devices)}",
            where="--replicas",
            remedy="start fewer replicas, or run several nodes behind `kimi-w4a8 route`",
        )
    replicas = [_replica(number * gpus, gpus, machine, place) for number in range(count)]
    return [_as_open_as(front, replica) for replica in replicas]


def _as_open_as(front: Launch, replica: Launch) -> Launch:
    """On loopback without a key, open /generate behind the router as it is without a router."""
    if not is_loopback(front.host):
        return replica
    native = replica.env.get("KIMI_DOOR_NATIVE") or os.environ.get("KIMI_DOOR_NATIVE") or "keyless"
    return replace(replica, env={**replica.env, "KIMI_DOOR_NATIVE": native})


def _replica(
    first: int, gpus: int, machine: Machine, place: Callable[[Machine, dict[str, ArgValue]], Launch]
) -> Launch:
    part = replace(machine, devices=machine.devices[first : first + gpus])
    arguments: dict[str, ArgValue] = {"host": "127.0.0.1", "port": free_port()}
    if gpus:
        arguments["base_gpu_id"] = first
    launch = place(part, arguments)
    return replace(launch, env={**launch.env, "KIMI_DOOR": "closed"})  # only the router needs to reach it

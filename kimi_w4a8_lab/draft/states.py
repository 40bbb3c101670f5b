"""Files of the target's hidden states, one for each conversation, and the plan of what is still to be captured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import shortage

from .collected import STATES, SUFFIX, Collected, remove_killed
from .eagle3 import DraftSizes


@dataclass(frozen=True)
class CapturePlan:
    """Conversations whose states are still missing. token_bytes: bytes of states of one token."""

    folder: Path
    missing: list[Collected]
    done: int
    token_bytes: int

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self.missing)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def path(self, one: Collected) -> Path:
        """Return the file of a conversation's states."""
        return self.folder / f"{one.name}{SUFFIX}"


def capture_plan(folder: Path, conversations: Sequence[Collected], sizes: DraftSizes, target: str) -> CapturePlan:
    """Return what is to be captured; raise KimiError for states of another target, and for a disk that is too small.

    folder: of the collected requests. target: fingerprint of the target's weights, and the captured layers.
    """
    place = folder / STATES
    place.mkdir(mode=0o700, exist_ok=True)
    known = place / "target.txt"
    wanted = f"{target} layers {' '.join(map(str, sizes.captured))} hidden {sizes.target_hidden}"
    if known.exists() and known.read_text() != wanted:
        remedy = f"remove them, or collect into another folder: rm -r {place}"
        raise KimiError(f"the folder has states of another target: {known.read_text()}", str(place), wanted, remedy)
    known.write_text(wanted)
    for cut in place.glob("*.tmp"):
        cut.unlink(missing_ok=True)  # a stopped run was writing it
    remove_killed(place)
    missing = [one for one in conversations if not (place / f"{one.name}{SUFFIX}").exists()]
    plan = CapturePlan(place, missing, len(conversations) - len(missing), 2 * len(sizes.captured) * sizes.target_hidden)
    if error := shortage(place, plan.nbytes, "train on fewer conversations (--most)"):
        raise error
    return plan


def write_states(folder: Path, name: str, states: Tensor) -> None:
    """Write one conversation's states, BF16 [tokens, captured layers * hidden]; a reader never sees a part of them."""
    temporary = folder / f"{name}.{os.getpid()}.tmp"
    save_file({"states": states.bfloat16().contiguous()}, temporary)
    temporary.replace(folder / f"{name}{SUFFIX}")


@dataclass(frozen=True)
class StoredStates:
    """Reader of the states of conversations. folder: of the states. width: captured layers * hidden."""

    folder: Path
    width: int

    def __call__(self, conversations: Sequence[Collected]) -> Tensor:
        """Return the states, padded to the longest."""
        return pad_sequence([self.of(one.name, len(one.tokens)) for one in conversations], batch_first=True)

    def of(self, name: str, tokens: int) -> Tensor:
        """Return one conversation's states, BF16 [tokens, width]; raise KimiError for a missing, cut or other file."""
        file, expected = self.folder / f"{name}{SUFFIX}", f"BF16 [{tokens}, {self.width}]"
        remedy = f"rm -f {file}; kimi-w4a8 draft states {self.folder.parent}"
        try:
            states = load_file(file)["states"]
        except (FileNotFoundError, SafetensorError, KeyError, OSError) as error:
            raise KimiError("these states are missing or cut", str(file), expected, remedy) from error
        if tuple(states.shape) != (tokens, self.width):
            what = f"these states have the shape {list(states.shape)}: another draft's layers or another hidden size"
            raise KimiError(what, str(file), expected, remedy)
        return states


def device_of(name: str) -> torch.device:
    """Return a device that this torch has; raise KimiError for another."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise KimiError(f"this torch cannot use the device {name!r}", "--device", "cpu, cuda, cuda:1, ...") from error
    return device

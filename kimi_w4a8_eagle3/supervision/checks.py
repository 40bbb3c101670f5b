"""Checks before a start: what they need is on this disk and this machine, and they write nothing."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import constants

from ..base.errors import KimiError
from ..base.files import read_text
from ..base.installed import operator_dir, require
from ..base.run_dir import DEFAULT_ROOT
from ..engine.aiter_jit import jit_environment
from ..engine.process import require_free_port
from ..quark.preflight import preflight as preflight_files
from ..recipe.arguments import allows_code
from ..recipe.launch import Launch, unmet_requirements
from ..recipe.trusted_code import locate, require_trusted

DRAIN_TIMEOUT_S = 120.0
_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ServeOptions:
    """Options of `kimi-w4a8 serve` that are not part of a recipe.

    ops_port: port of probes and metrics; None is the port after the API's, 0 switches them off. preflight, hardware:
    False skips these checks.
    """

    ops_host: str = "127.0.0.1"
    ops_port: int | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    runs: Path = DEFAULT_ROOT
    preflight: bool = True
    hardware: bool = True

    def ops_beside(self, port: int) -> int:
        """Return the ops port of a server at `port`; 0 without probes and metrics."""
        return port + 1 if self.ops_port is None else self.ops_port


def ready_to_serve(launch: Launch, options: ServeOptions) -> Launch:
    """Return the launch that `kimi-w4a8 serve` can start at once; raise KimiError for anything that prevents it."""
    if options.hardware and (unmet := unmet_requirements(launch.recipe, launch.machine)):
        raise KimiError(
            f"this machine cannot serve the recipe {launch.name!r}: {unmet[0]}",
            remedy="add --dry-run to see the command, --any-hardware to start anyway, or `kimi-w4a8 serve tiny`",
        )
    launch = checked(launch, options.preflight)
    require_ports(options, launch.host, launch.port)
    return launch


def checked(launch: Launch, preflight: bool = True) -> Launch:
    """Check everything that files show before a start (code, headers, configs, identity) and return the final launch.

    Raises KimiError without SGLang, for a known fault, for a checkpoint's untrusted code (`trusted_code`) and for an
    incomplete W4A8 checkpoint on this disk (`preflight`). The engine gets the fingerprint of its weights, which it
    reports in every answer.
    """
    require("sglang")
    for fault in launch.refused:
        raise KimiError(
            fault.sentence,
            where=f"the known fault {fault.id}",
            remedy=f"{fault.remedy}; or take the risk: --set 'options.accept_faults=[\"{fault.id}\"]'",
        )
    answers_file(launch)
    if any(map(allows_code, launch.args)):
        launch = require_trusted(launch)
    if launch.recipe.hardware.gpus:
        launch = replace(launch, env=launch.env | jit_environment({**os.environ, **launch.env}))
    final = renewed(launch, preflight)
    return launch if "weight-version" in launch.args else final


def renewed(launch: Launch, preflight: bool = True) -> Launch:
    """Check the launch's checkpoints again, and return it with their fingerprint of now, unless the recipe has one.

    A draft may have been exchanged behind a link since the start.
    """
    weights = checked_weights(launch, preflight)
    if weights is None or "weight-version" in launch.recipe.args:
        return launch
    return launch.with_args(weight_version=weights)


def weight_files(launch: Launch) -> dict[Path, tuple[int, int]]:
    """Return size and time of change of each weight file of the launch that is on this disk."""
    folders = (
        local_folder(launch, launch.model, "revision"),
        local_folder(launch, launch.draft, "speculative-draft-model-revision"),
    )
    files = [path.resolve() for folder in folders if folder for path in folder.glob("*.safetensors")]
    return {path: ((status := path.stat()).st_size, status.st_mtime_ns) for path in files}


class ChangedWeights(KimiError):
    """Weights on the disk are others than at the server's start."""


def require_unchanged(launch: Launch, files: dict[Path, tuple[int, int]], preflight: bool = True) -> None:
    """Raise ChangedWeights if a weight file is another one than at the start: by size, time, header or samples."""
    now = weight_files(launch)
    changed = [path for path in {**files, **now} if files.get(path) != now.get(path)]
    if changed or renewed(launch, preflight).args != launch.args:
        raise ChangedWeights(
            "weights on the disk changed since this server started, so its engine is not started again with them",
            where=", ".join(map(str, changed[:3])) or launch.model,
            expected="the files of the start",
            remedy="put them back (kimi-w4a8 fetch --verify), or send SIGHUP, which takes the files of now",
        )


def checked_weights(launch: Launch, preflight: bool = True) -> str | None:
    """Check the launch's checkpoints and return their fingerprint; None when they are not on this disk yet."""
    model = local_folder(launch, launch.model, "revision")
    draft = local_folder(launch, launch.draft, "speculative-draft-model-revision")
    for name, folder, known in (("model", model, launch.recipe.model), ("draft", draft, launch.recipe.draft)):
        if folder and known and known.sha256 and (found := weights_digest(folder)) != known.sha256:
            what = f"the {name} is another one: sha256 {found}"
            raise KimiError(what, str(folder), known.sha256, f"correct {name}.repo or {name}.sha256 in the recipe")
    if model is not None and preflight:
        preflight_files(model, draft, launch.tensor_parallel).raise_for_problems()
    if model is None or (launch.draft is not None and draft is None):
        return None
    return fingerprint(*(folder for folder in (model, draft) if folder is not None))


def answers_file(launch: Launch) -> Path | None:
    """Return the file of recorded answers that the recipe names, if any; raise KimiError if they are not in it."""
    if not (named := launch.recipe.model.answers):
        return None
    packaged, expected = operator_dir("launch/answers") / f"{named}.json", "a file of `kimi-w4a8 check --record`"
    file = packaged if packaged.is_file() else Path(named)
    text = read_text(file, "the recorded answers", expected)
    with suppress(ValueError, AttributeError):
        if json.loads(text).keys() >= {"band", "prompts", "answers", "logprobs"}:
            return file
    raise KimiError("these are no recorded answers", str(file), expected, "correct model.answers in the recipe")


def require_ports(options: ServeOptions, host: str, port: int) -> None:
    """Raise KimiError when the API or the ops endpoint cannot start, because its port is taken."""
    require_free_port(host, port)
    if not (at := options.ops_beside(port)):
        return
    try:
        if at == port:
            raise KimiError(f"port {at} is the API's, too", expected="a port of its own")
        require_free_port(options.ops_host, at)
    except KimiError as error:
        raise replace(error, where="--ops-port", remedy="choose another port with --ops-port, or 0 for none") from error


def local_folder(launch: Launch, checkpoint: str | None, option: str) -> Path | None:
    """Return the folder of a checkpoint at the engine's revision on this disk, or None when it is not here."""
    if checkpoint is None:
        return None
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        return locate(checkpoint, str(launch.args.get(option, "main")), Path(constants.HF_HUB_CACHE)).folder
    except KimiError:
        return None


def fingerprint(*checkpoints: Path) -> str:
    """Return 12 hexadecimal digits that differ when the configs, tensor layouts or weights of these folders differ.

    Reads the JSON files, every safetensors header and a few blocks of every weight file, in seconds for 534 GB. It
    tells checkpoints apart. It does not detect a deliberate forgery, which `kimi-w4a8 fetch --verify` does.
    """
    digest = hashlib.sha256()
    for folder in checkpoints:
        for path in sorted(folder.glob("*.json")):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name}\0".encode())
            _add_samples(digest, path)
    return digest.hexdigest()[:12]


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of those of a checkpoint's config and of each weight file, which threads read."""
    with ThreadPoolExecutor(os.cpu_count()) as readers:
        digests = readers.map(_digest, (folder / "config.json", *sorted(folder.glob("*.safetensors"))))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.digest()


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, size)))
        body = file.tell()
        for sample in range(_SAMPLES):
            file.seek(body + (size - body) * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))

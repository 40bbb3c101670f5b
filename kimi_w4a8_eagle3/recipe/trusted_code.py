"""Python files of a checkpoint that may run, and the revision at which they run.

Under `--trust-remote-code` an engine executes `*.py` files that lie beside the weights. Only files run whose SHA-256 a
person recorded with `kimi-w4a8 trust`. The engine may not download others, and loses the option where a checkpoint
brings no code.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, snapshot_download
from pydantic import BaseModel, Field

from ..base.errors import KimiError
from ..base.files import write_atomic
from ..base.finding import Finding
from ..quark.safetensors_header import read_json
from .arguments import TRUST, allows_code
from .launch import Launch

VARIABLE = "KIMI_TRUSTED_CODE"
# transformers looks in these files for `auto_map`: names of classes to import from the checkpoint.
_MAPS = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A checkpoint on this disk, by the name that was asked for, and its commit if it is in the Hugging Face cache."""

    name: str
    folder: Path
    commit: str | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.commit}" if self.commit else self.name


@dataclass(frozen=True)
class CodeFile:
    """One Python file of a checkpoint; `name` is its path inside."""

    source: Source
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        return self.source.folder / self.name


class Accepted(BaseModel):
    """One file that a person accepted: its path inside the checkpoint, which checkpoint, and when."""

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    source: str = Field(alias="from", default="")
    recorded: str = ""


class TrustRecord(BaseModel):
    """The files that a person accepted, kept at `path`. Their names tell a changed file from a new one."""

    format: Literal[1] = 1
    files: list[Accepted] = []
    path: Path = Field(default=Path(), exclude=True)

    @classmethod
    def load(cls, path: Path | None = None) -> TrustRecord:
        """Read a record, by default this user's. No file is an empty record, a damaged one is a KimiError."""
        path = path or record_path(os.environ)
        try:
            return cls.model_validate_json(path.read_bytes()).model_copy(update={"path": path})
        except FileNotFoundError:
            return cls(path=path)
        except (OSError, ValueError) as error:
            raise KimiError(
                f"the record of trusted code cannot be read: {' '.join(str(error).split()):.200}",
                where=str(path),
                expected="a file that `kimi-w4a8 trust` wrote",
                remedy="delete it and run `kimi-w4a8 trust` again",
            ) from None

    def hashes(self, name: str) -> set[str]:
        """Return the accepted hashes of files with this name."""
        return {file.sha256 for file in self.files if file.name == name}

    def trusts(self, file: CodeFile) -> bool:
        return file.sha256 in self.hashes(file.name)

    def state(self, file: CodeFile) -> str:
        return "accepted" if self.trusts(file) else "changed" if self.hashes(file.name) else "new"

    def difference(self, file: CodeFile) -> str:
        """Describe a file that is not accepted."""
        recorded = ", ".join(sorted(self.hashes(file.name)))
        return f"changed, recorded {recorded}, found {file.sha256}" if recorded else f"new, SHA-256 {file.sha256}"

    def add(self, files: Iterable[CodeFile]) -> None:
        """Accept files and write the record."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        for file in files:
            if not self.trusts(file):
                entry = {"name": file.name, "sha256": file.sha256, "from": str(file.source), "recorded": now}
                self.files.append(Accepted.model_validate(entry))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, self.model_dump_json(indent=1, by_alias=True) + "\n")
        except OSError as error:
            raise KimiError(
                f"the record of trusted code cannot be written: {error.strerror}",
                where=str(self.path),
                remedy=f"name another file with {VARIABLE}",
            ) from error


def record_path(environment: Mapping[str, str]) -> Path:
    """Return `$KIMI_TRUSTED_CODE`, or `trusted-code.json` in the user's configuration folder.

    It is not beside the weights, where the author of a checkpoint could write it too.
    """
    if named := environment.get(VARIABLE):
        return Path(named)
    config = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "kimi-w4a8-eagle3" / "trusted-code.json"


def locate(name: str, revision: str, cache: Path) -> Source:
    """Find a checkpoint: a directory, or a repository in the Hugging Face cache. KimiError if it is not here."""
    with suppress(ValueError, RuntimeError):  # a NUL, or the home of an unknown user
        folder = Path(name).expanduser()
        if folder.is_dir():
            return Source(name, folder)
    if _HUB_ID.fullmatch(name):
        with suppress(OSError, ValueError):  # no such snapshot, or one that lacks a Python file of the repository
            found = snapshot_download(
                name, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns="*.py"
            )
            return Source(name, Path(found), Path(found).name)
    raise KimiError(
        f"{name} at {revision} is not on this disk, so the code it would bring cannot be checked before it runs",
        where=str(cache),
        expected="a checkpoint that was fetched before the engine starts",
        remedy=f"kimi-w4a8 fetch {name}" + (f" --revision {revision}" if revision != "main" else ""),
    )


def code_of(source: Source, cache: Path) -> list[CodeFile]:
    """Return every Python file that loading `source` could run; none when the checkpoint names no class of its own.

    All `*.py` of the checkpoint count, because the named ones import others. A class of another repository
    (`owner/name--module.Class`) brings that repository's files. A reference that leads elsewhere is a KimiError.
    """
    references = _references(source.folder)
    files = _python_files(source) if references else []
    for reference in sorted(references):
        repo, _, inner = reference.rpartition("--")
        home = source if repo in ("", source.name) else _locate_code(repo, source, cache)
        found = [file for file in files if file.source == home] or _python_files(home)
        module = f"{inner.rpartition('.')[0]}.py"
        if not any(file.name == module for file in found):
            raise KimiError(
                f"auto_map names {reference!r}, and there is no file {module} for it",
                where=str(home.folder),
                expected="a Python file of the checkpoint",
                remedy="fetch the checkpoint again; do not use it if the file is not in the repository",
            )
        files += [file for file in found if file not in files]
    return files


def _locate_code(repo: str, source: Source, cache: Path) -> Source:
    """Find the repository that `source` takes classes from. Engines ask for its default branch."""
    try:
        return locate(repo, "main", cache)
    except KimiError:
        raise KimiError(
            f"{source.name} takes its code from another repository, {repo}, which is not on this disk",
            where=str(source.folder),
            expected="that repository's Python files in the Hugging Face cache",
            remedy=f"hf download {repo} --include '*.py'",
        ) from None


def untrusted(files: Sequence[CodeFile], record: TrustRecord, names: Sequence[str]) -> KimiError | None:
    """Return one message about all files that are not accepted, or None. `names` are for `kimi-w4a8 trust`."""
    unknown = [file for file in files if not record.trusts(file)]
    if not unknown:
        return None
    lines = "".join(f"\n  - {file.name}: {record.difference(file)}" for file in unknown)
    sources = ", ".join(dict.fromkeys(str(file.source) for file in unknown))
    return KimiError(
        f"{sources} brings Python code that is not accepted here:{lines}",
        where=", ".join(dict.fromkeys(str(file.source.folder) for file in unknown)),
        expected=f"each file with a SHA-256 recorded in {record.path}",
        remedy=f"read the files, then: kimi-w4a8 trust {' '.join(names)} --yes (or set {VARIABLE} to a record)",
    )


def require_trusted(launch: Launch, record: TrustRecord | None = None, cache: Path | None = None) -> Launch:
    """Return the launch as it may run, or raise KimiError when it would execute code that is not recorded.

    Without `--trust-remote-code` nothing changes. Where no checkpoint brings code the option is left out. Otherwise
    revisions become the commits whose files were hashed, and the engine may not download anything.
    """
    arguments = launch.args
    if not any(allows_code(name) and value is not False for name, value in arguments.items()):
        return launch
    record, cache = record or TrustRecord.load(), cache or Path(constants.HF_HUB_CACHE)
    model = locate(launch.model, str(arguments.get("revision", "main")), cache)
    draft_revision = str(arguments.get("speculative-draft-model-revision", "main"))
    draft = locate(launch.draft, draft_revision, cache) if launch.draft else None
    named = arguments.get("tokenizer-path")
    tokenizer = locate(str(named), "main", cache) if named is not None else None
    code = {source: code_of(source, cache) for source in (model, draft, tokenizer) if source is not None}
    files = [file for found in code.values() for file in found]
    if not files:
        note = Finding(f"--{TRUST} left out: no checkpoint here brings code of its own")
        args = {name: value for name, value in arguments.items() if not allows_code(name)}
        return replace(launch, args=args, notes=[*launch.notes, note])
    unaccepted = [source.name for source, found in code.items() if not all(map(record.trusts, found))]
    if problem := untrusted(files, record, unaccepted):
        raise problem
    pins = {"revision": model.commit, "speculative-draft-model-revision": draft.commit if draft else None}
    if tokenizer is not None and tokenizer.commit:
        pins["tokenizer-path"] = str(tokenizer.folder)
    args = arguments | {name: value for name, value in pins.items() if value}
    note = Finding(
        f"--{TRUST}: {len(files)} files with the hashes recorded in {record.path}; revisions are pinned to what was "
        "hashed, HF_HUB_OFFLINE=1 keeps the engine from downloading other code"
    )
    return replace(launch, args=args, env={**launch.env, "HF_HUB_OFFLINE": "1"}, notes=[*launch.notes, note])


def _references(folder: Path) -> set[str]:
    """Return all class references in the `auto_map` tables of a checkpoint, however deep."""
    found: set[str] = set()
    for path in (folder / name for name in _MAPS):
        if path.exists():
            found.update(_strings(read_json(path), inside=False))
    return found


def _strings(value: object, inside: bool) -> Iterator[str]:
    """Yield the strings inside `auto_map`. An entry is a reference, or a pair of them of which one may be null."""
    if isinstance(value, str) and inside:
        yield value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _strings(item, inside or key == "auto_map")


def _python_files(source: Source) -> list[CodeFile]:
    paths = sorted(path for path in source.folder.rglob("*.py") if path.is_file())
    return [
        CodeFile(source, path.relative_to(source.folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in paths
    ]

"""Python files of a checkpoint that may run, and the revision at which they run.

Under `--trust-remote-code` an engine executes `*.py` files that lie beside the weights. `kimi-w4a8 trust` records their
SHA-256 once a person has read them. The engine runs these files at the commit that was hashed, and downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from ..base.errors import KimiError
from ..base.files import read_json, write_atomic
from ..base.finding import Finding
from .arguments import TRUST, allows_code
from .launch import Launch

VARIABLE = "KIMI_TRUSTED_CODE"
# transformers looks in these files for `auto_map`: names of classes to import from the checkpoint.
_MAPS = ("config", "tokenizer_config", "preprocessor_config", "processor_config", "video_preprocessor_config")


class Accepted(TypedDict):
    """What a person accepted of a checkpoint: its commit, if it has one, and the SHA-256 of its files by path."""

    revision: str | None
    files: dict[str, str]


Record = dict[str, Accepted]  # by the checkpoint's name
_RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class Source:
    """A checkpoint on this disk, by the name that was asked for, and its commit if it is in the Hugging Face cache."""

    name: str
    folder: Path
    commit: str | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.commit}" if self.commit else self.name

    def code(self) -> dict[str, str]:
        """Return the SHA-256 of every Python file by path; none when the checkpoint names no class of its own.

        All `*.py` count, because the named ones import others. A class from elsewhere is a KimiError.
        """
        references = set[str]()
        for path in (self.folder / f"{name}.json" for name in _MAPS):
            references |= {*_strings(read_json(path), inside=False)} if path.exists() else set()
        paths = sorted(path for path in self.folder.rglob("*.py") if path.is_file()) if references else []
        files = {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
        }
        for reference in sorted(references):
            if f"{reference.rpartition('.')[0].removeprefix(f'{self.name}--')}.py" not in files:
                raise KimiError(
                    f"auto_map names {reference!r}, which is no class in a file of this checkpoint",
                    where=str(self.folder),
                    expected="a Python file of the checkpoint",
                    remedy="fetch the checkpoint again; use none that takes its code from elsewhere",
                )
        return files


def record_path() -> Path:
    """Return `$KIMI_TRUSTED_CODE`, or `trusted-code.json` in the user's configuration folder.

    It is not beside the weights, where the author of a checkpoint could write it too.
    """
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get(VARIABLE) or Path(config) / "kimi-w4a8-eagle3" / "trusted-code.json")


def read_record() -> Record:
    """Return what was accepted: nothing without a file. A damaged file is a KimiError."""
    try:
        return _RECORD.validate_json(record_path().read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        what = f"the record of trusted code cannot be read: {' '.join(str(error).split()):.200}"
        raise KimiError(what, str(record_path()), remedy="delete it and run `kimi-w4a8 trust` again") from None


def accept(sources: Sequence[Source]) -> None:
    """Record the code of checkpoints as read."""
    record = read_record()
    record |= {one.name: Accepted(revision=one.commit, files=files) for one in sources if (files := one.code())}
    record_path().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(record_path(), json.dumps(record, indent=1) + "\n")


def state(source: Source) -> dict[str, str]:
    """Return "accepted", "changed", "new" or "missing" for each Python file. A copy elsewhere is accepted, too."""
    record, files = read_record(), source.code()
    if any(files == accepted["files"] for accepted in record.values()):
        return dict.fromkeys(files, "accepted")
    known = record[source.name]["files"] if source.name in record else {}
    found = {
        path: "new" if path not in known else "accepted" if known[path] == digest else "changed"
        for path, digest in files.items()
    }
    return found | dict.fromkeys(known.keys() - files.keys(), "missing") if files else {}


def untrusted(sources: Sequence[Source]) -> KimiError | None:
    """Return one message about all files that differ from the record, or None."""
    states = {source: state(source) for source in sources}
    bad = {source: found for source, found in states.items() if set(found.values()) - {"accepted"}}
    if not bad:
        return None
    files = "".join(
        f"\n  - {path}: {what}" for found in bad.values() for path, what in found.items() if what != "accepted"
    )
    names = " ".join(source.name for source in bad)
    return KimiError(
        f"{', '.join(map(str, bad))} brings Python code that is not accepted here:{files}",
        where=", ".join(str(source.folder) for source in bad),
        expected=f"the files that are recorded in {record_path()}",
        remedy=f"read the files, then: kimi-w4a8 trust {names} --yes (or set {VARIABLE} to a record)",
    )


def locate(name: str, revision: str = "main", cache: Path | None = None) -> Source:
    """Find a checkpoint: a directory, or a repository in the Hugging Face cache. KimiError if it is not here."""
    cache = cache or Path(constants.HF_HUB_CACHE)
    with suppress(ValueError, RuntimeError):  # a NUL, or the home of an unknown user
        folder = Path(name).expanduser()
        if folder.is_dir():
            return Source(name, folder)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        place: dict[str, Any] = {"cache_dir": cache, "local_files_only": True, "allow_patterns": "*.py"}
        with suppress(OSError, ValueError):  # no such snapshot, or one that lacks a Python file of the repository
            found = Path(snapshot_download(name, revision=revision, **place))
            return Source(name, found, found.name)
    raise KimiError(
        f"{name} at {revision} is not on this disk, so the code it would bring cannot be checked before it runs",
        where=str(cache),
        expected="a checkpoint that was fetched before the engine starts",
        remedy=f"kimi-w4a8 fetch {name}" + (f" --revision {revision}" if revision != "main" else ""),
    )


def require_trusted(launch: Launch) -> Launch:
    """Return the launch as it may run, or raise KimiError when it would execute code that is not recorded.

    Without `--trust-remote-code` nothing changes. Where no checkpoint brings code the option is left out. Otherwise
    revisions become the commits whose files were hashed, and the engine may not download anything.
    """
    arguments = launch.args
    if not any(allows_code(name) and value is not False for name, value in arguments.items()):
        return launch
    model = locate(launch.model, str(arguments.get("revision", "main")))
    sources, pins = [model], {"revision": model.commit}
    if launch.draft:
        draft = locate(launch.draft, str(arguments.get("speculative-draft-model-revision", "main")))
        sources, pins = [*sources, draft], {**pins, "speculative-draft-model-revision": draft.commit}
    if (named := arguments.get("tokenizer-path")) is not None:
        tokenizer = locate(str(named))
        sources = [*sources, tokenizer]
        pins["tokenizer-path"] = str(tokenizer.folder) if tokenizer.commit else None
    if not any(source.code() for source in sources):
        note = Finding(f"--{TRUST} left out: no checkpoint here brings code of its own")
        args = {name: value for name, value in arguments.items() if not allows_code(name)}
        return replace(launch, args=args, notes=[*launch.notes, note])
    if problem := untrusted(sources):
        raise problem
    note = Finding(f"--{TRUST}: the files are those in {record_path()}; revisions are pinned, and HF_HUB_OFFLINE=1")
    args = arguments | {name: value for name, value in pins.items() if value}
    return replace(launch, args=args, env={**launch.env, "HF_HUB_OFFLINE": "1"}, notes=[*launch.notes, note])


def _strings(value: object, inside: bool) -> Iterator[str]:
    """Yield the strings inside `auto_map`. An entry is a reference, or a pair of them of which one may be null."""
    if isinstance(value, str) and inside:
        yield value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _strings(item, inside or key == "auto_map")

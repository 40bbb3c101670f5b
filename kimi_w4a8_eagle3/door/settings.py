"""Settings of the door in front of every engine: keys, policy and limits, read once from the environment.

docs/security.md lists what is open and what is closed. SGLang never gets a key, because it writes its arguments,
including keys, into its log and into /server_info.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..base.errors import KimiError
from ..base.http import is_loopback
from ..base.nearest import nearest
from ..base.variable import Variable

Policy = Literal["auto", "open", "closed", "off"]
Native = Literal["closed", "keyless", "open"]
ValueChoice = Literal["any", "moonshot"]

API_KEY = "KIMI_API_KEY"
ADMIN_KEY = "KIMI_ADMIN_KEY"
FILE_SUFFIX = "_FILE"  # KIMI_API_KEY_FILE names a file that holds the key

_MIN_KEY = 8
# By the field of DoorSettings.
_FIELDS = {
    "policy": Variable("KIMI_DOOR", "choice", get_args(Policy)),
    "native": Variable("KIMI_DOOR_NATIVE", "choice", get_args(Native)),
    "stop_regex": Variable("KIMI_DOOR_STOP_REGEX", "choice", ("off", "on")),
    "values": Variable("KIMI_DOOR_VALUES", "choice", get_args(ValueChoice)),
    "max_body_bytes": Variable("KIMI_MAX_BODY_BYTES", "int", minimum=1),
    "max_prompt_tokens": Variable("KIMI_MAX_PROMPT_TOKENS", "int", minimum=1),
    "max_concurrent": Variable("KIMI_MAX_CONCURRENT_REQUESTS", "int", minimum=1),
    "max_sequences": Variable("KIMI_MAX_SEQUENCES", "int", minimum=1),
    "max_mask_ms": Variable("KIMI_MAX_MASK_MS", "int", minimum=1),
}
_KEYS = tuple(name + suffix for name in (API_KEY, ADMIN_KEY) for suffix in ("", FILE_SUFFIX))
VARIABLES = (*(variable.name for variable in _FIELDS.values()), *_KEYS)
# A misspelt limit would be no limit. Variables KIMI_API* belong to other programs, too.
_OURS = ("KIMI_DOOR", "KIMI_MAX_", "KIMI_ADMIN_")


@dataclass(frozen=True)
class DoorSettings:
    """The door's settings; its repr hides the keys.

    policy: access to endpoints that are not for clients. `open`: all clients; `closed`: holders of the admin key;
    `auto`: open on loopback without any key, closed otherwise; `off`: no door at all. native: client access to SGLang's
    own /generate: `open`, or `keyless` while there is no key. stop_regex: clients may send patterns for Python's `re`,
    whose time has no bound. max_prompt_tokens None: the model's context. max_concurrent None: no limit. max_sequences:
    prompts times `n` in one request. max_mask_ms: CPU time for one token's mask of a grammar. values: of sampling on
    /v1/chat/completions, `any` that the engine can compute or only those of Moonshot's own API.
    """

    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    policy: Policy = "auto"
    max_body_bytes: int = 32 * 2**20
    max_prompt_tokens: int | None = None
    max_concurrent: int | None = None
    max_sequences: int = 512
    native: Native = "closed"
    stop_regex: bool = False
    max_mask_ms: int = 20
    values: ValueChoice = "any"

    @property
    def native_open(self) -> bool:
        """True when clients may use /generate."""
        keyless = self.api_key is None and self.admin_key is None
        return self.native == "open" or (self.native == "keyless" and keyless)

    def admin_open(self, host: str) -> bool:
        """True when endpoints that are not for clients answer without an admin key on a server bound to `host`."""
        if self.policy == "auto":
            return self.api_key is None and self.admin_key is None and is_loopback(host)
        return self.policy == "open" and self.admin_key is None


def read_door(environ: Mapping[str, str]) -> DoorSettings:
    """Read the settings from `environ` (usually os.environ); KimiError for an unusable value or key file."""
    for name in environ:
        if name.startswith(_OURS) and name not in VARIABLES:
            raise KimiError(f"unknown variable {name}{nearest(name, VARIABLES)}", where="environment")
    given = {field: variable.parse(text) for field, variable in _FIELDS.items() if (text := environ.get(variable.name))}
    given["stop_regex"] = given.get("stop_regex") == "on"
    settings = DoorSettings(read_key(environ, API_KEY), read_key(environ, ADMIN_KEY), **given)
    if settings.policy == "off" and (settings.api_key or settings.admin_key):
        raise KimiError(
            "KIMI_DOOR=off, but a key is set that would not be checked",
            where="environment",
            expected="a key with a door, or neither",
        )
    return settings


def read_key(environ: Mapping[str, str], name: str) -> str | None:
    """Return the key in the variable `name`, or in the file that `name`_FILE names; None when neither is set."""
    in_file = environ.get(name + FILE_SUFFIX)
    if environ.get(name) and in_file:
        raise KimiError(
            f"both {name} and {name}{FILE_SUFFIX} are set", where="environment", expected="one of them, not both"
        )
    if in_file:
        return read_key_file(Path(in_file))
    key = environ.get(name)
    return _usable(key.strip(), name) if key else None


def without_keys() -> dict[str, str]:
    """Return variables that remove all keys from the environment of an engine that only its starter uses."""
    return dict.fromkeys(_KEYS, "")


def key_file_environment(path: Path, name: str = API_KEY) -> dict[str, str]:
    """Check a key file and return the variable that names it for an engine; the key itself is not in it."""
    read_key_file(path)
    return {name + FILE_SUFFIX: str(path.resolve())}


def client_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the key that a client sends to a server: from a file, or else from the variables that the server reads."""
    return read_key(environ, API_KEY) if path is None else read_key_file(path)


def read_key_file(path: Path) -> str:
    """Read the key from a file: its only line, at least 8 visible ASCII characters, unreadable for other users."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise KimiError(
            f"the key file cannot be read: {reason}",
            where=str(path),
            expected="a file with one line, the key",
            remedy=f"umask 077; openssl rand -hex 32 > {path}",
        ) from error
    if mode & stat.S_IROTH:
        raise KimiError(
            "every user of this machine can read the key file",
            where=str(path),
            expected="mode 0600, or 0640 with a group of its own",
            remedy=f"chmod 600 {path}",
        )
    return _usable(text, str(path))


def _usable(key: str, where: str) -> str:
    if len(key) >= _MIN_KEY and all("!" <= character <= "~" for character in key):
        return key
    raise KimiError(
        "this is not a usable key",  # a message never contains the key
        where=where,
        expected=f"one line of at least {_MIN_KEY} visible ASCII characters without spaces",
        remedy="openssl rand -hex 32",
    )

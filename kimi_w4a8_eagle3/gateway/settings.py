"""Settings of the gateway that an operator gives in the environment: keys of clients, and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import KimiError
from ..base.nearest import nearest
from ..base.variable import Variable
from .key_file import read_keys, usable

API_KEY = "KIMI_API_KEY"
API_KEY_FILE = "KIMI_API_KEY_FILE"
_LIMITS = {  # by the field of `Settings`
    "max_body_bytes": Variable("KIMI_MAX_BODY_BYTES", "int", minimum=1),
    "max_prompt_tokens": Variable("KIMI_MAX_PROMPT_TOKENS", "int", minimum=1),
    "max_running": Variable("KIMI_MAX_CONCURRENT_REQUESTS", "int", minimum=1),
    "max_mask_ms": Variable("KIMI_MAX_MASK_MS", "int", minimum=1),
}
VARIABLES = (*(variable.name for variable in _LIMITS.values()), API_KEY, API_KEY_FILE)


@dataclass(frozen=True)
class Settings:
    """Keys and limits; its repr hides the keys.

    key: of all clients, or key_file: several, one a line, read again when it changes. max_prompt_tokens: 0 for what
    the engine takes. max_running: requests of one key at a time, 0 for any number. max_mask_ms: CPU time for one
    token's mask of a grammar.
    """

    key: str = field(default="", repr=False)
    key_file: Path | None = None
    max_body_bytes: int = 32 * 2**20
    max_prompt_tokens: int = 0
    max_running: int = 0
    max_mask_ms: int = 20

    @property
    def needs_key(self) -> bool:
        """True if clients need a key."""
        return bool(self.key) or self.key_file is not None


def read_settings(environ: Mapping[str, str], read_keys_now: bool = True) -> Settings:
    """Read the settings from `environ`; KimiError for an unusable value or key file.

    read_keys_now: False for a key file that only another machine has.
    """
    for name in environ:  # a misspelt limit would be no limit
        if name.startswith("KIMI_MAX_") and name not in VARIABLES:
            raise KimiError(f"unknown variable {name}{nearest(name, VARIABLES)}", where="environment")
    given = {field: environ.get(variable.name, "") for field, variable in _LIMITS.items()}
    limits = {field: _LIMITS[field].parse(text) for field, text in given.items() if text}
    key, file = environ.get(API_KEY, "").strip(), environ.get(API_KEY_FILE)
    if key and file:
        raise KimiError(f"both {API_KEY} and {API_KEY_FILE} are set", "environment", "one of them, not both")
    if key and not usable(key):
        what = "this is not a usable key"  # a message never contains the key
        raise KimiError(what, API_KEY, "at least 8 visible ASCII characters without spaces", "openssl rand -hex 32")
    if file and (read_keys_now or Path(file).is_dir()):
        read_keys(Path(file))
    return Settings(key, Path(file).absolute() if file else None, **limits)


def client_key(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the key that a client sends to a server: from a file, or else from the variables that `serve` reads."""
    if file is None:
        settings = read_settings(environ)
        if settings.key_file is None:
            return settings.key or None
        file = settings.key_file
    return next(iter(read_keys(file).values()))

"""Fields of a body that reach the engine, by the lists of fields.toml.

Fields of operators and of SGLang itself are refused by name, as are fields that would change the answer if anything
read them. All others are dropped: agents send fields that only their vendor's server reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..base.toml import tomllib
from .answers import Refusal

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = logging.getLogger(__name__)

SAMPLING = "sampling_params"  # the fields of /generate's field of this name
STOP_REGEX = "stop_regex"
_WITH_STOP_REGEX = ("/v1/chat/completions", "/v1/completions", SAMPLING)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OPEN = {
    endpoint: names(" ".join([lists.get("fields", ""), *(_FILE["groups"][group] for group in lists.get("with", ()))]))
    for endpoint, lists in _FILE["endpoints"].items()
}
_DROPPED = names(_FILE["dropped"]["fields"])
_MEANT = frozenset().union(*OPEN.values(), *map(names, _FILE["refused"].values())) - _DROPPED
_MOST_NAMES = 64  # different names of dropped fields that are logged and counted: clients choose them


@dataclass(frozen=True)
class Fields:
    """The rule for the fields of all endpoints.

    known: every field that the engine knows. stop_regex: clients may send it. counted: fields that are
    dropped are logged and counted, except in a worker.
    """

    known: frozenset[str]
    stop_regex: bool
    counted: bool = True
    _logged: set[str] = field(default_factory=set)  # names of dropped fields

    def kept(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the fields of `given` that reach the engine; raise Refusal at a field that is not for clients.

        null always means not sent. A refused field may also be false, 0 or "", because load generators send all fields.
        """
        kept = {}
        open_ = OPEN[where] | ({STOP_REGEX} if self.stop_regex and where in _WITH_STOP_REGEX else set())
        for name, value in given.items():
            if value is None:
                continue
            if name in open_:
                kept[name] = value
            elif name in _DROPPED or name not in self.known | _MEANT:
                self.drop(name, where)
            elif value not in (False, 0, ""):
                why = (
                    f"{where} has no field {name!r}" if name in _MEANT else f"{name} is not for clients of this server"
                )
                raise Refusal(why, param=name)
        return kept

    def drop(self, name: str, where: str) -> None:
        """Count a dropped field or tool, and log its name once."""
        if not self.counted:
            return
        if name not in self._logged:
            if len(self._logged) >= _MOST_NAMES or not re.fullmatch(r"\w{1,60}", name, re.ASCII):
                name = "other"
            if name not in self._logged:
                self._logged.add(name)
                logger.info("door: dropped %s of %s, which no endpoint reads", name, where)
        with _counting:
            _counter().labels(name).inc()


_counting = Lock()  # two threads would make the counter twice, which is an error


@cache
def _counter() -> Counter:
    from prometheus_client import Counter  # it reads its environment when imported, and SGLang sets that late

    return Counter("kimi_door_dropped_fields", "Dropped fields and tools, which no endpoint reads.", ["field"])

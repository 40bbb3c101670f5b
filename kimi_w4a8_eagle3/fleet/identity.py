"""Identity of a replica: only replicas of the same model, weights and draft may be behind one router.

A router spreads requests without checking weights. A replica of another quantization, revision or draft would give some
users other answers, or another speed, at random, and nothing else in the stack would notice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import httpx

from ..base.errors import KimiError


@dataclass(frozen=True)
class Identity:
    """Properties that all replicas of one service share.

    model: the name that clients use. weights: `fingerprint` of target and draft. The engine gets it as its weight
    version and reports it in every answer; "default" for an engine started without it.
    """

    model: str
    weights: str
    architecture: str

    def differences(self, other: Identity) -> list[str]:
        """Return one phrase for each part in which `other` differs."""
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return [f"{name} {found!r} instead of {wanted!r}" for (name, wanted), found in pairs if found != wanted]


def ask_identity(base_url: str, http: httpx.Client) -> Identity:
    """Query the engine at `base_url`; httpx.HTTPError when it does not answer, KimiError for an invalid answer."""
    answer = http.get(f"{base_url}/model_info")
    answer.raise_for_status()
    try:
        info = answer.json()
        architectures = ",".join(info.get("architectures") or ())
        return Identity(str(info["served_model_name"]), str(info["weight_version"]), architectures)
    except (ValueError, KeyError, TypeError) as error:
        raise KimiError(
            "this is not an SGLang server",
            where=f"{base_url}/model_info",
            expected="served_model_name, weight_version and architectures as SGLang 0.5 returns them",
            remedy="give the address of an engine, not of its metrics or of another program",
        ) from error

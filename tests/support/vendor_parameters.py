"""Names of all parameters of the vendors' APIs, by release of their packages, in vendor_parameters.json.

`python -m support.vendor_parameters` in tests/, with the packages to list on the PYTHONPATH, adds them to the file.
"""

from __future__ import annotations

import json
from importlib import import_module, metadata
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
# Of each API the TypedDict of its requests; where there is one for streams, it stands beside it.
_TYPES = {
    "openai": {
        "chat.completions": "types.chat.completion_create_params CompletionCreateParams",
        "responses": "types.responses.response_create_params ResponseCreateParams",
        "completions": "types.completion_create_params CompletionCreateParams",
    },
    "anthropic": {
        "messages": "types.message_create_params MessageCreateParams",
        "beta.messages": "types.beta.message_create_params MessageCreateParams",
        "messages.count_tokens": "types.message_count_tokens_params MessageCountTokensParams",
        "beta.messages.count_tokens": "types.beta.message_count_tokens_params MessageCountTokensParams",
    },
}


def listed() -> dict[str, dict[str, str]]:
    """Return the names by release and API that are in the file."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def installed() -> dict[str, dict[str, str]]:
    """Return the names of the packages that can be imported."""
    return {
        f"{package} {metadata.version(package)}": {api: _names(package, *place.split()) for api, place in apis.items()}
        for package, apis in _TYPES.items()
    }


def _names(package: str, module: str, kind: str) -> str:
    found = vars(import_module(f"{package}.{module}"))
    kinds = [found[name] for name in (kind, f"{kind}NonStreaming", f"{kind}Streaming") if name in found]
    keys = [getattr(kind, f"__{which}_keys__", frozenset()) for kind in kinds for which in ("required", "optional")]
    return " ".join(sorted(set().union(*keys)))


if __name__ == "__main__":
    FILE.write_text(json.dumps(dict(sorted({**listed(), **installed()}.items())), indent=1) + "\n")

"""Access classes of SGLang's endpoints.

The lists name what clients need, not what is dangerous. SGLang marks some endpoints as administrative but forgets
/server_info, /open_session and others, and every release adds endpoints. All unlisted endpoints are for the operator.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from starlette.routing import Match


class Access(Enum):
    """Group of users that an endpoint is for."""

    PUBLIC = "public"  # probes, scrapers, and the router, which sends no key when it queries a worker
    CLIENT = "client"
    NATIVE = "native"  # SGLang's own API: for clients only where the operator opened it
    ADMIN = "admin"


# Public endpoints whose answers cost the event loop or the scheduler time.
COMPUTED = frozenset({"/health", "/health_generate", "/metrics", "/metrics/", "/v1/loads"})
_PUBLIC = COMPUTED | {"/ready", "/ping", "/model_info", "/get_model_info"}
# The settings of the whole engine. An operator gets all of them, other callers only those that name the model.
SERVER_INFO = frozenset({"/server_info", "/get_server_info"})

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
TOKENIZE = frozenset({"/v1/tokenize", "/tokenize"})
DETOKENIZE = frozenset({"/v1/detokenize", "/detokenize"})

# Endpoints whose JSON body is read and checked before SGLang sees it.
CHECKED = frozenset({CHAT, COMPLETIONS, GENERATE, MESSAGES, COUNT_TOKENS, RESPONSES}) | TOKENIZE | DETOKENIZE
# Endpoints that generate tokens; they count against the limit on concurrent requests.
GENERATING = frozenset({CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES})

_CLIENT = (CHECKED - {GENERATE}) | {"/", "/v1/models"}
_CLIENT_FOLDERS = ("/v1/models/", "/v1/responses/")


def classify(path: str) -> Access:
    """Return the access class of `path`, from the lists alone: the key is checked before routes are matched."""
    if path in _PUBLIC or path in SERVER_INFO:
        return Access.PUBLIC
    if path == GENERATE:
        return Access.NATIVE
    if path in _CLIENT or path.startswith(_CLIENT_FOLDERS):
        return Access.CLIENT
    return Access.ADMIN


def serves(app: Any, scope: dict[str, Any]) -> bool:
    """True when a route of the application matches the path, with this or another method."""
    return any(route.matches(scope)[0] != Match.NONE for route in app.router.routes)

"""huggingface_hub's client, with its log off, and the messages for its errors.

The endpoint and the token come from huggingface_hub's own settings: `HF_ENDPOINT`, `HF_TOKEN`, the token file. No
message shows the token or a signed address: text from elsewhere passes through `scrub`.
"""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # of its HTTP library: httpx, from huggingface_hub 2 on httpx2
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._http import default_client_factory

from ..base.errors import KimiError
from ..base.http import is_loopback


class HubUnreachable(KimiError):
    """The Hub does not answer at all, so asking about another repository is pointless."""


def quiet_hub() -> HfApi:
    """Return the client of this process. Its log stays off, because it shows signed addresses."""
    hub_logging.set_verbosity(logging.CRITICAL + 1)
    set_client_factory(_client)
    return HfApi(constants.ENDPOINT)


def ask_hub(repo: str, revision: str) -> None:
    """Raise KimiError if the Hub does not answer, or does not give a repository."""
    try:
        quiet_hub().repo_info(repo, revision=revision, timeout=30)
    except Exception as error:
        raise explain(error, f"{repo} at {revision}") from None


def _client() -> Any:
    """Return a client of huggingface_hub's HTTP library."""
    client = default_client_factory()
    client.event_hooks["request"].append(_check_token)
    client.event_hooks["response"].append(_check_storage)
    return client


def _check_token(request: Any) -> None:
    """Raise before the Hub's token is sent elsewhere: the Hub names the address from which a right to Xet comes."""
    if "authorization" in request.headers and _origin(str(request.url)) != _origin(constants.ENDPOINT):
        scheme, host, _ = _origin(str(request.url))
        raise KimiError(f"the token is not sent to {scheme}://{host}, because it is not the Hub")


def _origin(address: str) -> tuple[str, str | None, int | None]:
    url = urlsplit(address)
    return url.scheme, url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _check_storage(response: Any) -> None:
    """Raise for a Xet storage that would get the token of a download in plain text."""
    if (address := response.headers.get(constants.HUGGINGFACE_HEADER_X_XET_ENDPOINT)) is not None:
        url = urlsplit(address)
        if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
            raise KimiError(f"the Xet storage at {address!a:.80} is not used, because it is not https")


def scrub(text: object) -> str:
    """Return text that may be shown: without the token, and without credentials or signatures in addresses."""
    shown = str(text).replace(get_token() or "\n", "***")
    shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)


# By type of error, the first that fits: what happened, and what to do.
_MESSAGES: tuple[tuple[type[Exception], str, str], ...] = (
    (GatedRepoError, "{} is restricted", "accept the model's terms on its page; set HF_TOKEN or run `hf auth login`"),
    (RevisionNotFoundError, "no such revision: {}", "name a branch, a tag or a commit"),
    (RepositoryNotFoundError, "no {}, or it is private", "check spelling; set HF_TOKEN or run `hf auth login`"),
    (HfHubHTTPError, "{} was refused", "repeat the command later, which keeps complete files; check HF_TOKEN"),
    (HTTPError, "cannot reach the Hub for {}", "check network, HTTPS_PROXY and HF_ENDPOINT; or use --offline"),
    (FileMetadataError, "unusable answer for {}", "check whether a proxy or a login page answers in the Hub's place"),
    (OSError, "cannot store {}", "make room and check permissions, or choose another place with HF_HOME"),
    (Exception, "unusable answer for {}", "check whether a proxy or a login page answers in the Hub's place"),
)


def explain(error: BaseException, asked: str) -> KimiError:
    """Return the message for an error of huggingface_hub, its HTTP library or the disk."""
    while error.__cause__ and not isinstance(error, (KimiError, HTTPError)):
        error = error.__cause__  # huggingface_hub says that the file is not on this disk either
    if isinstance(error, KimiError):
        return error
    what, remedy = next((what, remedy) for kind, what, remedy in _MESSAGES if isinstance(error, kind))
    status = f"HTTP {error.response.status_code}" if isinstance(error, HfHubHTTPError) else scrub(error)
    message = HubUnreachable if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError) else KimiError
    return message(f"{what.format(asked)}: {status or type(error).__name__}", scrub(constants.ENDPOINT), remedy=remedy)

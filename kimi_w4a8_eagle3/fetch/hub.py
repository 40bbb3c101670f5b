"""huggingface_hub's client with every answer of the Hub checked, and the messages for its errors.

The endpoint and the token come from huggingface_hub's own settings: `HF_ENDPOINT`, `HF_TOKEN`, the token file. No
message shows the token or a signed address: text from elsewhere passes through `scrub`.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._http import default_client_factory

from ..base.errors import KimiError
from . import names

XET_SCHEMES = ("https",)  # of addresses of Xet storage
# Names in the Hub's JSON: of a repository, its files, and their part for large-file storage.
_NAMES = {
    "sha": names.commit,
    **dict.fromkeys(("path", "rfilename"), names.repository_path),
    **dict.fromkeys(("oid", "blobId", "sha256", "xetHash"), names.digest),
}


class XetRefused(RuntimeError):
    """Xet storage must not be used. It is no error of the Hub: plain HTTP brings the files, too."""


class HubUnreachable(KimiError):
    """The Hub does not answer at all, so asking about another repository is pointless."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a listing; `digest` names its blob in the cache."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """All files of a repository at one commit."""

    commit: str
    files: list[RemoteFile]


@contextmanager
def hub_client() -> Iterator[HfApi]:
    """Yield huggingface_hub's client. Its log is off meanwhile, because it shows signed addresses."""
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL + 1)
    set_client_factory(_checked_client)
    try:
        yield HfApi(constants.ENDPOINT)
    finally:
        set_client_factory(default_client_factory)
        hub_logging.set_verbosity(verbosity)


def list_files(repo: str, revision: str, kind: str = "model") -> Listing:
    """Return a repository's files; raise KimiError if the Hub does not answer, refuses or has none."""
    try:
        with hub_client() as api:
            ask = api.dataset_info if kind == "dataset" else api.model_info
            info = ask(repo, revision=revision, files_metadata=True, timeout=30)
        files = [
            RemoteFile(one.rfilename, one.size or 0, names.digest(one.lfs.sha256 if one.lfs else one.blob_id))
            for one in info.siblings or []
        ]
        commit = names.commit(info.sha)
    except Exception as error:
        raise explain(error, f"{repo} at {revision}") from None
    if not files:
        raise KimiError(f"{repo} is empty at revision {revision}", constants.ENDPOINT, remedy="check the revision")
    return Listing(commit, files)


def _checked_client() -> httpx.Client:
    client = default_client_factory()
    client.event_hooks["response"].append(_check_answer)
    return client


def _check_answer(response: httpx.Response) -> None:
    """Raise ValueError for a name that must not become a path, or an address that must not be asked.

    huggingface_hub joins etags, commits and paths to the cache folder, and sends the token to the next page.
    """
    for header in ("x-linked-etag", "etag") if response.request.method == "HEAD" else ():
        if (etag := response.headers.get(header)) and "/" in names.repository_path(etag.lstrip("W/").strip('"')):
            raise ValueError(f"{etag!a:.80} is not an etag")
    if commit := response.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT):
        names.commit(commit)
    storage = response.headers.get(constants.HUGGINGFACE_HEADER_X_XET_ENDPOINT)
    if storage is not None and storage.split("://")[0] not in XET_SCHEMES:
        raise XetRefused(f"Xet storage at {storage!a:.80}")
    if re.match(r"/api/(models|datasets)/", response.request.url.path) and response.is_success:
        response.read()
        _check_listing(response)


def _check_listing(response: httpx.Response) -> None:
    content = response.json() if response.content else {}
    entries = content if isinstance(content, list) else [content, *content.get("siblings", [])]
    for entry in entries:
        for part in (entry, entry.get("lfs") or {}):
            for key in part.keys() & _NAMES:
                _NAMES[key](part[key])
            if not isinstance(size := part.get("size", 0), int):
                raise ValueError(f"{size!a:.40} is not a file size")
    page, asked = response.links.get("next", {}).get("url"), response.request.url
    if page is not None and (url := httpx.URL(page)).netloc + url.raw_scheme != asked.netloc + asked.raw_scheme:
        raise ValueError(f"the next page of the listing is at another host: {url.host!a:.80}")


def scrub(text: object) -> str:
    """Return text that may be shown: without the token, and without credentials or signatures in addresses."""
    shown = str(text).replace(get_token() or "\n", "***")
    shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    shown = re.sub(r"(https?://)[^/\s@]+@", r"\1***@", shown)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", shown)


def failure(error: Exception) -> Exception:
    """Return the failed request's own error. huggingface_hub wraps it in "not on this disk either"."""
    wrapped = isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception)
    return error.__cause__ if wrapped else error  # type: ignore[return-value]


def explain(error: Exception, asked: str, folder: Path | None = None) -> KimiError:
    """Return the message for an error of huggingface_hub or httpx, or of the disk that has `folder`."""
    if isinstance(error, KimiError):
        return error
    error, endpoint = failure(error), scrub(constants.ENDPOINT)
    if isinstance(error, HfHubHTTPError):
        return _refusal(error.response.status_code, asked, endpoint)
    problem = f"{type(error).__name__}: {scrub(error)}"
    if isinstance(error, httpx.RequestError):
        return HubUnreachable(
            f"cannot reach the Hub: {problem}",
            where=endpoint,
            expected=f"{httpx.URL(constants.ENDPOINT).host or 'http://HOST'} answers",
            remedy="check network, proxy (HTTPS_PROXY) and HF_ENDPOINT; --offline shows what is on this disk",
        )
    if isinstance(error, OSError) and not isinstance(error, FileMetadataError):
        return disk_error(error, folder)
    return KimiError(
        f"malformed answer from the Hub: {problem}",
        where=f"{asked} ({endpoint})",
        expected="a commit, and files with relative paths, sizes and digests",
        remedy="check HF_ENDPOINT, and whether a proxy or a login page answers in the Hub's place",
    )


def _refusal(status: int, asked: str, endpoint: str) -> KimiError:
    """Return the message for an HTTP status."""
    if status in (401, 403):
        token = "the token was refused" if get_token() else "no token is set"
        what = f"the Hub refuses access to {asked} (HTTP {status}): {token}"
        remedy = "check the name; accept the model's terms on its page; set HF_TOKEN or run `hf auth login`"
        return KimiError(what, endpoint, "a public repository, or a token that may read it", remedy)
    if status == 404:
        remedy = "check spelling and revision; a private repository needs HF_TOKEN"
        return KimiError(f"the Hub has no {asked} (HTTP 404)", endpoint, remedy=remedy)
    again = "repeat the command later; complete files are kept"
    if status == 429:
        what = f"the Hub limits the request rate of {asked} (HTTP 429)"
        return KimiError(what, endpoint, remedy=f"{again}, and a token raises the limit")
    return KimiError(f"the Hub answers HTTP {status} for {asked}", endpoint, remedy=again)


def disk_error(error: OSError, folder: Path | None) -> KimiError:
    """Return the message for a disk that takes no more."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space, or choose another place with HF_HOME; complete files are kept"
        return KimiError("the disk is full", where=str(folder), remedy=remedy)
    what = f"cannot write: {error.strerror or scrub(error)}"
    return KimiError(what, where=str(folder), remedy="check the directory's permissions")

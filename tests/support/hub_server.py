"""A Hugging Face Hub on loopback: the endpoints that huggingface_hub calls to list and download a model, with faults.

Two servers, as in reality: the Hub (API, small files, redirects) and its storage, another origin to which large files
are redirected by a signed address and to which a client must not send its token. Every request is kept in `log`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.loopback import Handler, LoopbackServer

SIGNATURE = "c2lnbmF0dXJl"


@dataclass
class Repo:
    """A model repository: `files` by path; those over 1 kB are in large-file storage."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    branches: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    xet: dict[str, str] = field(default_factory=dict)  # hashes of files in Xet storage, by path

    def is_large(self, path: str) -> bool:
        return len(self.files[path]) > 1000

    def digest(self, path: str) -> str:
        data = self.files[path]
        if self.is_large(path):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Fault:
    """Fault of the answer to a request for a file's bytes. `times` requests are hit; None means all of them.

    `status`: answer this instead (with `body`). `cut`: close the connection after so many bytes of the answer. `hold`:
    after `cut` bytes keep the connection open, silent, until the server closes. `damage`: flip a byte.
    """

    status: int | None = None
    cut: int | None = None
    hold: bool = False
    damage: bool = False
    times: int | None = 1
    body: bytes = b""


@dataclass(frozen=True)
class Request:
    """One answered request. `origin` is "hub" or "storage"; `path` is the file's path for file requests."""

    origin: str
    method: str
    path: str
    range: str | None
    status: int
    sent: int
    authorized: bool


class HubServer:
    """`endpoint` goes into HF_ENDPOINT. `faults[path]` is a list of faults, used in order.

    `xet_storage` is the address that it names for the files with a hash in `Repo.xet`, and `xet_route`, if set, the
    address that a file's headers name as the place to get the right to that storage from. Then the listing has no hash.
    """

    def __init__(self, repos: dict[str, Repo], page: int = 1000) -> None:
        self.repos, self.page = repos, page
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.log: list[Request] = []
        self.xet_storage = self.xet_route = ""
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._hub = LoopbackServer(type("Hub", (_HubHandler,), {"hub": self}))
        # huggingface_hub tells Hub and storage apart by host name, so the port alone is not enough.
        self._storage = LoopbackServer(type("Storage", (_StorageHandler,), {"hub": self}), "127.0.0.2")
        self.endpoint, self.storage = self._hub.base_url, self._storage.base_url

    def close(self) -> None:
        self.closing.set()
        for server in (self._hub, self._storage):
            server.close()

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            queue = self.faults[path]
            if not queue:
                return None
            if queue[0].times is None:
                return queue[0]
            queue[0].times -= 1
            return queue.pop(0) if queue[0].times == 0 else queue[0]

    def gets(self, path: str) -> list[Request]:
        """Requests for a file's bytes, without redirects."""
        with self.lock:
            return [r for r in self.log if r.path == path and r.method == "GET" and r.status not in (302, 307)]

    def sent(self, path: str) -> int:
        """Bytes of a file that left the server."""
        return sum(request.sent for request in self.gets(path) if request.status in (200, 206))


def serve(repos: dict[str, Repo], page: int = 1000) -> closing[HubServer]:
    return closing(HubServer(repos, page))


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    origin = ""

    def note(self, path: str, status: int, sent: int = 0) -> None:
        authorized = "authorization" in self.headers
        entry = Request(self.origin, self.command, path, self.headers.get("range"), status, sent, authorized)
        with self.hub.lock:
            self.hub.log.append(entry)

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, path: str = "") -> None:
        self.note(path or self.path, status)
        self.send(status, body, headers or {})

    def reply_error(self, status: int, code: str, message: str, path: str = "") -> None:
        self.reply(status, b"{}", {"x-error-code": code, "x-error-message": message}, path)

    def send_file(self, path: str, data: bytes, headers: dict[str, str]) -> None:
        """The bytes of a file, by Range if asked, with the next fault that is set for it."""
        fault = (self.hub.take_fault(path) if self.command == "GET" else None) or Fault()
        if fault.status:
            return self.reply(fault.status, fault.body, {}, path)
        start, asked = 0, self.headers.get("range")
        if asked:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(data):
                return self.reply(416, b"", {"content-range": f"bytes */{len(data)}"}, path)
            headers = headers | {"content-range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        body = data[start:]
        status = 206 if "content-range" in headers else 200
        if fault.damage:
            body = bytes([body[0] ^ 1]) + body[1:]
        sent = body if fault.cut is None else body[: fault.cut]
        self.note(path, status, len(sent) if self.command == "GET" else 0)
        self.send_response(status)
        length = {"content-length": str(len(body))}
        for name, value in (length | {"accept-ranges": "bytes"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.wfile.write(sent)
        if fault.cut is not None:
            self.wfile.flush()
            if fault.hold:
                self.hub.closing.wait(60)
            self.close_connection = True
        return None


class _HubHandler(_Handler):
    origin = "hub"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "datasets":  # an address of a file of a data set; the name alone decides here
            parts.pop(0)
        if parts[:2] in (["api", "models"], ["api", "datasets"]):
            return self.api(parts[2:], parse_qs(url.query))
        if parts[:2] == ["api", "resolve-cache"]:
            return self.small_file(f"{parts[3]}/{parts[4]}", "/".join(parts[6:]))
        if len(parts) > 4 and parts[2] == "resolve":
            return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self.reply_error(404, "NotFound", "no such page")

    do_HEAD = do_GET

    def repo(self, name: str, revision: str, path: str = "") -> Repo | None:
        """The repository if this request may see it at this revision; else the Hub's error has been sent."""
        repo = self.hub.repos.get(name)
        given = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if repo is None or (repo.token and not given):
            self.reply_error(404 if repo is None and given else 401, "RepoNotFound", "Repository not found", path)
        elif repo.token and given != repo.token:
            self.reply_error(401, "", "Invalid credentials in Authorization header", path)
        elif repo.gated and path:  # what it is can be read; its files cannot
            self.reply_error(403, "GatedRepo", "Access to this model is restricted", path)
        elif revision not in (repo.commit, *repo.branches):
            self.reply_error(404, "RevisionNotFound", f"Invalid rev id: {revision}", path)
        else:
            return repo
        return None

    def api(self, parts: list[str], query: dict[str, list[str]]) -> None:
        name, verb, revision = "/".join(parts[:2]), *[*parts[2:4], "", "main"][:2]
        if fault := self.hub.take_fault("api"):
            return self.reply(fault.status or 500, fault.body, {}, "api")
        repo = self.repo(name, revision)
        if repo is None:
            return None
        if verb == "xet-read-token":
            store = {"x-xet-cas-url": self.hub.xet_storage, "x-xet-access-token": "short-lived"}
            body = {"casUrl": self.hub.xet_storage, "accessToken": "short-lived", "exp": 4102444800}
            store |= {"x-xet-token-expiration": "4102444800"}
            return self.reply(200, json.dumps(body).encode(), store, "xet-read-token")
        if verb == "tree":
            return self.tree(name, repo, revision, int(query.get("cursor", ["0"])[0]), "/".join([*parts[4:], ""]))
        siblings = [{"rfilename": path} for path in repo.files]
        info = {"_id": "0", "id": name, "sha": repo.commit, "private": False, "tags": [], "siblings": siblings}
        return self.reply(200, json.dumps(info | {"downloads": 0, "likes": 0}).encode())

    def tree(self, name: str, repo: Repo, revision: str, cursor: int, below: str) -> None:
        """One page of the recursive listing of a folder; the next one is named in a Link header."""
        paths = sorted(path for path in repo.files if path.startswith(below.lstrip("/")))
        folders = sorted({path.rsplit("/", 1)[0] for path in paths if "/" in path})
        entries = [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]
        for path in paths:
            entry = {"type": "file", "path": path, "size": len(repo.files[path]), "oid": repo.digest(path)}
            if repo.is_large(path):
                pointer = {"oid": repo.digest(path), "size": len(repo.files[path]), "pointerSize": 134}
                entry |= {"oid": "1" * 40, "lfs": pointer}
            if path in repo.xet and not self.hub.xet_route:
                entry["xetHash"] = repo.xet[path]
            entries.append(entry)
        headers = {"content-type": "application/json"}
        if cursor + self.hub.page < len(entries):
            address = f"{self.hub.endpoint}/api/models/{name}/tree/{revision}"
            headers["link"] = f'<{address}?recursive=true&cursor={cursor + self.hub.page}>; rel="next"'
        self.reply(200, json.dumps(entries[cursor : cursor + self.hub.page]).encode(), headers)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name, revision, path)
        if repo is None:
            return None
        if path not in repo.files:
            return self.reply_error(404, "EntryNotFound", "Entry not found", path)
        headers = {"x-repo-commit": repo.commit}
        if not repo.is_large(path):
            # Small files: a redirect within the Hub, which keeps the authorization.
            location = f"/api/resolve-cache/models/{name}/{repo.commit}/{quote(path)}"
            return self.reply(307, b"", headers | {"location": location, "etag": f'"{repo.digest(path)}"'}, path)
        if path in repo.xet:
            route = f"{self.hub.endpoint}/api/models/{name}/xet-read-token/{repo.commit}"
            headers |= {"x-xet-hash": repo.xet[path], "x-xet-refresh-route": self.hub.xet_route or route}
        size, digest = str(len(repo.files[path])), repo.digest(path)
        headers = {"x-linked-size": size, "x-linked-etag": f'"{digest}"'} | headers
        location = f"{self.hub.storage}/{name}/{digest}/{quote(path)}?X-Signature={SIGNATURE}"
        return self.reply(302, b"", headers | {"location": location}, path)

    def small_file(self, name: str, path: str) -> None:
        repo = self.repo(name, "main", path)
        if repo is not None:
            headers = {"x-repo-commit": repo.commit, "etag": f'"{repo.digest(path)}"'}
            self.send_file(path, repo.files[path], headers)


class _StorageHandler(_Handler):
    origin = "storage"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        owner, name, digest, *rest = url.path.strip("/").split("/")
        path = unquote("/".join(rest))
        if parse_qs(url.query).get("X-Signature") != [SIGNATURE]:
            return self.reply(403, b"", path=path)
        repo = self.hub.repos[f"{owner}/{name}"]
        return self.send_file(path, repo.files[path], {"etag": f'"{digest}"'})

    do_HEAD = do_GET

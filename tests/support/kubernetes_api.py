"""The part of a Kubernetes API server that a watcher of pods asks: list and watch, as strict as a real one.

A request without the token is 401, and what the Role does not grant is 403. A list has a resource version, and a watch
sends the changes after one, a line of JSON each, in order, until its time is over.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.loopback import Handler, LoopbackServer

TOKEN = "a-token-of-the-service-account"
Pod = dict[str, Any]


def pod(name: str, address: str, labels: dict[str, str], ready: bool = True) -> Pod:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "kimi", "uid": f"uid-{name}", "labels": labels},
        "spec": {"containers": [{"name": "kimi", "image": "kimi-w4a8-eagle3"}]},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition]},
    }


@dataclass
class Cluster:
    """Pods of one namespace and their history. rules: of the Role that the token has there."""

    namespace: str
    rules: list[dict[str, list[str]]]
    pods: dict[str, Pod] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    url: str = ""
    _events: list[tuple[int, str, Pod]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, made: Pod) -> None:
        """Add a pod, or change the one of this name."""
        with self._changed:
            kind = "MODIFIED" if made["metadata"]["name"] in self.pods else "ADDED"
            self._record(kind, made)
            self.pods[made["metadata"]["name"]] = made

    def delete(self, name: str) -> None:
        with self._changed:
            self._record("DELETED", self.pods.pop(name))

    def kubeconfig(self, folder: Path) -> Path:
        """Write the file that KUBECONFIG names."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "smg", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "smg", "namespace": self.namespace}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(content))
        return path

    def may(self, verb: str, resource: str) -> bool:
        return any(verb in r["verbs"] and resource in r["resources"] and "" in r["apiGroups"] for r in self.rules)

    def listed(self, labels: dict[str, str]) -> dict[str, Any]:
        with self._changed:
            items = [one for one in self.pods.values() if _fits(one, labels)]
            version = str(len(self._events))
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}

    def watched(self, labels: dict[str, str], since: int, seconds: float) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with self._changed:
                if len(self._events) == since:
                    self._changed.wait(min(left, 1.0))
                new, since = self._events[since:], len(self._events)
            yield from ({"type": kind, "object": one} for _, kind, one in new if _fits(one, labels))

    def _record(self, kind: str, made: Pod) -> None:
        made["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        self._events.append((len(self._events) + 1, kind, json.loads(json.dumps(made))))
        self._changed.notify_all()


def _fits(one: Pod, labels: dict[str, str]) -> bool:
    return labels.items() <= one["metadata"]["labels"].items()


@contextmanager
def cluster(namespace: str, rules: list[dict[str, list[str]]]) -> Iterator[Cluster]:
    """Serve a cluster without pods."""
    state = Cluster(namespace, rules)

    class Watched(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            watch = query.get("watch") in ("true", "1")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._refuse(401, "Unauthorized")
            elif parts.path != f"/api/v1/namespaces/{state.namespace}/pods":
                self._refuse(403 if parts.path.startswith("/api/v1/") else 404, "Forbidden")
            elif not state.may("watch" if watch else "list", "pods"):
                self._refuse(403, "Forbidden")
            else:
                selector = query.get("labelSelector", "")
                labels = dict(part.split("=", 1) for part in selector.split(",") if part)
                if watch:
                    self._stream(state.watched(labels, int(query["resourceVersion"]), float(query["timeoutSeconds"])))
                else:
                    self._send(200, json.dumps(state.listed(labels)).encode())

        def _refuse(self, code: int, reason: str) -> None:
            state.refused.append(f"{code} {self.path}")
            body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason}
            self._send(code, json.dumps({**body, "code": code, "message": self.path}).encode())

        def _send(self, code: int, body: bytes) -> None:
            self.send(code, body, {"content-type": "application/json"})

        def _stream(self, events: Iterator[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in events:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    with LoopbackServer(Watched) as server:
        state.url = server.base_url
        yield state

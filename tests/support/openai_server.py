"""A small real HTTP server with the OpenAI completion endpoints, whose answers and faults a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.loopback import Handler, LoopbackServer


@dataclass(frozen=True)
class Reply:
    """Answer to one request: a text with its finish reason, or an HTTP error. `drop`: close without an answer.

    A stop of the request ends the thinking, too, as in SGLang.
    """

    text: str = ""
    finish_reason: str = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    thinking: str = ""


class OpenAIServer(LoopbackServer):
    """`answer(prompt, n)` makes the reply to the n-th request (from 1) for a prompt; `asked` counts per prompt.

    api_key: what every request must carry.
    """

    def __init__(
        self, answer: Callable[[str, int], Reply], model: str = "test-model", port: int = 0, api_key: str | None = None
    ) -> None:
        self.answer, self.model, self.api_key = answer, model, api_key
        self.asked: dict[str, int] = {}
        self.lock = threading.Lock()
        super().__init__(_Handler, port=port)


class _Handler(Handler):
    """By HTTP/1.0: kept connections would be answered after the server was closed."""

    server: OpenAIServer

    def send_json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(body).encode(), {"content-type": "application/json"} | (headers or {}))

    def refused(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.send_json(401, {"error": {"message": "this server needs a key"}})
        return True

    def do_GET(self) -> None:
        if self.refused():
            return None
        if self.path == "/v1/models":
            return self.send_json(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})
        return self.send_json(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.refused():
            return None
        chat = self.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        with self.server.lock:
            self.server.asked[prompt] = number = self.server.asked.get(prompt, 0) + 1
        reply = self.server.answer(prompt, number)
        if reply.drop:
            return None
        if reply.status != 200:
            return self.send_json(reply.status, {"message": f"fault {reply.status}"}, reply.headers)
        text, thinking = reply.text, reply.thinking
        stops = body.get("stop") or ()
        for stop in [stops] if isinstance(stops, str) else stops:
            text = "" if stop in thinking else text.partition(stop)[0]
            thinking = thinking.partition(stop)[0]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason}
        message = {"role": "assistant", "content": text or None, "reasoning_content": thinking or None}
        choice |= {"message": message} if chat else {"text": text}
        usage = {"prompt_tokens": 1, "completion_tokens": len(reply.text.split()), "total_tokens": 1}
        return self.send_json(
            200, {"id": "x", "object": "completion", "created": int(time.time()), "model": self.server.model,
                  "choices": [choice], "usage": usage}
        )  # fmt: skip

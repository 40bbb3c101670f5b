"""`python -m proof.load.null_server --port P`: a server that answers at once, with SGLang's endpoints.

It measures the load generator and this package's wrapper (nothing else costs time here) and lets the parsers be tested
on what the real generator writes. It pretends to speculate: verify steps accept 0, 1, 2, 3, 0, 1, ... drafts, so that
every acceptance figure is known in advance.
"""

from __future__ import annotations

import argparse
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "null-model"
DRAFT_TOKENS = 4


@dataclass
class Settings:
    """How the server misbehaves, for tests: every `fail_every`-th request gets HTTP 500; outputs are cut to `cap`.

    api_key: asked for where the door of `kimi-w4a8 serve` asks for it.
    """

    tokenizer: str = MODEL
    context_len: int = 16384
    speculative: bool = True
    fail_every: int = 0
    cap: int = 0
    api_key: str | None = None


@dataclass
class Totals:
    """The counters behind /metrics."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    verify_calls: int = 0
    cached_tokens: int = 0
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def steps_of(tokens: int) -> list[int]:
    """Tokens committed by each verify step of an answer; the first token comes from prefill."""
    left = tokens - 1
    steps: list[int] = []
    while left > 0:
        steps.append(min(1 + len(steps) % DRAFT_TOKENS, left))
        left -= steps[-1]
    return steps


class NullServer(ThreadingHTTPServer):
    """Listens on loopback; `start()` serves in a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, settings: Settings | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.settings = settings or Settings()
        self.totals = Totals()

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Serve in a daemon thread until `shutdown()`."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def count(self, prompt_tokens: int, tokens: int, steps: int, cached_tokens: int = 0) -> None:
        """Add one finished request."""
        with self.totals.lock:
            self.totals.requests += 1
            self.totals.prompt_tokens += prompt_tokens
            self.totals.generation_tokens += tokens
            self.totals.verify_calls += steps
            self.totals.cached_tokens += cached_tokens

    def fails(self) -> bool:
        """Whether the next generation request is one that must fail."""
        with self.totals.lock:
            self.totals.asked += 1
            return bool(self.settings.fail_every) and self.totals.asked % self.settings.fail_every == 0

    def metrics(self) -> str:
        """Prometheus text with the engine's names."""
        t = self.totals
        counters = {
            "generation_tokens_total": t.generation_tokens,
            "prompt_tokens_total": t.prompt_tokens,
            "num_requests_total": t.requests,
            "spec_verify_calls_total": t.verify_calls,
            "cached_tokens_total": t.cached_tokens,
        }
        lines = [f"# TYPE sglang:{name} counter\nsglang:{name} {value}.0" for name, value in counters.items()]
        lines.append(f"# TYPE sglang:context_len gauge\nsglang:context_len {self.settings.context_len}.0")
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: NullServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        settings = self.server.settings
        if self.path == "/metrics":
            self._send(200, self.server.metrics(), "text/plain")
        elif self.path == "/v1/models" and self._refused():
            return
        elif self.path == "/v1/models":
            self._json({"data": [{"id": MODEL}]})
        elif self.path == "/server_info":
            speculative: dict[str, Any] = {"speculative_algorithm": None}
            if settings.speculative:
                speculative = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": DRAFT_TOKENS}
            self._json({"model_path": MODEL, "tokenizer_path": settings.tokenizer, "version": "null", **speculative})
        elif self.path in ("/health", "/model_info"):
            self._json({"tokenizer_path": settings.tokenizer, "model_path": MODEL})
        else:
            self._json({"message": "not found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self._refused():
            return
        if self.path.startswith("/flush_cache"):
            self._json({})
        elif self.path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
            self._json({"message": "not found"}, 404)
        elif self.server.fails():
            self._json({"message": "the null server was told to fail"}, 500)
        elif self.path == "/generate":
            self._native(body)
        else:
            self._openai(body)

    def _refused(self) -> bool:
        key = self.server.settings.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._json({"error": {"message": "this server needs a key"}}, 401)
        return True

    def _native(self, body: dict[str, Any]) -> None:
        settings = self.server.settings
        tokens = int(body["sampling_params"]["max_new_tokens"])
        tokens = min(tokens, settings.cap) if settings.cap else tokens
        steps = steps_of(tokens) if settings.speculative else [1] * (tokens - 1)
        # A prompt's length in tokens is not known here; words are near enough for what is tested.
        prompt_tokens = len(str(body.get("text", "")).split())
        meta: dict[str, Any] = {"prompt_tokens": prompt_tokens, "finish_reason": {"type": "length"}}
        if settings.speculative:
            histogram = [sum(step == k + 1 for step in steps) for k in range(DRAFT_TOKENS)]
            meta |= {"spec_verify_ct": len(steps), "spec_correct_drafts_histogram": histogram}
        counts = [1]
        for step in steps:
            counts.append(counts[-1] + step)
        chunks: list[dict[str, Any]] = [
            {"text": "x " * n, "output_ids": [7] * n, "meta_info": {**meta, "completion_tokens": n}} for n in counts
        ]
        self.server.count(prompt_tokens, tokens, len(steps) if settings.speculative else 0)
        if body.get("stream"):
            self._stream([json.dumps(chunk) for chunk in chunks])
        else:
            self._json(chunks[-1])

    def _openai(self, body: dict[str, Any]) -> None:
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        chat = self.path.endswith("chat/completions")
        prompt, cached = _known(body["messages"]) if chat else (1, 0)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        self.server.count(prompt, tokens, 0, cached)
        if not body.get("stream"):
            message: dict[str, Any] = (
                {"message": {"role": "assistant", "content": "x " * tokens}} if chat else {"text": "x " * tokens}
            )
            self._json({"choices": [{"index": 0, "finish_reason": "length", **message}], "usage": usage})
            return
        piece: dict[str, Any] = {"delta": {"content": "x "}} if chat else {"text": "x "}
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "finish_reason": None, **piece}]}] * tokens
        found = {"sglext": {"cached_tokens_details": {"device": cached}}} if cached else {}
        chunks.append({"choices": [], "usage": usage, **found})
        self._stream([json.dumps(chunk) for chunk in chunks])

    def _stream(self, chunks: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in [*chunks, "[DONE]"]:
            data = f"data: {chunk}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content), "application/json")

    def _send(self, status: int, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _known(messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Words of a prompt, and those of them that a prefix cache has: all but the last message of a later turn."""
    words = [len(str(message["content"]).split()) for message in messages]
    return sum(words), sum(words[:-1]) if len(words) > 2 else 0


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A server that answers at once.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", default=MODEL, help="What /model_info and /server_info name as tokenizer.")
    args = parser.parse_args()
    NullServer(args.port, Settings(tokenizer=args.tokenizer)).serve_forever()


if __name__ == "__main__":
    main()

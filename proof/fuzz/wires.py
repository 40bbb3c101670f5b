"""Headers, framing and bytes: what an HTTP library would not send."""

from __future__ import annotations

import json
from random import Random

from .requests import KEY, OUTSIDER, Case, Request, Wire, wire_request

_FORWARDING = ("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Real-IP")
_FORWARDED = (
    *("127.0.0.1", "127.0.0.1:80", "::1", "localhost", "10.0.0.1, 127.0.0.1", "unknown", "_x", "\x7f", "9" * 5000),
    *("for=127.0.0.1;proto=https;host=x", 'for="[::1]:80"', "https", "/flush_cache", ""),
)
# Headers from which SGLang, or something in front of it, takes a meaning.
_MEANING = {
    "Host": ("x", "", "127.0.0.1:1", "a b", "[::1", "x\ty", "é"),
    "Origin": ("https://fuzz.example", "null", "", "file://"),
    "Content-Type": ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "", "x/y;" * 500),
    "Content-Encoding": ("gzip", "br", "identity", "deflate, gzip"),
    "Accept": ("text/event-stream", "", "*/*;q=x"),
    "Expect": ("100-continue", "200-ok"),
    "Upgrade": ("websocket", "h2c", "TLS/1.0"),
    "Authorization": ("Bearer", "Bearer ", "Basic YTpi", "Bearer é", "Bearer x y", "bearer\tx", "x" * 9000),
    "X-Api-Key": ("", "x", "é"),
    "X-Body-Compressed": ("zstd", "gzip"),
    "X-Override-Rid": ("x", "", "é"),
    "X-Override-Priority": ("5", "x", "9" * 5000),
    "X-Override-Bootstrap-Host": ("127.0.0.1",),
    "X-Override-Bootstrap-Port": ("1", "-1", "x"),
    "X-Override-Bootstrap-Room": ("1", "9" * 30),
    "X-Override-Conversation-Id": ("x",),
    "X-Override-Routed-Dp-Rank": ("7", "-1", "x"),
    "X-Override-Disagg-Prefill-Dp-Rank": ("7", "x"),
    "X-Data-Parallel-Rank": ("7", "-1", "x", "9" * 5000),
    "X-Smg-Routing-Key": ("x", "x" * 5000),
    "X-Sglext-Return-Input-Ids": ("1",),
    "X-Sglext-Return-Output-Ids": ("1",),
    "X-Sglext-Ids-Framed": ("1",),
    "X-Http-Method-Override": ("DELETE",),
}
_DOUBLE = ("Host", "Authorization", "Content-Type", "Content-Length", "X-Api-Key", "Origin")
_CODINGS = ("chunked", "identity", "chunked, chunked", "xchunked", " chunked", "chunked\t", "gzip, chunked", "chunKed")
_DETOURS = (
    *("//flush_cache", "/flush_cache/", "/FLUSH_CACHE", "/%66lush_cache", "/v1/../flush_cache", "/flush_cache?x=1"),
    *("/v1/models/../../flush_cache", "/v1/models/%2e%2e/%2e%2e/flush_cache", "/flush_cache;x", "/flush_cache%00"),
    *("http://127.0.0.1/flush_cache", "/health/../flush_cache", "/v1/responses/..%2f..%2fflush_cache", "*"),
)
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 5000,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % each for each in range(20_000)) + b"\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n folded\r\n\r\n",
)


def header_case(visit: int, random: Random, model: str) -> Case:
    """One of six kinds of mischief with headers, in turn, around a small request."""
    message = {"role": "user", "content": "Tom has"}
    chat = json.dumps({"model": model, "messages": [message], "max_tokens": 1}).encode()
    base = [("Host", "x"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")]
    path, body, closed = random.choice((("/v1/chat/completions", chat, False), ("/flush_cache", b"", True)))
    if closed:
        base.append(OUTSIDER[0])
    kind = visit % 6
    if kind == 0:
        names = (*_FORWARDING, "Forwarded", "X-Forwarded-Proto")
        forged = [(random.choice(names), random.choice(_FORWARDED)) for _ in range(random.randint(1, 4))]
        return Case("headers", f"forwarding {path}", (wire_request("POST", path, base + forged, body),), closed)
    if kind == 1:
        name = random.choice(_DOUBLE)
        value = random.choice(_MEANING.get(name, ("0", "-1", "5", "99999999999999999999", str(len(body)), "+3", "x")))
        headers = [*base, (name, value)] if random.random() < 0.5 else [(name, value), *base]
        wire = wire_request("POST", path, headers, body, patience_s=1.0)
        return Case("headers", f"two {name} {path}", (wire,), closed)
    if kind == 2:
        name = random.choice(sorted(_MEANING))
        headers = [*(each for each in base if each[0] != name), (name, random.choice(_MEANING[name]))]
        wire = wire_request("POST", path, headers, body, patience_s=5.0)
        return Case("headers", f"{name} {path}", (wire,), closed)
    if kind == 3:
        return Case("headers", "smuggling", (_smuggled(random, base, body),))
    if kind == 4:
        headers = [each for each in base if each[0] != "Origin"] + list(OUTSIDER)
        wire = wire_request("POST", random.choice(_DETOURS), headers, b"")
        return Case("headers", "detour", (wire,), refused=True)
    return Case("headers", "garbage", (Wire((random.choice(_GARBAGE),)),))


def _smuggled(random: Random, base: list[tuple[str, str]], body: bytes) -> Wire:
    """Two ways to tell where the body ends, and another request behind one of the ends."""
    hidden = b"POST /flush_cache HTTP/1.1\r\nHost: x\r\nOrigin: https://fuzz.example\r\nContent-Length: 0\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    framed = random.choice((chunk + hidden, hidden + chunk, b"zz\r\n" + chunk, b"ffffffffffffffff\r\n" + body, chunk))
    headers = [*base, ("Transfer-Encoding", random.choice(_CODINGS))]
    if random.random() < 0.7:
        headers.append(("Content-Length", str(random.choice((0, 4, len(body), len(framed), 10**20)))))
    wire = wire_request("POST", "/v1/chat/completions", headers, b"", length=False)
    return Wire((wire.pieces[0] + framed,), patience_s=1.0)


def broken_body(random: Random, path: str, whole: bytes) -> Case:
    """A body that is no JSON, not only JSON, or JSON in another guise."""
    at = random.randint(0, len(whole))
    bodies = (
        *(whole[:at], whole[:at] + b"\xff" + whole[at:], whole[:at] + b"\\ud800" + whole[at:], whole * 2, b"", b"null"),
        *(b"[" * 50_000, b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900, b"0", b'"x"', b"[1]", b"{}"),
        *(b"\xef\xbb\xbf" + whole, whole.decode().encode("utf-16"), b'{"temperature": NaN, ' + whole[1:]),
        *(b'{"max_tokens": 1' + b"0" * 5000 + b", " + whole[1:], whole[:-1] + b', "model": 5, "model": []}'),
        b'{"n": 1e400, ' + whole[1:],
    )
    kind = random.choice(("application/json", "application/json", "text/plain", "multipart/form-data", "", "x/y"))
    coding = random.choice(((), (), (("content-encoding", "gzip"),), (("x-body-compressed", "zstd"),)))
    return Case(
        "broken bodies", path, (Request("POST", path, random.choice(bodies), (("content-type", kind), *coding)),)
    )

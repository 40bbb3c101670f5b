"""Headers, framing and bytes: what an HTTP library would not send."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from .requests import CHAT, KEY, OUTSIDER, Case, HttpRequest, Wire, question, wire_request

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
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n folded\r\n\r\n",
)


def header_case(draw: st.DrawFn, model: str) -> Case:
    """Draw one of six attacks with headers, around a small request."""
    base = [("Host", "x"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")]
    chat = json.dumps(question(model, max_tokens=1)).encode()
    path, body, closed = draw(st.sampled_from(((CHAT, chat, False), ("/flush_cache", b"", True))))
    if closed:
        base.append(OUTSIDER[0])
    kind = draw(st.sampled_from(("forwarding", "two", "one", "smuggling", "detour", "garbage")))
    if kind == "forwarding":
        names = st.sampled_from((*_FORWARDING, "Forwarded", "X-Forwarded-Proto"))
        forged = draw(st.lists(st.tuples(names, st.sampled_from(_FORWARDED)), min_size=1, max_size=4))
        return Case("headers", f"forwarding {path}", (wire_request("POST", path, base + forged, body),), closed)
    if kind == "two":
        name = draw(st.sampled_from(_DOUBLE))
        lengths = ("0", "-1", "5", "99999999999999999999", str(len(body)), "+3", "x")
        second = [(name, draw(st.sampled_from(_MEANING.get(name, lengths))))]
        headers = base + second if draw(st.booleans()) else second + base
        return Case(
            "headers", f"two {name} {path}", (wire_request("POST", path, headers, body, patience_s=1.0),), closed
        )
    if kind == "one":
        name = draw(st.sampled_from(sorted(_MEANING)))
        headers = [*(header for header in base if header[0] != name), (name, draw(st.sampled_from(_MEANING[name])))]
        return Case("headers", f"{name} {path}", (wire_request("POST", path, headers, body, patience_s=5.0),), closed)
    if kind == "smuggling":
        return Case("headers", kind, (_smuggled(draw, base, body),))
    if kind == "detour":
        headers = [header for header in base if header[0] != "Origin"] + list(OUTSIDER)
        return Case("headers", kind, (wire_request("POST", draw(st.sampled_from(_DETOURS)), headers),), refused=True)
    return Case("headers", kind, (Wire((draw(st.sampled_from(_GARBAGE)),)),))


def _smuggled(draw: st.DrawFn, base: list[tuple[str, str]], body: bytes) -> Wire:
    """Tell in two ways where the body ends, with another request behind one of the ends."""
    hidden = b"POST /flush_cache HTTP/1.1\r\nHost: x\r\nOrigin: https://fuzz.example\r\nContent-Length: 0\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    frames = (chunk + hidden, hidden + chunk, b"zz\r\n" + chunk, b"ffffffffffffffff\r\n" + body, chunk)
    framed = draw(st.sampled_from(frames))
    headers = [*base, ("Transfer-Encoding", draw(st.sampled_from(_CODINGS)))]
    length = draw(st.sampled_from((None, 0, 4, len(body), len(framed), 10**20)))
    if length is not None:
        headers.append(("Content-Length", str(length)))
    wire = wire_request("POST", CHAT, headers, length=False)
    return Wire((wire.pieces[0] + framed,), patience_s=1.0)


def broken_body(draw: st.DrawFn, path: str, whole: bytes) -> Case:
    """Draw a body that is no JSON, not only JSON, or JSON in another guise."""
    at = draw(st.integers(0, len(whole)))
    bodies = (
        *(whole[:at], whole[:at] + b"\xff" + whole[at:], whole[:at] + b"\\ud800" + whole[at:], whole * 2, b"", b"null"),
        *(b"[" * 50_000, b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900, b"0", b'"x"', b"[1]", b"{}"),
        *(b"\xef\xbb\xbf" + whole, whole.decode().encode("utf-16"), b'{"temperature": NaN, ' + whole[1:]),
        *(b'{"max_tokens": 1' + b"0" * 5000 + b", " + whole[1:], whole[:-1] + b', "model": 5, "model": []}'),
        b'{"n": 1e400, ' + whole[1:],
    )
    kind = draw(st.sampled_from(("application/json", "text/plain", "multipart/form-data", "", "x/y")))
    coding = draw(st.sampled_from(((), (("content-encoding", "gzip"),), (("x-body-compressed", "zstd"),))))
    headers = (("content-type", kind), *coding)
    return Case("broken bodies", path, (HttpRequest("POST", path, draw(st.sampled_from(bodies)), headers),))

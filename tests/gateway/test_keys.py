"""Keys: several, by name, read again when their file changes; and what a gateway without keys answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.gateway_app import MODEL, App, ScriptedEngine

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.gateway import keys as module
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.key_file import read_keys
from kimi_w4a8_eagle3.gateway.keys import Client, Keys

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "?"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("# of the team\nann key-of-ann-123\n\nkey-without-name\n")
    return path


def test_a_file_holds_several_keys_with_names(file: Path) -> None:
    assert read_keys(file) == {"ann": "key-of-ann-123", "key4": "key-without-name"}
    keys = Keys(file)
    assert keys.admit({b"authorization": b"Bearer key-of-ann-123"}) == Client("ann", "key-of-ann-123")
    assert keys.admit({b"x-api-key": b"key-without-name"}).name == "key4"
    for headers in ({}, {b"authorization": b"Bearer other-key-1"}, {b"authorization": b"Basic key-of-ann-123"}):
        with pytest.raises(Refusal) as refused:
            keys.admit(headers)
        assert refused.value.status == 401


UNUSABLE = {
    "": "the key file holds no key",
    "bob short": "line 1 of the key file holds no usable key",
    "a b c-is-long-enough": "line 1 of the key file holds no usable key",
    "ann key-of-ann-123\nann key-of-ann-124": "line 2 of the key file repeats the name ann",
    "größe123456": "the key file cannot be read: it is not ASCII text",
}


@pytest.mark.parametrize(("text", "what"), UNUSABLE.items())
def test_a_file_that_cannot_be_used_is_named_and_no_remedy_loses_its_keys(file: Path, text: str, what: str) -> None:
    file.write_text(text)
    with pytest.raises(KimiError) as error:
        read_keys(file)
    assert error.value.what == what and "rand -hex 32 > " not in error.value.remedy
    assert str(file) in str(error.value) and "key-of-ann" not in str(error.value)
    file.chmod(0o644)
    file.write_text("ann key-of-ann-123")
    with pytest.raises(KimiError, match="every user of this machine"):
        read_keys(file)


def test_a_change_counts_within_a_second_and_a_broken_file_changes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    keys, new = Keys(file), {b"authorization": b"Bearer key-of-bob-1234"}
    file.write_text("bob key-of-bob-1234\n")
    with pytest.raises(Refusal):
        keys.admit(new)  # not looked at for a second
    now[0] += 1.1
    assert keys.admit(new).name == "bob"
    file.write_text("x")
    now[0] += 1.1
    assert keys.admit(new).name == "bob"
    file.unlink()
    now[0] += 1.1
    assert keys.admit(new).name == "bob"


def test_the_key_comes_before_the_path_and_the_body(file: Path) -> None:
    app = App(ScriptedEngine(), keys=file)
    for path in (CHAT, "/v1/models", "/none"):
        answer = app.ask(path, b"{bad")
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert app.ask(CHAT, BODY, authorization="Bearer key-of-ann-123").status_code == 200
    assert app.ask("/none", BODY, authorization="Bearer key-of-ann-123").status_code == 404
    assert app.ask("/v1/messages", b"", authorization="Bearer no-such-key").json()["type"] == "error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:9527"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:9527"}, 200),
        ({"host": "rebound.example"}, 403),
        ({"host": "127.0.0.1:9527", "origin": "http://evil.example"}, 403),
        ({"host": "127.0.0.1:9527", "origin": "http://127.0.0.1:9527"}, 200),
    ],
)
def test_without_a_key_no_web_page_is_answered(headers: dict[str, str], status: int) -> None:
    assert App(ScriptedEngine()).ask(CHAT, BODY, **headers).status_code == status


def test_a_preflight_and_probes_need_no_key(file: Path) -> None:
    async def ask() -> list[int]:
        async with App(ScriptedEngine(), keys=file).client() as client:
            answers = [await client.options(CHAT), await client.options("/metrics/"), await client.get("/ready")]
            answers += [await client.get("/health"), await client.get("/metrics"), await client.get("/v1/models")]
            return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [204, 204, 200, 200, 401, 401]

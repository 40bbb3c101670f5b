"""Keys and limits from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.door.settings import DoorSettings, is_loopback, key_file_environment, read_door
from kimi_w4a8_eagle3.gates import read_gates

KEY = "0123456789abcdef"


def key_file(folder: Path, text: str = KEY + "\n", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    assert read_door({}) == DoorSettings()
    assert read_door({"KIMI_DOOR": "", "KIMI_MAX_BODY_BYTES": ""}) == DoorSettings()
    assert DoorSettings() == DoorSettings(None, None, "auto", 33_554_432, None, None, 512, "closed", False, 20)


def test_a_key_has_eight_characters() -> None:
    assert read_door({"KIMI_API_KEY": " !~345678 "}).api_key == "!~345678"
    with pytest.raises(KimiError, match="usable key"):
        read_door({"KIMI_API_KEY": "1234567"})


def test_every_variable_is_read(tmp_path: Path) -> None:
    environ = {
        "KIMI_API_KEY_FILE": str(key_file(tmp_path)),
        "KIMI_ADMIN_KEY": "admin-" + KEY,
        "KIMI_DOOR": "closed",
        "KIMI_MAX_BODY_BYTES": "1000",
        "KIMI_MAX_PROMPT_TOKENS": "2000",
        "KIMI_MAX_CONCURRENT_REQUESTS": "3",
        "KIMI_MAX_SEQUENCES": "4",
        "KIMI_MAX_MASK_MS": "5",
        "KIMI_DOOR_NATIVE": "open",
        "KIMI_DOOR_STOP_REGEX": "on",
        "KIMI_DOOR_VALUES": "moonshot",
    }
    assert read_door(environ) == DoorSettings(
        KEY, "admin-" + KEY, "closed", 1000, 2000, 3, 4, "open", True, 5, "moonshot"
    )
    read_gates(environ)  # which looks for misspelt names with the same prefix


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"KIMI_DOOR": "ajar"}, "KIMI_DOOR='ajar' is not allowed"),
        ({"KIMI_DOOR_NATIVE": "off"}, "KIMI_DOOR_NATIVE='off' is not allowed"),
        ({"KIMI_DOOR_STOP_REGEX": "1"}, "KIMI_DOOR_STOP_REGEX='1' is not allowed"),
        ({"KIMI_DOOR_VALUES": "kimi"}, "expected: any, moonshot"),
        ({"KIMI_DOOR_STOP": "on"}, "did you mean 'KIMI_DOOR_STOP_REGEX'?"),
        ({"KIMI_DOOR": "off", "KIMI_ADMIN_KEY": KEY}, "KIMI_DOOR=off, but a key is set"),
        ({"KIMI_MAX_BODY_BYTES": "32M"}, "KIMI_MAX_BODY_BYTES='32M' is not allowed"),
        ({"KIMI_MAX_MASK_MS": "1_000"}, "KIMI_MAX_MASK_MS='1_000' is not allowed"),
        ({"KIMI_MAX_PROMPT_TOKENS": "-1"}, "KIMI_MAX_PROMPT_TOKENS='-1' is not allowed"),
        ({"KIMI_MAX_CONCURRENT_REQUESTS": "0"}, "KIMI_MAX_CONCURRENT_REQUESTS='0' is not allowed"),
        ({"KIMI_MAX_CONCURRENT": "3"}, "did you mean 'KIMI_MAX_CONCURRENT_REQUESTS'?"),
        ({"KIMI_ADMIN_KEY_FILES": "x"}, "did you mean 'KIMI_ADMIN_KEY_FILE'?"),
        ({"KIMI_API_KEY": KEY, "KIMI_API_KEY_FILE": "x"}, "both KIMI_API_KEY and KIMI_API_KEY_FILE are set"),
        ({"KIMI_API_KEY": "short"}, "this is not a usable key"),
        ({"KIMI_API_KEY": "two words of a key"}, "this is not a usable key"),
        ({"KIMI_ADMIN_KEY_FILE": "/nowhere/key"}, "No such file or directory"),
    ],
)
def test_what_cannot_be_used_is_an_error(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(KimiError) as caught:
        read_door(environ)
    assert complaint in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("", 0o600, "not a usable key"),
        (f"{KEY}\n{KEY}\n", 0o600, "not a usable key"),
        ("schlüssel-0123456", 0o600, "not ASCII text"),
        (KEY, 0o644, "every user of this machine can read the key file"),
    ],
    ids=["empty", "two-lines", "not-ascii", "world-readable"],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, text: str, mode: int, complaint: str) -> None:
    with pytest.raises(KimiError) as caught:
        key_file_environment(key_file(tmp_path, text, mode))
    assert complaint in str(caught.value)
    assert "to do:" in str(caught.value)
    assert KEY not in str(caught.value)


def test_the_child_gets_the_path_of_the_key_not_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(
        tmp_path, mode=0o640
    )  # a group may read it: that is how Kubernetes hands secrets to a non-root user
    monkeypatch.chdir(tmp_path)
    environment = key_file_environment(Path("key"))
    assert environment == {"KIMI_API_KEY_FILE": str(path)}
    assert read_door(environment).api_key == KEY


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    others = ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org")
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    "command", [("bench", "con2"), ("eval", "smoke"), ("eval", "lossless", "--reference-url", "x")]
)
def test_a_client_without_its_key_file_sends_no_request(tmp_path: Path, command: tuple[str, ...]) -> None:
    words = [*command, "--base-url", "http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key")]
    result = CliRunner().invoke(app, [*words, "--runs", str(tmp_path / "runs")])
    assert isinstance(result.exception, KimiError)
    assert "the key file cannot be read" in result.exception.what and str(tmp_path / "key") in result.exception.where
    assert not (tmp_path / "runs").exists()

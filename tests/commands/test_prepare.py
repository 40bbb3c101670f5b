"""`kimi-w4a8 prepare` on a machine that lacks a checkpoint: what it downloads, shows, asks, and does not repeat."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from support.fetch_helpers import Done, kimi
from support.hub_server import Fault, HubServer, Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.cli import load
from kimi_w4a8_eagle3.commands import prepare
from kimi_w4a8_eagle3.engine.process import free_port

NAME = "org/kimi"
CODE = b"class Words:\n    pass\n"
FILES = {
    "config.json": b'{"model_type": "llama", "architectures": ["X"]}',
    "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["words.Words", null]}}',
    "words.py": CODE,
    "model.safetensors": bytes(20_000),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(files, "RESERVE", 0)  # the disk of the tests may be nearly full
    monkeypatch.setenv("KIMI_TRUSTED_CODE", str(tmp_path / "config/trusted-code.json"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve({NAME: Repo(dict(FILES))}) as server:
        yield server


def prepared(hub: HubServer, folder: Path, *words: str) -> Done:
    address = ["--set", "host=127.0.0.1", "--set", f"port={free_port()}"]  # another test may serve at the recipe's
    settings = ["--set", f"model.repo={NAME}", *address, "--served-model-name", "kimi"]
    return kimi(hub, folder, "prepare", "tiny:plain", *settings, *words)


def test_a_machine_is_prepared_step_by_step_and_nothing_is_done_or_asked_twice(hub: HubServer, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = [Fault(status=500, times=None)]
    broken = prepared(hub, tmp_path)
    assert broken.returncode == 1 and "1 of 3, machine: " in broken.stdout and "could not be fetched" in broken.stderr
    hub.faults.clear()
    unread = prepared(hub, tmp_path)
    assert unread.returncode == 1 and f"new      {sha256(CODE).hexdigest()}  words.py" in unread.stdout
    assert "were not accepted" in unread.stderr and f"kimi-w4a8 trust {NAME} --yes" in unread.stderr
    gets = len(hub.gets("model.safetensors"))
    for words in (["--trust"], []):
        done = prepared(hub, tmp_path, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{NAME} is complete and verified" in done.stdout and "3 of 3, code: accepted" in done.stdout
    assert "words.py" not in done.stdout and len(hub.gets("model.safetensors")) == gets
    hub.repos[NAME].commit = "c1" * 20  # a branch that moved brings nothing new to a machine that has a whole snapshot
    (tmp_path / "config/trusted-code.json").unlink()
    again = prepared(hub, tmp_path)
    assert again.returncode == 1 and "were not accepted" in again.stderr and "new      " in again.stdout
    assert len(hub.gets("model.safetensors")) == gets


@pytest.mark.parametrize("yes", [True, False])
def test_a_person_is_asked_once(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    asked: list[str] = []
    monkeypatch.setattr(prepare, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr(typer, "confirm", lambda text: asked.append(text) or yes)
    done = prepared(hub, tmp_path)
    assert len(asked) == 1 and done.returncode == (0 if yes else 1)
    assert (tmp_path / "config/trusted-code.json").exists() == yes


@pytest.mark.parametrize(
    ("words", "parsed", "message"),
    [
        ("tiny", {}, "unexpected 'tiny'"),
        ("--tp 0", {}, "--tp-size 0 is not a valid value"),
        ("--host", {}, "--host True is not"),
        ("--dry-run", {"dry-run": True}, ""),  # which SGLang's parser refuses: tests/recipe/test_refused_launches.py
        ("--tp 2 -- --watchdog-timeout 60", {"tp-size": "2", "watchdog-timeout": "60"}, ""),
        ("--ops-host ::1 --ops-port 0 --drain-timeout 9 --runs x --gpu mi325x --api-key-file x", {}, ""),
        ("--any-hardware --no-preflight --served-model-name x", {}, ""),
    ],
)
def test_the_words_of_serve_are_read_and_no_others(
    words: str, parsed: dict[str, object], message: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = [{}]
    monkeypatch.setattr(prepare, "require_parsed", asked.append)
    monkeypatch.setattr(prepare, "_check", lambda launch: None)
    done = kimi(hub, tmp_path, "prepare", "tiny", *words.split())
    assert done.returncode == (2 if message else 0) and message in done.stderr
    assert parsed.items() <= asked[-1].items() and (bool(asked[-1]) == bool(parsed))
    assert {f"--{option}" for option in prepare._OF_SERVE} <= {
        name for one in load("serve").params for name in one.opts
    }


def test_what_stops_a_start_stops_before_the_download(hub: HubServer, tmp_path: Path) -> None:
    done = kimi(hub, tmp_path, "prepare", "w4a8", "--set", f"model.repo={NAME}", "--trust")
    assert done.returncode == 1 and "this machine cannot serve w4a8:\n  - gpus: " in done.stderr
    assert not hub.gets("model.safetensors")

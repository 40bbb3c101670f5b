"""The engine behind a gateway of this machine, as the newest run of `serve` names it."""

from __future__ import annotations

import json
from pathlib import Path

from support.null_server import null_server

from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_lab.base.server_under_test import Target


def serve_folder(runs: Path, name: str, base_url: str, secret: str) -> None:
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"servers": {"agent": {"base_url": base_url}}}))
    (folder / "engine.json").write_text(json.dumps({"phase": "ready", "url": "http://127.0.0.1:1", "secret": secret}))


def test_the_newest_run_of_a_service_at_this_port_names_the_engine(tmp_path: Path) -> None:
    with null_server() as url:
        target = Target(url, runs=tmp_path)
        assert target.connected.engine == Address(url)  # nothing is known: the server itself is asked
        serve_folder(tmp_path, "20261101-serve-agent", url, "old")
        serve_folder(tmp_path, "20261102-serve-agent", url, "new")
        serve_folder(tmp_path, "20261103-serve-agent", "http://127.0.0.1:2", "other")
        (tmp_path / "20261104-serve-agent").mkdir()
        (tmp_path / "20261104-serve-agent/engine.json").write_text("{")
        assert Target(url, runs=tmp_path).connected.engine == Address("http://127.0.0.1:1", "new")
        named = tmp_path / "20261102-serve-agent/engine.json"
        named.write_text(json.dumps({"phase": "ready", "url": url, "secret": "s"}))
        assert Target(str(named)).connected.engine == Address(url, "s")

"""SGLang loads plugins in the order of installed distributions, so the order of ours must not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.sglang_program import environment

from kimi_w4a8_eagle3.engine.process import Program
from kimi_w4a8_laptop import fork_server

ORDER = ("kimi_w4a8_eagle3", "kimi_w4a8_laptop")


def loaded(folder: Path, order: tuple[str, ...]) -> dict[str, Any]:
    output, log = folder / "-".join(order), folder / "log"
    program = Program("support.plugins_in_order", (str(output), *order))
    with log.open("ab") as file:
        process = fork_server.fork(program, environment(), file.fileno())
        assert process is not None and process.wait(120) == 0, log.read_text()
    facts: dict[str, Any] = json.loads(output.read_text())
    return facts


def test_the_order_of_the_two_plugins_does_not_matter(tmp_path: Path) -> None:
    first, second = loaded(tmp_path, ORDER), loaded(tmp_path, ORDER[::-1])
    assert first == second
    assert not first["checked twice"]
    alone = loaded(tmp_path, ORDER[:1])
    assert set(alone["hooks"]) < set(first["hooks"])

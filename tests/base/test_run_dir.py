"""Run folders of a service and its log have a limit."""

import os
import time
from pathlib import Path

from kimi_w4a8_eagle3.base.run_dir import KEPT, bound, new_run_dir, remove_old


def test_old_runs_of_a_service_go_and_results_and_recent_ones_stay(tmp_path: Path) -> None:
    served = [tmp_path / f"20260101T0000{number:02d}Z-serve-agent" for number in range(KEPT + 4)]
    others = [tmp_path / "20250101T000000Z-bench-con2", tmp_path / "20250101T000000Z-accept", tmp_path / "home-0123"]
    for folder in (*served, *others):
        folder.mkdir()
        (folder / "server.log").touch()
        for path in (folder / "server.log", folder):
            os.utime(path, (0, 0))
    os.utime(served[1] / "server.log", (time.time(), time.time()))  # of a server that still runs
    remove_old("serve", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (*others, served[1], *served[4:])}
    assert new_run_dir("serve-agent", tmp_path).exists()


def test_a_log_is_begun_anew_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first\n")
        bound(log, most=100)
        assert log.read_bytes() == b"first\n" and not (tmp_path / "server.log.1").exists()
        bound(log, most=6)
        writer.write(b"second\n")
    assert log.read_bytes() == b"second\n" and (tmp_path / "server.log.1").read_bytes() == b"first\n"
    bound(tmp_path / "missing")

"""A file is replaced whole or not at all, keeps its mode, and survives concurrent writers."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.files import write_atomic
from kimi_w4a8_eagle3.base.run_dir import new_run_dir


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_keeps_its_mode_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o640)
    write_atomic(path, "né")
    assert path.read_bytes() == "né".encode() and mode(path) == 0o640
    write_atomic(path, b"\x00")
    assert path.read_bytes() == b"\x00" and mode(path) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_gets_the_mode_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o026)
    try:
        write_atomic(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o640


def test_what_cannot_be_replaced_stays_and_no_temporary_file_does(tmp_path: Path) -> None:
    (tmp_path / "folder" / "file").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "file"]


def test_many_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path, started = tmp_path / "shared", threading.Barrier(8)

    def write(letter: str) -> None:
        started.wait()
        for _ in range(25):
            write_atomic(path, letter * 4096)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, "abcdefgh"))  # raises what a writer raises
    assert len(set(path.read_text())) == 1 and path.stat().st_size == 4096
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    """Its logs and answers may hold what clients sent."""
    first, second = (new_run_dir("serve", tmp_path / "runs") for _ in range(2))
    assert first != second
    assert mode(first) == mode(second) == 0o700

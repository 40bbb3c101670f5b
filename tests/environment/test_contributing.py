"""Checks of a contributor's commits and tags: .ci/commits, the hooks and the workflow."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from support.repository import ROOT

import kimi_w4a8_eagle3

SCRIPT = ROOT / ".ci" / "commits"
IDENTITY = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
WRONG = {
    "x" * 73: "has 73 characters",
    "WIP": "squash work in progress",
    "fixup! Add a thing": "squash work in progress",
    "Add a thing.": "ends without a full stop",
    "": "is empty",
    "fix": "a single word",
}


def commits(argument: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, argument], cwd=folder, capture_output=True, text=True, timeout=30)


def git(folder: Path, *words: str) -> None:
    environment = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", *words], cwd=folder, env=environment, check=True, capture_output=True, timeout=30)


def test_a_message_that_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    for subject, reason in WRONG.items():
        message.write_text(f"{subject}\n\nbody\n# comment\n")
        done = commits(message, tmp_path)
        assert done.returncode == 1 and reason in done.stderr
    message.write_text("# a comment of git\n" + "Fix " + "x" * 68 + "\n")
    assert commits(message, tmp_path).returncode == 0


def test_a_range_is_read_to_its_end(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    for subject in ("Begin", "Add one thing"):
        git(tmp_path, "commit", "--allow-empty", "-m", subject)
    git(tmp_path, "checkout", "-b", "topic", "HEAD~")
    git(tmp_path, "commit", "--allow-empty", "-m", "Add another thing")
    assert commits("main..topic", tmp_path).returncode == 0
    git(tmp_path, "merge", "main", "--no-ff", "-m", "Merge main")
    git(tmp_path, "commit", "--allow-empty", "-m", "wip: more")
    done = commits("main..topic", tmp_path)
    assert done.returncode == 1 and "is a merge commit" in done.stderr and '"wip: more"' in done.stderr
    assert commits("main..nowhere", tmp_path).returncode == 2


def test_the_changelog_begins_with_the_version() -> None:
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == kimi_w4a8_eagle3.__version__

"""`requirements/audit.sh` with the real pip-audit, against an OSV service on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.loopback import answering
from support.repository import ROOT

PIP_AUDIT = Path(sys.executable).parent / "pip-audit"
FLAW = {
    "id": "OSV-2026-1",
    "summary": "a flaw",
    "modified": "2026-01-01T00:00:00Z",
    "affected": [{"package": {"name": "rich", "ecosystem": "PyPI"}, "ranges": []}],
}

pytestmark = [pytest.mark.skipif(not PIP_AUDIT.is_file(), reason="no pip-audit here (extra dev)"), pytest.mark.slow]


@contextmanager
def osv(vulnerable: str | None) -> Iterator[tuple[str, set[str]]]:
    """The one endpoint that pip-audit asks; `vulnerable` has a flaw, everything else is clean."""
    asked: set[str] = set()

    def answer(_: str, body: bytes) -> tuple[int, bytes]:
        name = json.loads(body)["package"]["name"]
        asked.add(name)
        return 200, json.dumps({"vulns": [FLAW]} if name == vulnerable else {}).encode()

    with answering(answer) as url:
        yield f"{url}/v1/query", asked


def audit(url: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_AUDIT": str(PIP_AUDIT), "OSV_URL": url, "HOME": str(tmp_path), **more}
    return subprocess.run([ROOT / "requirements/audit.sh"], env=environment, capture_output=True, text=True)


def test_a_flaw_is_an_error_until_it_is_ignored_with_a_reason(tmp_path: Path) -> None:
    with osv("rich") as (url, asked):
        found = audit(url, tmp_path)
        assert found.returncode == 1 and "OSV-2026-1" in found.stdout
        assert {"rich", "prometheus-client", "setuptools"} <= asked  # both locks
        ignore = tmp_path / "ignore.txt"
        ignore.write_text("# why\nOSV-2026-1 only the demo prints with it\n")
        assert audit(url, tmp_path, IGNORE=str(ignore)).returncode == 0


def test_a_service_that_does_not_answer_is_no_clean_bill(tmp_path: Path) -> None:
    result = audit("http://127.0.0.1:9/v1/query", tmp_path)
    assert result.returncode == 2
    assert "could not be made" in result.stderr


def test_every_ignored_vulnerability_has_a_reason() -> None:
    lines = (ROOT / "requirements/audit-ignore.txt").read_text().splitlines()
    assert all(len(line.split()) > 3 for line in lines if line and not line.startswith("#"))

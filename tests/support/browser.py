"""A real browser, where the machine has one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BUILD = Path(__file__).parents[2] / "build"  # its pictures, to look at
DARK = "--blink-settings=preferredColorScheme=0"
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


def browse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Start the browser with these options, its profile in `folder`."""
    BUILD.mkdir(exist_ok=True)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    options += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
    return subprocess.run([str(BROWSER), *options, *words], capture_output=True, text=True, timeout=120)

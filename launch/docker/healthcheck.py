"""Docker HEALTHCHECK: exit 0 when the server at HEALTHCHECK_URL answers 200."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

url = os.environ.get("HEALTHCHECK_URL", "http://127.0.0.1:9528/live")
try:
    with urllib.request.urlopen(url, timeout=8) as response:  # noqa: S310 - the image and its operator set the URL
        status = response.status
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"{url}: {error}")
sys.exit(0 if status == 200 else f"{url}: HTTP {status}")

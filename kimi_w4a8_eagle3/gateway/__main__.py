"""Serve the three chat APIs in front of an engine: `python -m kimi_w4a8_eagle3.gateway FILE`.

The file is a `GatewayConfig`. uvicorn starts the workers and replaces one that died; its own clients alone notice.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

KEEP_ALIVE_S = 75  # as nginx; clients keep connections for a minute
GRACE_S = 600  # for running answers at the end; the supervisor's own limit ends it earlier
WORKER_SILENT_S = 60  # then uvicorn replaces a worker; less would end one on a busy machine


def main() -> None:
    """Serve until SIGTERM, then let the running answers end."""
    import uvicorn  # here, because every trial process imports this module again

    from ..base.errors import KimiError
    from .config import BROKEN, VARIABLE, GatewayConfig
    from .connections import ClientProtocol
    from .key_file import read_keys

    file = Path(sys.argv[1]).resolve()
    config = GatewayConfig.read(file)
    os.environ[VARIABLE] = str(file)
    try:
        if config.key_file:
            read_keys(Path(config.key_file))
    except KimiError as error:
        print(error)
        sys.exit(BROKEN)
    logging.basicConfig(level=logging.INFO, format="gateway: %(message)s")
    uvicorn.run(
        "kimi_w4a8_eagle3.gateway.app:create", factory=True, host=config.host, port=config.port,
        workers=config.workers, http=ClientProtocol, ws="none", loop="uvloop", access_log=False, log_level="error",
        proxy_headers=False, server_header=False, date_header=True, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S, timeout_worker_healthcheck=WORKER_SILENT_S,
    )  # fmt: skip
    if file.with_suffix(".broken").exists():  # uvicorn ends when a worker cannot start
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()

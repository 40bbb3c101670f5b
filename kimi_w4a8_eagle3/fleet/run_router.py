"""`python -m kimi_w4a8_eagle3.fleet.run_router`: run SGLang's router with arguments from the environment.

The arguments contain the key of its control plane, and every user of the machine can see a command line. The router's
own launcher is not used because it imports SGLang, which a machine that only routes does not have.
"""

from __future__ import annotations

import json
import os

ARGUMENTS = "KIMI_ROUTER_ARGUMENTS"


def main() -> None:
    """Serve until the process is ended."""
    from sglang_router.router import Router  # optional: sglang-router
    from sglang_router.router_args import RouterArgs

    Router.from_args(RouterArgs(**json.loads(os.environ.pop(ARGUMENTS)))).start()


if __name__ == "__main__":
    main()

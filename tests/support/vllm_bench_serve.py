"""Run as a script, `... bench serve OPTIONS`: the load generator of vLLM on a machine without a GPU.

The `vllm` program imports the whole server first, which needs packages that are not here; the generator does not.
"""

from __future__ import annotations

import sys

from kimi_w4a8_eagle3.base import torchvision_ops

torchvision_ops.declare_missing()

from vllm import platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

platforms._current_platform = CpuPlatform()

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(sys.argv[3:]))

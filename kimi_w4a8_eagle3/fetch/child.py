"""`python -m kimi_w4a8_eagle3.fetch.child REPO REVISION CACHE JOBS`: a transfer that its parent can end at any time."""

from __future__ import annotations

import os
import signal
import sys

from huggingface_hub import snapshot_download

from .hub import explain, quiet_hub


def main() -> None:
    repo, revision, cache, jobs = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    quiet_hub()
    try:
        snapshot_download(repo, revision=revision, cache_dir=cache, max_workers=int(jobs))
    except Exception as error:
        print(f"\nkimi-w4a8: {explain(error, f'{repo} at {revision}')}", file=sys.stderr, flush=True)
        os._exit(1)  # threads of hf_xet may not end


if __name__ == "__main__":
    main()

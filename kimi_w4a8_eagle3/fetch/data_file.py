"""Files of texts or requests that a command reads: on this disk, or in a data set on the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download

from ..base.errors import KimiError

HUB_PREFIX = "hf://datasets/"


def data_file(name: str, instead: str) -> Path:
    """Return the path of `name`: a local file, or `hf://datasets/OWNER/REPO/FILE`, which is downloaded once.

    `instead` is the remedy of the KimiError for a file that cannot be downloaded.
    """
    if not name.startswith(HUB_PREFIX):
        return Path(name).expanduser()
    owner, repo, *inside = name.removeprefix(HUB_PREFIX).split("/")
    try:
        return Path(hf_hub_download(f"{owner}/{repo}", "/".join(inside), repo_type="dataset"))
    except Exception as error:  # many types: no network, no such file, no permission
        raise KimiError(
            f"{'/'.join(inside)} could not be downloaded: {str(error).splitlines()[0]}",
            where=f"{HUB_PREFIX}{owner}/{repo}",
            remedy=instead,
        ) from None

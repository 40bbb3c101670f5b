"""Files that a command reads: texts or requests on this disk or in a data set on the Hub, and tokenizers."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import read_text
from kimi_w4a8_eagle3.fetch.hub import explain, quiet_hub
from kimi_w4a8_eagle3.recipe.trusted_code import locate, untrusted

HUB_PREFIX = "hf://datasets/"


def lines(path: Path, what: str, expected: str, remedy: str = "") -> list[str]:
    """Return the lines of a file as `read_text` reads it; `str.splitlines` would also cut at U+2028 and similar."""
    return [line.rstrip("\n") for line in StringIO(read_text(path, what, expected, remedy))]


def data_file(name: str, instead: str) -> Path:
    """Return the path of `name`: a local file, or `hf://datasets/OWNER/REPO/FILE`, which is downloaded once.

    `instead` is the remedy of the KimiError for a file that cannot be downloaded.
    """
    if not name.startswith(HUB_PREFIX):
        return Path(name).expanduser()
    owner, repo, path = [*name.removeprefix(HUB_PREFIX).split("/", 2), "", ""][:3]
    place: dict[str, Any] = {"repo_id": f"{owner}/{repo}", "filename": path, "repo_type": "dataset"}
    try:
        quiet_hub()
        here = try_to_load_from_cache(**place, cache_dir=constants.HF_HUB_CACHE)
        return Path(here if isinstance(here, str) else hf_hub_download(**place, cache_dir=constants.HF_HUB_CACHE))
    except Exception as error:
        why = explain(error, f"{owner}/{repo}")
        raise KimiError(f"{path} could not be downloaded: {why.what}", where=name, remedy=instead) from None


def require_trusted_tokenizer(name: str) -> None:
    """Raise KimiError when loading the tokenizer `name` would run code that is not recorded, or download it.

    Load generators always allow a tokenizer's code, and take its name from the server that they measure.
    """
    try:
        source = locate(name)
    except KimiError as error:
        error.remedy = f"hf download {name} --include '*.json' '*.py' '*.model' '*.jinja'"
        raise
    if problem := untrusted([source]):
        raise problem

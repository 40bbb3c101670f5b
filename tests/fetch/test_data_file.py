"""A file of a data set on the Hub comes in the same way as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download
from support.fetch_helpers import NAME, SHARDS, TOKEN, content
from support.hub_server import Fault, HubServer

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.base.data_file import data_file

PATH = "tokenizer/vocab file.txt"
ADDRESS = f"hf://datasets/{NAME}/{PATH}"


@pytest.fixture(autouse=True)
def at_home(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_a_name_that_would_be_a_pattern(hub, repo):
    repo.files["split[0]*.txt"] = b"0"
    assert data_file(f"hf://datasets/{NAME}/split[0]*.txt", "").read_bytes() == b"0"


def test_it_is_downloaded_once_and_the_rest_of_the_data_set_is_not(hub, repo, tmp_path):
    first, asked = data_file(ADDRESS, ""), len(hub.log)
    assert first.read_bytes() == repo.files[PATH] and first.is_relative_to(tmp_path / "hub/datasets--org--model")
    assert data_file(ADDRESS, "") == first and len(hub.log) == asked
    assert not any(hub.gets(path) for path in SHARDS)
    large = data_file(f"hf://datasets/{NAME}/{SHARDS[0]}", "")  # in the storage, at another host
    assert large.read_bytes() == repo.files[SHARDS[0]] and first.exists()
    assert {request.authorized for request in hub.log if request.origin == "storage"} == {False}


def test_a_file_that_huggingface_hub_brought_is_hashed_first(hub, repo, tmp_path, monkeypatch):
    path = Path(hf_hub_download(NAME, SHARDS[0], repo_type="dataset", token=False, cache_dir=tmp_path / "hub"))
    path.resolve().write_bytes(content(1, len(repo.files[SHARDS[0]])))
    assert data_file(f"hf://datasets/{NAME}/{SHARDS[0]}", "").read_bytes() == repo.files[SHARDS[0]]


def test_other_bytes_than_the_digest_says_are_refused(hub):
    hub.faults[PATH] = [Fault(damage=True, times=None)]
    with pytest.raises(KimiError, match=r"could not be downloaded: .* arrived damaged twice") as error:
        data_file(ADDRESS, "give a local file")
    assert error.value.remedy == "give a local file"


@pytest.mark.parametrize(
    ("address", "what"),
    [
        (f"hf://datasets/{NAME}/../x", "org/model has no ../x at revision main"),
        (f"hf://datasets/{NAME}/tokenizer/no", "org/model has no tokenizer/no at revision main"),
        (f"hf://datasets/{NAME}/no/file", "org/model has no no/file at revision main"),
        ("hf://datasets/org/other/x", r"HTTP 40\d"),
        ("hf://datasets/org", "Repo id must"),
    ],
)
def test_an_address_that_names_no_file(address, what):
    with pytest.raises(KimiError, match=what):
        data_file(address, "")


def test_offline_means_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(KimiError, match="HF_HUB_OFFLINE forbids downloads"):
        data_file(ADDRESS, "")
    assert not hub.log

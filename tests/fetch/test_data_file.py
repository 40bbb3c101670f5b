"""A file of a data set on the Hub is downloaded once, alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from support.fetch_helpers import NAME, SHARDS, TOKEN
from support.hub_server import HubServer

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_lab.base.data_file import data_file

PATH = "tokenizer/vocab file.txt"
ADDRESS = f"hf://datasets/{NAME}/{PATH}"


@pytest.fixture(autouse=True)
def at_home(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_it_is_downloaded_once_and_the_rest_of_the_data_set_is_not(hub, repo, tmp_path):
    first, asked = data_file(ADDRESS, ""), len(hub.log)
    assert first.read_bytes() == repo.files[PATH] and first.is_relative_to(tmp_path / "hub/datasets--org--model")
    assert data_file(ADDRESS, "") == first and len(hub.log) == asked
    assert not any(hub.gets(path) for path in SHARDS)
    large = data_file(f"hf://datasets/{NAME}/{SHARDS[0]}", "")  # in the storage, at another host
    assert large.read_bytes() == repo.files[SHARDS[0]] and first.exists()
    assert {request.authorized for request in hub.log if request.origin == "storage"} == {False}


@pytest.mark.parametrize(
    ("address", "what"),
    [
        (f"hf://datasets/{NAME}/tokenizer/no", "org/model was refused: HTTP 404"),
        ("hf://datasets/org/other/x", "no org/other, or it is private"),
        ("hf://datasets/org", "Repo id must"),
    ],
)
def test_an_address_that_names_no_file(address, what):
    with pytest.raises(KimiError, match=what) as error:
        data_file(address, "give a local file")
    assert error.value.remedy == "give a local file"


def test_offline_means_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(KimiError, match="could not be downloaded"):
        data_file(ADDRESS, "")
    assert not hub.log

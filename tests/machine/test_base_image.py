"""The record of the base image: what the build writes, what is read back, and the reason for every variable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.machines import OF_THE_BASE, base_record, check, mi325x, write
from support.repository import ROOT

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding, Severity
from kimi_w4a8_eagle3.machine.hardware import (
    BASE_RECORD,
    GIB,
    Device,
    Machine,
    base_problem,
    classified,
    identified,
    read_base,
)
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render

PROGRAM = ROOT / "launch/docker/record_base.py"
DIGEST = "sha256:" + "0" * 64


def recorded(reference: str, file: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "BASE_IMAGE": reference, **variables}
    return subprocess.run([sys.executable, PROGRAM, file], env=environ, capture_output=True, text=True)


def test_the_build_records_versions_commits_and_variables(tmp_path: Path) -> None:
    file = tmp_path / BASE_RECORD
    commit = "c16d44b93a528b2a4bfd6d8d3409116d465872a9"
    done = recorded(f"base:1@{DIGEST}", file, SGLANG_COMMIT=commit, NCCL_MIN_NCHANNELS="112", https_proxy="http://p")
    assert done.returncode == 0, done.stderr
    base = read_base(tmp_path)
    assert (base.reference, base.digest, base.commits["sglang"]) == ("base:1", DIGEST, commit)
    assert base.env["NCCL_MIN_NCHANNELS"] == "112" and not {"BASE_IMAGE", "https_proxy"} & set(base.env)
    assert "sglang" in base.versions and base_problem(base.versions, tmp_path) is None


def test_a_base_without_a_digest_is_recorded_as_such_and_a_false_one_ends_the_build(tmp_path: Path) -> None:
    done = recorded("base:1", tmp_path / BASE_RECORD)
    assert done.returncode == 0 and "has no digest" in done.stdout and read_base(tmp_path).digest is None
    refused = recorded("base:1@sha256:12", tmp_path / "other.json")
    assert refused.returncode == 1 and "no digest" in refused.stderr and not (tmp_path / "other.json").exists()


def test_every_variable_of_the_base_has_one_class_and_a_reason() -> None:
    names = [name for table in classified().values() for name in table]
    assert len(names) == len(set(names)) and set(classified()) == {"keep", "set", "unset"}
    assert all(reason for table in classified().values() for reason in table.values())
    assert set(OF_THE_BASE) - set(names) == set()


@pytest.mark.parametrize("recipe", ["agent", "eagle3", "eagle3-mi300x", "eagle3-mla", "eagle3-opt", "w4a16", "w4a8"])
def test_what_counts_as_set_is_set_by_every_recipe_for_the_image(recipe: str) -> None:
    assert set(classified()["set"]) <= set(load_recipe(recipe).environment)
    assert not set(classified()["unset"]) & set(load_recipe(recipe).environment)


@pytest.mark.parametrize(
    ("record", "verdict", "found"),
    [
        (base_record(), "ok", "lmsysorg/sglang-rocm:v1, aiter c16d44b93a, sglang ffe98a4279, sha256:dddd"),
        (base_record(digest=None), "warn", "its tag can move"),
        (base_record(env={"A_NEW_ONE": "1"}), "warn", "not in launch/base-image.toml: A_NEW_ONE"),
        (base_record(versions={"sglang": "0.4.1"}), "warn", "of another base image: sglang"),
        ("{", "warn", "unreadable"),
        (base_record(digest="sha256:12"), "warn", "unreadable"),
        (None, "warn", "no record of a base image"),
    ],
)
def test_doctor_reports_the_base(tmp_path: Path, record: str | None, verdict: str, found: str) -> None:
    machine = mi325x(tmp_path)
    (tmp_path / BASE_RECORD).unlink()
    if record is not None:
        write(tmp_path, {BASE_RECORD: record})
    result = check(machine, "base")
    assert result.severity.value == verdict and found in result.found


def test_commits_of_the_record_identify_versions_that_name_none(tmp_path: Path) -> None:
    installed = {"aiter": "0.1.20", "sglang": "0.5.21.dev1+g1234567", "torch": "2.11.0"}
    write(tmp_path, {BASE_RECORD: base_record(versions={"aiter": "0.1.20"})})
    found = identified(installed, tmp_path)
    assert found == installed | {"aiter": "0.1.20+gc16d44b93a52"}
    assert base_problem(found, tmp_path) is None
    write(tmp_path, {BASE_RECORD: base_record(versions={"aiter": "0.1.19"})})
    assert identified(installed, tmp_path) == installed


def test_serve_warns_without_a_record_of_its_own_image() -> None:
    eight = tuple(Device("gfx942", 304, "p", 0, 256 * GIB) for _ in range(8))
    problem = KimiError("no record of a base image", remedy="build the image")
    notes = render(load_recipe("agent"), machine=Machine(eight, base_problem=problem)).notes
    assert Finding("no record of a base image; build the image", Severity.WARN) in notes
    assert not any("base image" in note.found for note in render(load_recipe("agent"), machine=Machine(eight)).notes)


def test_pinning_writes_the_digests_into_the_dockerfile(tmp_path: Path) -> None:
    for name in ("Dockerfile", "launch/pin-base.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\necho "$ANSWER"\n')
    for path in (docker, tmp_path / "launch/pin-base.sh"):
        path.chmod(0o755)

    def pin(*words: str, answer: str = DIGEST) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ANSWER": answer}
        return subprocess.run([tmp_path / "launch/pin-base.sh", *words], env=environ, capture_output=True, text=True)

    before = (tmp_path / "Dockerfile").read_text()
    assert pin(answer="not found").returncode == 1 and pin("a b:c").returncode == 2
    assert (tmp_path / "Dockerfile").read_text() == before
    for tag in ([], [], ["other/base:v2"]):
        assert pin(*tag).returncode == 0
    wanted = f"other/base:v2@{DIGEST}"
    assert f"ARG BASE_IMAGE={wanted}\n" in (tmp_path / "Dockerfile").read_text()
    assert re.search(r"imagetools inspect other/base:v2 ", (tmp_path / "asked").read_text())
    assert f"ARG KERNELS_IMAGE=python:3.12-slim-bookworm@{DIGEST}\n" in (tmp_path / "Dockerfile").read_text()
    assert json.loads(base_record())["digest"]

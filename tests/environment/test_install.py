"""requirements/install.sh on machines that lack something, in a clean environment: one line with the remedy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.repository import ROOT

from kimi_w4a8_eagle3.base.toml import tomllib

INSTALL = ROOT / "requirements/install.sh"
AWAY = "http://127.0.0.1:9/simple"  # the port of `discard`: no service of today listens there
TOOLS = [
    "awk", "bash", "cat", "df", "dirname", "du", "env", "g++", "grep", "lscpu", "mktemp", "rm", "sed", "tail",
    "uname",
]  # fmt: skip


class Machine:
    """A folder of programs as PATH, and what the installation says there."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.venv = folder / "bin", folder / "a space" / "venv"
        self.programs.mkdir()
        self.venv.parent.mkdir()
        for tool in TOOLS:
            self.link(tool)
        self.script("python3", f'exec "{sys.executable}" "$@"')  # a relocated Python does not find its home by a link

    def link(self, tool: str) -> None:
        found = shutil.which(tool)
        assert found, tool
        (self.programs / tool).symlink_to(found)

    def script(self, name: str, text: str) -> None:
        (self.programs / name).unlink(missing_ok=True)
        (self.programs / name).write_text(f"#!{self.programs}/bash\n{text}\n")
        (self.programs / name).chmod(0o755)

    def python(self, version: str) -> None:
        """Add `python3.X`; it reports its version, and is the Python of this test."""
        report = f"[[ $2 != *version_info* ]] || {{ echo {version}; exit; }}"
        self.script(f"python{version}", f'{report}\nexec "{sys.executable}" "$@"')

    def install(self, stage: str = "demo", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.venv.parent), "PATH": str(self.programs), "LANG": "C.UTF-8", **variables}
        return subprocess.run(
            [INSTALL, *filter(None, [stage]), str(self.venv)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def refusal(self, code: int = 1, **variables: str) -> str:
        """The one line with which it ends before anything is installed."""
        done = self.install(**variables)
        assert (done.returncode, self.venv.exists()) == (code, False), done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


NO_PIP = f'[[ $2 != *pip* ]] || exit 1\nexec "{sys.executable}" "$@"'
NO_ROOM = 'echo header\necho "disk 100 98 2000000 98% /"'
LACKING = [
    ("g++", "", r"no C\+\+ compiler \(g\+\+\): apt-get install g\+\+"),
    ("lscpu", "", r"no program lscpu, which SGLang runs: apt-get install util-linux"),
    ("python3", "", r"no python3 here: apt-get install python3 python3-venv"),
    ("python3", NO_PIP, r"python3 has no module venv: apt-get install python3-venv"),
    ("df", NO_ROOM, r"1 GB are free here: make room: \d GB are needed"),
    ("uname", "echo Darwin arm64", r"this is Darwin arm64, or without glibc: Linux x86-64.*"),
]


@pytest.mark.parametrize(("program", "instead", "line"), LACKING)
def test_a_machine_that_lacks_something_gets_one_line(machine: Machine, program: str, instead: str, line: str) -> None:
    (machine.programs / program).unlink()
    if instead:
        machine.script(program, instead)
    assert re.fullmatch(f"install: {line}", machine.refusal())


@pytest.mark.parametrize("stage", ["", "everything"])
def test_a_stage_must_be_named(machine: Machine, stage: str) -> None:
    done = machine.install(stage)
    assert done.returncode == 1 and "requirements/install.sh demo|test" in done.stderr


@pytest.mark.slow
def test_no_network(machine: Machine) -> None:
    done = machine.install(PIP_INDEX_URL=AWAY, PIP_RETRIES="0", PIP_USER="1", PIP_REQUIRE_VIRTUALENV="1")
    assert done.returncode == 1 and not machine.venv.exists()
    assert "install: the package index cannot be reached: with a network" in done.stderr.splitlines()[-1]


@pytest.fixture
def with_uv(machine: Machine) -> Iterator[Callable[[str], None]]:
    """A machine with uv whose Python has neither pip nor ensurepip, so nothing is downloaded for the first steps."""

    def says(version: str) -> None:
        report = f"[[ $2 != *version_info* ]] || {{ echo {version}; exit; }}\n[[ $2 != *pip* ]] || exit 1"
        machine.script("python3", f'{report}\nexec "{sys.executable}" "$@"')
        (machine.programs / "uv").symlink_to(Path(sys.prefix) / "bin/uv")

    yield says


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_an_unfit_python_and_no_download_of_another(
    machine: Machine, with_uv: Callable[[str], None], version: str
) -> None:
    with_uv(version)
    line = machine.refusal(3, UV_PYTHON_DOWNLOADS="never", UV_PYTHON_PREFERENCE="only-managed")
    assert line == (
        f"install: python3 is Python {version}, and uv cannot get Python 3.12: "
        "install Python 3.11, 3.12 or 3.13 and name it: make PYTHON=python3.12"
    )


@pytest.fixture
def wheels(machine: Machine, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """An environment with uv, whose only packages are empty wheels of torch; returns the variables that say so."""
    uv, folder = Path(sys.prefix) / "bin/uv", tmp_path / "wheels"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, machine.venv], check=True)
    (machine.venv / "bin/uv").symlink_to(uv)
    folder.mkdir()
    pins = dict(
        line.split("==") for line in (ROOT / "requirements/constraints.txt").read_text().splitlines() if "==" in line
    )

    def make(**requires: str) -> dict[str, str]:
        torch = [("torch", version, need) for version, need in requires.items()]
        wanted = [(name, pins["torch"] + version, need) for name, version, need in torch]
        wanted += [("torchvision", pins["torchvision"], ""), ("nvidia-cublas", "1.0", "")]
        for name, version, need in wanted:
            place = f"{name.replace('-', '_')}-{version}"
            with zipfile.ZipFile(folder / f"{place}-py3-none-any.whl", "w") as wheel:
                lines = [f"Requires-Dist: {need}"] if need else []
                metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]
                wheel.writestr(f"{place}.dist-info/METADATA", "\n".join(metadata))
                wheel.writestr(
                    f"{place}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
                )
                wheel.writestr(f"{place}.dist-info/RECORD", "")
        return {"PIP_FIND_LINKS": str(folder), "PIP_INDEX_URL": f"file://{tmp_path}/empty", "UV_NO_CACHE": "1"}

    return make


def test_a_cuda_build_of_torch_is_not_installed_unasked(
    machine: Machine, wheels: Callable[..., dict[str, str]]
) -> None:
    line = machine.refusal(3, **wheels(**{"": "nvidia-cublas"}))
    assert line.startswith("install: only PyTorch's CUDA build can be had here for Python 3.")
    assert "GB more on the disk" in line and "TORCH_BACKEND=cuda accepts it" in line


def test_a_cuda_build_of_torch_is_installed_when_accepted(
    machine: Machine, wheels: Callable[..., dict[str, str]]
) -> None:
    done = machine.install(TORCH_BACKEND="cuda", **wheels(**{"": "nvidia-cublas"}))
    assert re.search(r"^install: torch [\d.]+$", done.stdout, re.MULTILINE), done.stderr
    assert "install: what SGLang needs failed" in done.stderr  # there is nothing else in that folder


def test_a_cpu_build_in_a_folder_of_pips_is_preferred(machine: Machine, wheels: Callable[..., dict[str, str]]) -> None:
    done = machine.install(**wheels(**{"": "nvidia-cublas", "+cpu": ""}))
    assert re.search(r"^install: torch [\d.]+\+cpu$", done.stdout, re.MULTILINE), done.stderr
    begun, *_, last = done.stdout.splitlines()  # a step is named with its size when it begins
    assert re.fullmatch(r"install: demo, up to 3 GB into .+; if it is interrupted, the same command goes on", begun)
    assert re.search(r"^install: PyTorch, 0\.6 GB \.\.\. \d+ s$", done.stdout, re.MULTILINE)
    assert last == "install: what SGLang needs, 1.3 GB ..."  # it failed


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]


def test_the_places_that_name_the_versions_of_python_agree() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    text = INSTALL.read_text()
    (accepted,) = re.findall(r"=~ \^3\\\.1\[(\d+)\]\$", text)
    assert [f"3.1{digit}" for digit in accepted] == PYTHONS[1:]  # 3.10 is the image's, and has no wheel of Triton 3.9
    listed = f"{', '.join(PYTHONS[1:-1])} or {PYTHONS[-1]}"
    for name in ("README.md", "docs/laptop.md", "requirements/install.sh"):
        assert f"Python {listed}" in (ROOT / name).read_text(), name

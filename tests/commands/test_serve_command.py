"""`kimi-w4a8 serve --dry-run` shows what would run; a start on the wrong machine is refused before anything happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.kimi_checkpoint import edit_json
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.commands import serve as serve_command
from kimi_w4a8_eagle3.machine.aiter_regime import Regime
from kimi_w4a8_eagle3.machine.hardware import Machine
from kimi_w4a8_eagle3.recipe import launch as rendering
from kimi_w4a8_eagle3.recipe.launch import load_recipe, resolve, with_settings
from kimi_w4a8_eagle3.supervision import checks
from kimi_w4a8_eagle3.supervision import serve as foreground
from kimi_w4a8_eagle3.supervision.checks import checked_weights


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", classmethod(lambda cls: cls()))
    monkeypatch.setattr(rendering, "installed_regime", lambda: Regime.UNKNOWN)
    monkeypatch.setattr(serve_command, "require_parsed", lambda _: None)  # ten seconds; test_rules.py asks SGLang


def serve(*arguments: str):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_dry_run_prints_environment_command_and_notes() -> None:
    result = serve("--recipe", "eagle3-opt", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("export TRITON_MAX_CACHE_SIZE=2147483648\n")
    assert "export AITER_FLYDSL_STAGE2_TILE_K=256\n" in result.stdout
    assert "\npython -m sglang.launch_server \\\n" in result.stdout
    assert "# --mem-fraction-static 0.824 --max-total-tokens 1702894: page-offset guard" in result.stderr
    assert "#" not in result.stdout  # the notes do not get in the way of a shell
    assert result.stderr.startswith("# this would run; nothing was started\n")


OPEN = "# warning: open to the network at 0.0.0.0{}; smg in front gives TLS, time-outs and tenants\n"


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("--host 0.0.0.0", OPEN.format(" without a key (--api-key-file FILE)")),
        ("--api-key-file /no/key", "# warning: the key file /no/key is not on this machine; a start needs it\n"),
        ("--host 0.0.0.0 --api-key-file key", OPEN.format("").replace("warning: ", "")),
        ("--host 127.0.0.1", ""),
    ],
)
def test_a_dry_run_warns_of_an_open_server_and_of_a_key_file_that_is_missing(
    words: str, warned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("k" * 20)
    lines = serve("tiny", "--dry-run", *words.split()).stderr.splitlines(keepends=True)
    assert [line for line in lines if "warning" in line or "network" in line] == [warned] * bool(warned)


@pytest.mark.parametrize("option", ["--host", "--ops-host"])
def test_a_dry_run_refuses_what_is_no_host(option: str) -> None:
    error = serve("tiny", "--dry-run", option, "a b").exception
    assert isinstance(error, KimiError) and (error.exit_code, error.what) == (2, f"{option} a b is not a valid value")


def test_a_start_without_a_terminal_says_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ready_to_serve", lambda launch, _: launch)
    monkeypatch.setattr(foreground, "serve_foreground", lambda *_: 0)
    assert serve("tiny").stderr.startswith("# the engine starts with this environment and command\n")


def test_a_known_fault_refuses_the_start_and_is_noted_by_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", classmethod(lambda cls: cls((), {"sglang": "0.5.17"})))
    shown = serve("-r", "tiny", "--dry-run")
    assert shown.exit_code == 0 and "# refused: SGLang 0.5.16 and 0.5.17" in shown.stderr
    started = serve("-r", "tiny", "--ops-port", "0")
    assert isinstance(started.exception, KimiError) and "the known fault sglang-0-5-16" in started.exception.where


def test_no_preflight_starts_what_kimi_check_refuses(tmp_path: Path) -> None:
    assert "# override: --no-preflight" in serve("-r", "tiny", "--dry-run", "--no-preflight").stderr
    target = shutil.copytree(ROOT / "kimi_w4a8_laptop/tiny/weights/target-w4a8", tmp_path / "target")
    edit_json(target / "config.json", lambda c: c["quantization_config"]["export"].update(pack_method="order"))
    launch = resolve(with_settings(load_recipe("tiny"), {"model.repo": str(target)})).on(Machine())
    with pytest.raises(KimiError, match="pack_method is 'order'"):
        checked_weights(launch)
    assert checked_weights(launch, preflight=False)


def test_a_misspelt_variable_of_the_shell_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, right in (("KIMI_MOE_BAKEND", "KIMI_MOE_BACKEND"), ("KIMI_MAX_MASK", "KIMI_MAX_MASK_MS")):
        with monkeypatch.context() as shell:
            shell.setenv(name, "0")
            assert f"did you mean '{right}'?" in str(serve("-r", "w4a8", "--dry-run").exception)


def test_local_directories_replace_the_repositories(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    result = serve("-r", "eagle3", "--dry-run", "--model", str(tmp_path), "--draft", str(tmp_path / "d"))
    assert f"--model-path {tmp_path}" in result.stdout
    assert f"--speculative-draft-model-path {tmp_path / 'd'}" in result.stdout
    assert "moving revision" not in result.stderr


def test_a_machine_without_the_gpus_is_refused_before_the_start() -> None:
    result = serve("-r", "eagle3")
    assert isinstance(result.exception, KimiError)
    assert "this machine has 0 AMD GPUs, the recipe needs 8" in result.exception.what
    assert "kimi-w4a8 serve tiny" in result.exception.remedy


@pytest.mark.parametrize("recipe", ["tiny", "eagle3-opt"])
def test_json_has_everything_a_program_needs_and_the_usual_options_of_a_server(recipe: str) -> None:
    asked = {"host": "0.0.0.0", "port": "8123", "tp": "4", "served-model-name": "kimi"}
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    launch = json.loads(serve(recipe, "--dry-run", "--json", *words, "--", "--tool-call-parser", "kimi_k2").stdout)
    argv = launch["argv"]
    module = ["kimi_w4a8_eagle3.sglang_plugin.run_module"] * (recipe == "tiny")  # forks on a CPU
    assert argv[1:4][: 2 + len(module)] == ["-m", *module, "sglang.launch_server"]
    assert launch["base_url"] == "http://127.0.0.1:8123"
    for name, value in {**asked, "tool-call-parser": "kimi_k2"}.items():
        assert argv[argv.index("--tp-size" if name == "tp" else f"--{name}") + 1] == value
    assert (launch["env"].get("FLYDSL_MOE_STAGE1_SCHED") == "0") == (recipe == "eagle3-opt")

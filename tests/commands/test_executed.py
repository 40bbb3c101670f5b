"""Every command line of the pages is executed: here as it stands, by another test, or by `.ci/run`.

A line that needs what no test has says so: GPUs, a container engine, a network. Its test, if it has one, runs it with
stand-ins or at a smaller size. The unit tests run as root and as another user (`.ci/run`), and so do these lines.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.page_lines import KNOWN, PAGES, commands
from support.repository import ROOT
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app

HERE, CI = "here", ".ci/run"
GPU, CLUSTER, NETWORK, OTHERS = "MI325X or MI355X", "Docker, Kubernetes or Slurm", "a network", "other programs"
TIME = "minutes to hours"
PROGRAMS = r"(?:git|docker|curl|kubectl|sbatch|vllm|rocprofv3) \S|(?:\S*/)?[\w-]+\.sh\b"
URL = r"(URL|http://127\.0\.0\.1:9527)"
SERVED = "e2e/test_serve_processes.py::test_a_key_is_asked_for_and_shown_nowhere_and_ctrl_c_ends_everything"
PERSON = "e2e/test_openai_api.py::test_a_persons_path_from_the_first_request_to_the_report"
# A line is that of the first expression that matches all of it. Then what executes it, and what it lacks here.
LINES: tuple[tuple[str, str, str], ...] = (
    (r"git clone( URL kimi-w4a8-eagle3)?|make|make (demo|docs|test|test-all|lint|venv)", CI, ""),
    (r"kimi-w4a8 (bench list|bench predict .*|bench sweep .* --print|recipes|patch( --check)?)", HERE, ""),
    (r"kimi-w4a8 (plan agent (--gpu mi325x|--tp 16 --set nnodes=2)|serve agent --dry-run)", HERE, ""),
    (r"python -m proof\.account -c 40", HERE, ""),
    (r"python -m proof\.account\.directions",
     "proof/test_account.py::test_the_model_orders_two_layouts_as_infera_measured_them", ""),
    (r"launch/docker-run\.sh .* --as compose",
     "launch/test_docker_up.py::test_compose_starts_what_the_docker_line_starts", CLUSTER),
    (r"launch/docker-run\.sh .* --as systemd",
     "launch/test_docker_up.py::test_systemd_starts_what_the_docker_line_starts", CLUSTER),
    (r"launch/docker-run\.sh .*", "launch/test_docker_run.py::test_the_lines_of_the_pages_work_with_relative_names",
     CLUSTER),
    (r"(launch/docker-run\.sh|kimi-w4a8)( bench)?",
     "launch/test_docker_run.py::test_files_that_arguments_name_get_in_under_the_hosts_path", CLUSTER),
    (r"launch/pin-base\.sh.*", "machine/test_base_image.py::test_pinning_writes_the_digest_into_both_files", NETWORK),
    (r"docker (image|builder) .*", "launch/test_docker_up.py::test_the_lines_that_undo_leave_nothing", CLUSTER),
    (r"docker (build|compose|logs|rm|rmi|stop) ?.*", "", CLUSTER),
    (r"kubectl apply -k .*", "launch/test_k8s_manifests.py::test_the_objects_are_valid_for_kubernetes", CLUSTER),
    (r"kubectl .*", "", CLUSTER),
    (r"sbatch .*", "launch/test_sbatch.py::test_the_command_lines_are_ours", CLUSTER),
    (r"(bench/con\d+|eval/gsm8k)\.sh( URL| --\S+ \S+)*", "launch/test_host_scripts.py::test_what_is_run", GPU),
    (r"launch/vllm\.sh \S+", "launch/test_vllm.py::test_the_container_runs_the_same_command_in_the_right_image", GPU),
    (r"vllm bench serve .*", "launch/test_vllm.py::test_vllms_own_parser_accepts_every_command", GPU),
    (r"rocprofv3 .*", "", GPU),
    (r"python -m proof\.on_gpu",
     "moe/triton/test_triton_interpreter.py::test_the_program_for_a_gpu_runs_whole", GPU),
    (r"pip install .*", "", NETWORK),
    (r"(\.venv/bin/)?kimi-w4a8 serve tiny", SERVED, ""),
    (r"kimi-w4a8 check MODEL --record answers\.json --base-url URL".replace("URL", URL), SERVED, ""),
    (r"kimi-w4a8 serve tiny --replicas 2", "e2e/test_faults.py::test_the_whole_fleet_is_measured_through_its_router",
     ""),
    (r"kimi-w4a8 serve (agent|eagle3).*", "", GPU),
    (r"curl .*127\.0\.0\.1:9528/ready", SERVED, ""),
    (r"curl .*/(start_profile .*|flush_cache)", "sglang_plugin/test_door_keys.py::test_administrative_endpoints", GPU),
    (r"curl .*kimi-k2\.5-tiny.*", PERSON, ""),
    (r"curl .*amd/Kimi-K2.*", "", GPU),
    (r"curl .*/v1/models", "e2e/test_openai_api.py::test_the_served_model_is_listed", ""),
    (r"(\.venv/bin/)?kimi-w4a8 chat", "commands/test_chat.py::test_on_a_terminal_everything_is_shown", ""),
    (r"(\.venv/bin/)?kimi-w4a8 bench chat .*", PERSON, ""),
    (r"(\.venv/bin/)?kimi-w4a8 bench tiny-con2 .*", "speed/test_measure.py::test_tokens_and_requests_are_counted", ""),
    (r"kimi-w4a8 bench (con2|con40) .*", "speed/test_workloads.py::test_con2_and_con40_are_the_published_commands",
     GPU),
    (r"python -m proof\.account\.layouts",
     "proof/test_account.py::test_the_page_of_layouts_has_what_the_command_prints", ""),
    (r"make bench|kimi-w4a8 bench ab --a tiny.*",
     "speed/test_report.py::test_a_comparison_of_engines_ends_in_a_page_of_its_result", TIME),
    (r"kimi-w4a8 bench ab --a .*", "", GPU),
    (r"kimi-w4a8 bench sweep -r tiny .*",
     "speed/test_report.py::test_a_comparison_of_engines_ends_in_a_page_of_its_result", TIME),
    (r"kimi-w4a8 bench sweep .*", "", GPU),
    (r"kimi-w4a8 bench compare RUN\.\.\.", "speed/test_report.py::test_the_command_line_compares_and_predicts", ""),
    (r"kimi-w4a8 report RUN\.\.\.", PERSON, ""),
    (rf"kimi-w4a8 eval tools --base-url {URL}.*",
     "accuracy/test_eval_tools.py::test_the_published_table_judges_schema_accuracy", ""),
    (rf"kimi-w4a8 eval gsm8k --base-url {URL}",
     "accuracy/test_eval_gsm8k.py::test_each_problem_is_recorded_with_its_status_and_score", ""),
    (r"kimi-w4a8 eval gsm8k --base-url URL --baseline .*",
     "accuracy/test_eval_gsm8k.py::test_a_baseline_of_another_protocol_is_refused", ""),
    (r"kimi-w4a8 eval gsm8k --resume .*", "accuracy/test_eval_gsm8k.py::test_a_resumed_run_asks_nothing_twice", ""),
    (rf"kimi-w4a8 eval smoke --base-url {URL}", "e2e/test_evaluation.py::test_smoke_passes_with_eagle3", ""),
    (r"make eval|kimi-w4a8 eval tiny-math --recipe tiny",
     "e2e/test_evaluation.py::test_tiny_math_reaches_the_recorded_accuracy", TIME),
    (r"kimi-w4a8 eval lossless --recipe tiny --exact", "e2e/test_evaluation.py::test_eagle3_changes_no_greedy_token",
     TIME),
    (r"kimi-w4a8 eval .* --recipe (eagle3-opt|w4a16|agent).*", "", GPU),
    (r"kimi-w4a8 accept( --full)?",
     "e2e/test_accept.py::test_a_taken_port_fails_one_stage_and_the_same_command_runs_that_one_alone", GPU),
    (r"kimi-w4a8 fetch --recipe \S+ --(verify|offline)",
     "fetch/test_fetch_verify.py::test_it_is_looked_at_without_a_network_and_compared_with_one", NETWORK),
    (r"kimi-w4a8 fetch .* --revision COMMIT", "fetch/test_fetch_download.py::test_pinned_commit_and_paged_listing",
     NETWORK),
    (r"kimi-w4a8 fetch --recipe \S+", "fetch/test_fetch_download.py::test_command_line_end_to_end", NETWORK),
    (r"kimi-w4a8 trust --recipe \S+( --yes)?", "recipe/test_trusted_code.py::test_kimi_trust_shows_then_records",
     NETWORK),
    (r"kimi-w4a8 quantize w4a8-target .* --exclude PATTERN",
     "quantize/test_quantize_target.py::test_other_layers_keep_their_bytes", ""),
    (r"kimi-w4a8 quantize w4a8-target .* --format mxfp4",
     "quark/test_mxfp4_target.py::test_its_values_are_those_that_quark_reads", ""),
    (r"kimi-w4a8 quantize fp8-draft .* --vllm-exclude", "quantize/test_quantize_draft.py::test_the_built_in_draft", ""),
    (r"kimi-w4a8 quantize fix-exclude DIR",
     "quantize/test_quantize_draft.py::test_fix_exclude_rewrites_once_and_touches_nothing_else", ""),
    (r"kimi-w4a8 warm", "moe/flydsl/test_flydsl_warm.py::test_warm_compiles_what_the_server_launches", ""),
    (r"make draft|kimi-w4a8 draft (states|train|compare) .*",
     "e2e/test_draft_for_traffic.py::test_the_draft_learns_the_kind_of_text_that_it_did_not_know", TIME),
    (r"kimi-w4a8 draft collect .*",
     "e2e/test_draft_for_traffic.py::test_what_was_answered_is_stored_as_ids_and_no_text", ""),
    (r"kimi-w4a8 draft switch .*",
     "draft/test_draft_training.py::test_a_link_is_exchanged_for_whole_drafts_only_and_goes_back", ""),
    (r"make virtual-mi325x", "laptop/test_virtual_device.py::test_the_fault_is_noticed_by_name", TIME),
    (r"make kernels|python -m proof\.kernels.*",
     "moe/flydsl/test_flydsl_counts.py::test_the_command_names_what_got_worse", TIME),
    (r"python -m proof\.interpreted --weights mxfp4",
     "moe/flydsl/test_flydsl_mxfp4.py::test_the_packed_layout_is_the_contracts_integers", TIME),
    (r"python -m proof\.agents .*", "sglang_plugin/test_recorded_agents.py::test_every_request_is_served", OTHERS),
    (r"python -m proof\.admission .*", "proof/test_climb.py::test_time_and_memory_of_a_try_are_its_own", TIME),
    (r"make faults|python -m proof\.faults .*",
     "e2e/test_faults.py::test_kill_9_of_an_engine_is_seen_by_its_clients_alone_and_the_other_replica_goes_on", TIME),
    (r"make fuzz|python -m proof\.fuzz --url .*", "e2e/test_fuzzing.py::test_the_requests_of_one_seed", TIME),
)  # fmt: skip


def words_of(page: Path) -> list[str]:
    """Command lines of a page; of README also those in its text."""
    known = re.compile(f"{KNOWN.pattern}|{PROGRAMS}")
    return [" ".join(line) for line, alone in commands(page.read_text(), known) if alone or page == ROOT / "README.md"]


ALL = sorted({line.removeprefix(".venv/bin/") for page in PAGES for line in words_of(page)})


def row(line: str) -> tuple[str, str, str] | None:
    return next((found for found in LINES if re.fullmatch(found[0], line)), None)


@cache
def names_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_line_of_a_page_is_executed_or_says_what_it_lacks() -> None:
    assert [line for line in ALL if row(line) is None] == []


def test_what_executes_a_line_is_there() -> None:
    used = {row(line) for line in ALL}
    assert [found for found in LINES if found not in used] == []
    for _, by, lacks in LINES:
        path, _, name = by.partition("::")
        assert by or lacks
        assert by in ("", HERE, CI) or name in names_of(ROOT / "tests" / path), by


def test_ci_runs_what_the_readme_begins_with() -> None:
    script = (ROOT / CI).read_text()
    for line in ("git clone", "as_user make demo", "as_root make demo", "as_user make lint", "as_user make test-all"):
        assert re.search(rf"^ *{line}\b", script, re.MULTILINE), line


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of this one, and the environment as `.venv`."""
    for path in ROOT.iterdir():
        if path.name not in {".venv", "runs", "build"}:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", [line for line in ALL if (found := row(line)) and found[1] == HERE])
def test_a_line_runs_as_it_stands(
    line: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(line)
    if program == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        assert not ended.value.code and capsys.readouterr().out
    else:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 and result.output, result.output


def test_the_program_lies_where_the_readme_says(checkout: Path) -> None:
    words = [".venv/bin/kimi-w4a8", "serve", "tiny", "--dry-run"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "sglang.launch_server" in done.stdout, done.stderr

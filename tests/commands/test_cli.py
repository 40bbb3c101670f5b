"""The table of sub-commands: true to the commands, and no import for a line of help."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.repository import ROOT
from support.scripted_server import scripted_server, whole
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app, load, run, verbs
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.recipe.schema import load_recipe, recipe_names
from kimi_w4a8_laptop import tiny

COMPLETIONS = [
    ("serve eagle3-o", "eagle3-opt"), ("plan -r tin", "tiny"), ("serve --gpu mi32", "mi325x"),
    ("bench run con4", "con40"), ("bench con4", "con40"), ("bench comp", "compare"),
]  # fmt: skip
LINES = {name: line for name, (_, _, line, _) in verbs().items()}


@pytest.mark.parametrize("name", LINES)
def test_the_table_says_what_the_command_says(name):
    assert (load(name).help or "").strip().splitlines()[0] == LINES[name]


def test_the_list_of_commands_imports_none_of_them():
    code = """import atexit, sys
atexit.register(lambda: print([m for m in sys.modules if '.commands.' in m or m == 'torch']))
from kimi_w4a8_eagle3.cli import main
sys.argv = ['kimi', '--help']
main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr


def at_80_columns(*words):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}).invoke(app, words).output


def test_the_root_help_has_all_verbs_in_the_groups_of_the_readme_whole_at_80_columns():
    printed = re.findall(r"^([\w ]+), for example `kimi-w4a8 .+`:\n((?:  .+\n?)+)", at_80_columns("--help"), re.M)
    groups = {title.lower(): [line.split(maxsplit=1) for line in body.splitlines()] for title, body in printed}
    rows = (ROOT / "README.md").read_text().partition("## Commands\n")[2].partition("\n## ")[0]
    listed = {
        group: re.findall(r"`([\w-]+)`", text) for group, text in re.findall(r"^\| (.+?) \| (.*`.*) \|", rows, re.M)
    }
    assert {group: [name for name, _ in body] for group, body in groups.items()} == listed
    assert sorted(row for body in groups.values() for row in body) == sorted(map(list, LINES.items()))
    modules = [path.stem for path in ROOT.glob("kimi_w4a8_*/commands/*.py")]
    assert {name.replace("-", "_") for name in LINES} == set(modules) - {"__init__", "options", "groups"}


@pytest.mark.parametrize("name", ["bench", "eval", "draft", "quantize"])
def test_the_help_of_a_group_is_whole_at_80_columns(name):
    shown = dict(re.findall(r"^  ([\w-]+)  +(.+)$", at_80_columns(name, "--help").partition("Commands:\n")[2], re.M))
    assert shown == {inner: command.help.partition("\n")[0] for inner, command in load(name).commands.items()}


@pytest.mark.parametrize("words", ["", "serve", "bench", "bench con2", "draft train", "tune-moe"])
def test_help_before_a_command_is_the_option_after_it(words):
    answer = at_80_columns("help", *words.split())
    assert answer == at_80_columns(*words.split(), "--help") and answer.startswith("Usage: ")


@pytest.mark.parametrize("columns", ["80", "0", "5", "-1"])
def test_the_names_of_recipes_are_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        run(lambda: app(["recipes"]))
    cells = [re.split(r"[|│┃]", line) for line in capsys.readouterr().out.splitlines()]
    assert set(recipe_names()) <= {row[1].strip() for row in cells if len(row) > 1}


def test_a_misspelt_command_gets_the_nearest():
    result = CliRunner().invoke(app, ["serv"])
    assert result.exit_code == 2 and "Did you mean 'serve'?" in result.output


def test_every_recipe_is_listed_with_its_summary():
    listed = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)
    assert [(row["recipe"], row["summary"]) for row in listed] == [(n, load_recipe(n).summary) for n in recipe_names()]
    assert all(row["summary"] for row in listed)
    assert {row["hardware"] for row in listed if row["recipe"] in ("tiny", "agent")} == {"CPU", "8 x mi325x"}
    assert [row["recipe"] for row in listed if row["status"] == "verified"] == ["tiny"]  # nothing ran on a GPU yet


@pytest.mark.parametrize(("words", "offered"), COMPLETIONS)
def test_the_shell_completes_recipes_workloads_and_gpus(words, offered):
    env = {
        "_KIMI_W4A8_COMPLETE": "complete_bash",
        "COMP_WORDS": f"kimi-w4a8 {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    result = CliRunner().invoke(app, [], prog_name="kimi-w4a8", env=env)
    assert result.output.split() == [offered]


def test_ctrl_c_is_one_line():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    with scripted_server(lambda *_: os.kill(os.getpid(), signal.SIGINT) or whole({})) as server:
        words = ["check", str(tiny.target_path()), "--record", "answers.json", "--base-url", server.base_url]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 130 and result.stderr.strip() == "kimi-w4a8: stopped by Ctrl-C"


LONG = "x" * 300  # no file system has it; as for a folder that one cannot enter, a question for the file is an OSError
DEEP = "a file is not valid: its lists or tables nest too deeply\n"
BAD = {f"{words} ./{LONG}.toml": "the system refused it: File name too long\n  where:    "
       for words in ("serve --dry-run", "plan -r", "gates", "trust")}  # fmt: skip
BAD |= {
    "serve ./args.toml --dry-run": "there is no argument --chunked-prefil-size; did you",
    "serve ./deep.toml --dry-run": DEEP,
    "bench chat --base-url http://127.0.0.1:1 --prompts-file deep.json": DEEP,
    "serve -r tiny --dry-run -- eagle3 --port 1": "two recipes were given",
    "plan agent --gpu mi325x --model .": "config.json lacks sizes: unsupported operand",
    "warm --tp 8 --ep 3": "--ep 3 does not divide --tp [8]",
    "draft collect box --from latin1.jsonl": "cannot read the requests: not UTF-8 text",
    "draft collect box --from empty.jsonl": "the file has no request\n  where:    empty.jsonl",
    "draft switch . --back": "there is no earlier draft\n",
    "draft switch . --to .": "this is no draft of `kimi-w4a8 draft train`\n",
    "draft states nowhere --recipe tiny": "no collection is in this folder\n  where:    nowhere",
    "prepare tiny --model nowhere": "there is no folder nowhere\n  where:    --model",
    "prepare ./pipe.toml": "no recipe file ./pipe.toml",
    "ready --port FREE --timeout 0": "the server is not ready after 0 s: no answer\n",
    "quantize fix-exclude nowhere": "config.json is missing\n  where:    nowhere/config.json",
    "bench compare nowhere": "no run is here: No such file or directory\n  where:    nowhere",
    "bench con2 -r tiny --resume nowhere": "no run is here: No such file or directory\n  where:    nowhere",
    "eval smoke --base-url x": "the server does not answer: Request URL is missing an",
    "eval gsm8k --base-url http://127.0.0.1:1 --resume nowhere": "no run is here: No such file or directory",
    "warm --recipe nosuch": "unknown recipe 'nosuch'\n",
    "draft collect .": "collecting was not switched on: TypeError\n  where:    collect.json",
    "eval tools --base-url URL": """the server's answer is no completion: '{"data": [{"id": "m"}]}'""",
    "report .": "result.json cannot be read: Input tag 'demo' found",  # of a demo that wrote no page
    "eval tools --base-url http://[::1": "not an address: Invalid port",
    "eval tools --base-url http://127.0.0.1:99999": "the server does not answer: ",
    f"eval tools --base-url http://{'a' * 300}.com": "the server does not answer: ",
    "serve tiny --port 39527 --ops-port 39527": "port 39527 is the API's, too\n  where:    --ops-port",
    "serve tiny --port PORT": "port PORT on 127.0.0.1 cannot be used",
    "serve tiny --port FREE --ops-port PORT": "port PORT on 127.0.0.1 cannot be used",
    "serve eagle3 --dry-run --set env.AITER_FLYDSL_STAGE2_TILE_K=100": "AITER_FLYDSL_STAGE2_TILE_K='100' is not",
    "serve eagle3 --dry-run --set env.AITER_FLYDSL_STAGE2_TILEK=256": "unknown kernel gate AITER_FLYDSL_STAGE2_TILEK;",
    "serve eagle3 --dry-run --set env.KIMI_MAX_MASK=5": "unknown variable KIMI_MAX_MASK; did you mean",
    "serve eagle3 --dry-run --set tp-size=1.5": "--tp-size 1.5 is not a valid value\n",
    "serve eagle3 --dry-run --gpu mi99": "unknown GPU 'mi99'",
    "serve eagle3 --dry-run --api-key-file .": "the key file cannot be read: Is a directory",
    "serve eagle3 --dry-run --model nowhere": "there is no folder nowhere\n  where:    --model",
    "serve tiny --port FREE --set model.answers=no.json": "cannot read the recorded answers: No such file",
    "serve tiny --port FREE --set model.answers=collect.json": "these are no recorded answers",
    "serve tiny --json": "only a dry run prints JSON",
    "trust agent --revision v1": "'agent' is a recipe",
    "serve w4a8 --dry-run --draft .": "the recipe 'w4a8' has no draft",
    "serve agent:plain --dry-run --draft .": "the recipe 'agent:plain' has no draft",
    "serve eagle3 --dry-run --draft nowhere": "there is no folder nowhere\n  where:    --draft",
    "report loop": "no run is here",
    "check . --base-url http://127.0.0.1:1": "no server is asked without --record",
    "check nowhere --record a.json --base-url URL": "the system refused it: No such file or directory",
    "check . --api-key-file key": "no server is asked without --record",
    "serve ./pipe.toml --dry-run": "no recipe file ./pipe.toml",
    "serve ./piped.toml --dry-run": "no recipe file pipe.toml",
    "bench ./pipe.toml -r tiny": "cannot read the file: it is a pipe",
    "bench chat --base-url http://127.0.0.1:1 --prompts-file pipe": "cannot read the text file: it is a pipe",
    "accept --quick -r loop": "unknown recipe 'loop'",
    "eval gsm8k --base-url http://127.0.0.1:1 --data-dir loop": "cannot read the data of GSM8K: Too many levels",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_message_and_leaves_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {"deep.json": "[" * 100_000, "deep.toml": "x = " + "[" * 5_000, "result.json": '{"kind": "demo"}'}
    files |= {"args.toml": 'extends = "tiny"\nsummary = "s"\n[args]\nchunked-prefil-size = 7', "latin1.jsonl": "\xff"}
    files |= {"piped.toml": 'extends = "pipe.toml"'}
    files |= {"empty.jsonl": "\n", "collect.json": '{"share": "all"}'}
    files["config.json"] = '{"hidden_size": 1, "num_hidden_layers": "x", "first_k_dense_replace": 1}'
    for name, text in files.items():
        tmp_path.joinpath(name).write_text(text, "latin-1")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(tmp_path / name)  # without a writer, so that a reader would wait for one
    with scripted_server(lambda *_: whole({"data": [{"id": "m"}]})) as server, pytest.raises(SystemExit):
        port = server.base_url.rpartition(":")[2]  # that is taken
        line = words.replace("URL", server.base_url).replace("PORT", port).replace("FREE", str(free_port()))
        run(lambda: app(line.split()))
    assert capsys.readouterr().err.startswith(f"kimi-w4a8: {BAD[words].replace('PORT', port)}")
    assert {path.name for path in tmp_path.rglob("*")} == {*files, "loop", "pipe", "pipe.toml"}


@pytest.mark.parametrize(
    "words", ["--help", "--version", "recipes", "gates --json", "bench list", "serve tiny --dry-run"]
)
@pytest.mark.parametrize(
    ("redirected", "message"),
    [(">/dev/full", "the system refused it: No space left on device"), (">&-", "standard output is closed")],
)
def test_a_full_or_closed_standard_output_is_one_message(words, redirected, message):
    command = f'"{sys.executable}" -m kimi_w4a8_eagle3.cli {words} {redirected}'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(f"kimi-w4a8: {message}\n"), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 3

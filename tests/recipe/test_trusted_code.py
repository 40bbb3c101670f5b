"""Code that a checkpoint brings: what runs, what is refused, and that nothing else can be downloaded and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fetch_helpers import kimi
from support.hub_server import HubServer, Repo, serve
from support.null_server import null_server
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.recipe.arguments import Args, parse_arguments
from kimi_w4a8_eagle3.recipe.launch import Launch, Recipe, load_recipe, render
from kimi_w4a8_eagle3.recipe.schema import RecipeCheckpoint
from kimi_w4a8_eagle3.recipe.trusted_code import Source, TrustRecord, code_of, record_path, require_trusted
from kimi_w4a8_lab.base.data_file import require_trusted_tokenizer

NAME = "org/kimi"
CODE = b"""
from .helper import greet

class Words:
    greet = staticmethod(greet)
"""
TOKENIZER = json.dumps({"auto_map": {"AutoTokenizer": ["words.Words", None]}}).encode()


def helper(text: str) -> bytes:
    return f"def greet():\n    return {text!r}\n".encode()


def checkpoint_files(text: str = "first") -> dict[str, bytes]:
    config = b'{"model_type": "llama", "architectures": ["X"]}'
    return {"config.json": config, "tokenizer_config.json": TOKENIZER, "words.py": CODE, "helper.py": helper(text)}


@pytest.fixture
def repo() -> Repo:
    return Repo(checkpoint_files())


@pytest.fixture
def hub(repo: Repo):
    with serve({NAME: repo, "org/code": Repo({"words.py": CODE, "helper.py": helper("other")})}) as server:
        yield server


@pytest.fixture
def cache(hub: HubServer, tmp_path: Path) -> Path:
    """A Hugging Face cache that `kimi-w4a8 fetch` filled from the Hub."""
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    return tmp_path / "hub"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same checkpoint in a plain directory."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name, data in checkpoint_files().items():
        (target / name).write_bytes(data)
    return target


@pytest.fixture
def record(tmp_path: Path) -> TrustRecord:
    return TrustRecord(path=tmp_path / "config" / "trusted-code.json")


def launch_of(model: str, *more: str, trust: bool = True, draft: str | None = None) -> Launch:
    recipe = Recipe(name="r", summary="", model=RecipeCheckpoint(repo=model))
    args: Args = {"model-path": model}
    if draft:
        args["speculative-draft-model-path"] = draft
    if trust:
        args["trust-remote-code"] = True
    return Launch(recipe, {**args, "port": 1, **parse_arguments(more)}, {"A": "1"})


def accept(record: TrustRecord, folder: Path, cache: Path, name: str | None = None) -> None:
    record.add(code_of(Source(name or str(folder), folder), cache))


def test_code_that_is_not_accepted_is_refused_with_every_file(folder, record, cache):
    with pytest.raises(KimiError) as refused:
        require_trusted(launch_of(str(folder)), record, cache)
    text = str(refused.value)
    assert "words.py: new, SHA-256" in text and "helper.py: new, SHA-256" in text
    assert f"kimi-w4a8 trust {folder} --yes" in text and "KIMI_TRUSTED_CODE" in text and str(record.path) in text


def test_accepted_code_runs_and_the_engine_may_download_nothing(folder, record, cache):
    accept(record, folder, cache)
    launch = launch_of(str(folder))
    allowed = require_trusted(launch, TrustRecord.load(record.path), cache)
    assert allowed.argv == launch.argv  # a directory has no revision
    assert allowed.env == {"A": "1", "HF_HUB_OFFLINE": "1"}
    assert str(record.path) in allowed.notes[-1].found


@pytest.mark.parametrize("change", ["changed", "renamed", "added"])
def test_another_file_than_the_accepted_one_is_refused(change, folder, record, cache):
    accept(record, folder, cache)
    helper_file = folder / "helper.py"
    if change == "changed":
        helper_file.write_bytes(helper_file.read_bytes() + b"#")
    elif change == "renamed":
        (folder / "sub").mkdir()
        helper_file.rename(folder / "sub" / "helper.py")
    else:
        (folder / "more.py").write_text("import os\n")
    with pytest.raises(KimiError) as refused:
        require_trusted(launch_of(str(folder)), record, cache)
    expected = {"changed": "helper.py: changed, recorded", "renamed": "sub/helper.py: new", "added": "more.py: new"}
    assert expected[change] in str(refused.value)
    assert "words.py" not in str(refused.value)


def test_a_repository_is_pinned_to_the_commit_that_was_hashed(record, cache, repo):
    accept(record, cache / "models--org--kimi/snapshots" / repo.commit, cache, NAME)
    allowed = require_trusted(launch_of(NAME, draft=NAME), record, cache)
    assert allowed.argv[-4:] == ["--revision", repo.commit, "--speculative-draft-model-revision", repo.commit]
    moving = require_trusted(launch_of(NAME, "--revision", "main", "--page-size", "1"), record, cache)
    assert moving.argv.count("--revision") == 1 and "main" not in moving.argv
    assert (moving.args["revision"], moving.args["page-size"]) == (repo.commit, "1")


def test_a_repository_that_is_not_here_is_refused_and_fetch_is_named(record, cache):
    with pytest.raises(KimiError, match="org/absent at main is not on this disk") as refused:
        require_trusted(launch_of("org/absent"), record, cache)
    assert refused.value.remedy == "kimi-w4a8 fetch org/absent"
    with pytest.raises(KimiError, match=r"kimi-w4a8 fetch org/kimi --revision v2"):
        require_trusted(launch_of(NAME, "--revision", "v2"), record, cache)


def test_a_snapshot_counts_as_here_with_all_its_python_files(record, cache, repo):
    snapshot = cache / "models--org--kimi/snapshots" / repo.commit
    accept(record, snapshot, cache, NAME)
    (snapshot / "config.json").unlink()  # as after `hf download --include '*.py'`
    assert require_trusted(launch_of(NAME), record, cache).args["revision"] == repo.commit
    (snapshot / "helper.py").unlink()
    with pytest.raises(KimiError, match="org/kimi at main is not on this disk"):
        require_trusted(launch_of(NAME), record, cache)


@pytest.mark.parametrize("what", ["draft", "tokenizer"])
def test_draft_and_tokenizer_bring_code_too(what, folder, tmp_path, record, cache):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    launch = {
        "draft": launch_of(str(plain), draft=str(folder)),
        "tokenizer": launch_of(str(plain), "--tokenizer-path", str(folder)),
    }[what]
    with pytest.raises(KimiError, match=r"words\.py: new") as refused:
        require_trusted(launch, record, cache)
    assert f"kimi-w4a8 trust {folder} --yes" in refused.value.remedy  # the other checkpoint needs no decision


def test_the_option_is_left_out_where_no_checkpoint_brings_code(folder, record, cache):
    (folder / "tokenizer_config.json").write_text("{}")  # nothing asks for the *.py files any more
    allowed = require_trusted(launch_of(str(folder)), record, cache)
    assert "--trust-remote-code" not in allowed.argv
    assert "HF_HUB_OFFLINE" not in allowed.env


def test_without_the_option_nothing_is_checked(record, cache):
    launch = launch_of("org/absent", trust=False)
    assert require_trusted(launch, record, cache) is launch


def test_a_shortened_option_is_the_option(folder, record, cache):
    launch = launch_of(str(folder), "--trust-remote", trust=False)  # argparse accepts it
    with pytest.raises(KimiError, match="is not accepted here"):
        require_trusted(launch, record, cache)


def test_code_of_another_repository_is_code_of_this_one(hub, folder, record, cache, tmp_path):
    reference = {"auto_map": {"AutoTokenizer": "org/code--words.Words"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(reference))
    with pytest.raises(KimiError, match="from another repository, org/code") as refused:
        require_trusted(launch_of(str(folder)), record, cache)
    assert "hf download org/code --include '*.py'" in refused.value.remedy

    assert kimi(hub, tmp_path, "fetch", "org/code").returncode == 0
    record.add(file for file in code_of(Source(str(folder), folder), cache) if file.source.name != "org/code")
    with pytest.raises(KimiError, match=r"org/code at c0ffee0+ brings Python code"):
        require_trusted(launch_of(str(folder)), record, cache)
    record.add(code_of(Source(str(folder), folder), cache))
    assert require_trusted(launch_of(str(folder)), record, cache).env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("reference", ["../outside.Words", "/etc/outside.Words", "absent.Words"])
def test_a_reference_that_leads_out_of_the_checkpoint_is_refused(reference, folder, record, cache):
    (folder.parent / "outside.py").write_bytes(CODE)
    (folder / "config.json").write_text(json.dumps({"text_config": {"auto_map": {"AutoConfig": reference}}}))
    with pytest.raises(KimiError, match="there is no file"):
        require_trusted(launch_of(str(folder)), record, cache)


@pytest.mark.parametrize("depth", [100_000, 980], ids=["beyond the parser", "within it"])
def test_a_config_nested_too_deep_is_an_error_and_no_traceback(depth, folder, record, cache):
    deep = '{"a":' * depth + '{"auto_map": {"AutoConfig": "words.Words"}}' + "}" * depth
    (folder / "config.json").write_text(deep)
    with pytest.raises(KimiError, match=r"config\.json cannot be read"):
        require_trusted(launch_of(str(folder)), record, cache)


@pytest.mark.parametrize("name", ["a\0b", "~nobody-has-this-name/x", "~a\0b/x"])
def test_a_name_that_can_be_no_directory_is_not_here(name, record, cache):
    with pytest.raises(KimiError, match="is not on this disk"):
        require_trusted(launch_of(name), record, cache)


def test_a_measured_server_cannot_name_a_tokenizer_whose_code_runs_here(folder, record, cache):
    with pytest.raises(KimiError, match=r"words\.py: new"):
        require_trusted_tokenizer(str(folder), record, cache)
    with pytest.raises(KimiError, match="org/absent at main is not on this disk") as refused:
        require_trusted_tokenizer("org/absent", record, cache)
    assert refused.value.remedy.startswith("hf download org/absent")
    accept(record, folder, cache)
    require_trusted_tokenizer(str(folder), record, cache)


def test_kimi_bench_asks_before_its_load_generator_loads_a_tokenizer(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KIMI_TRUSTED_CODE", str(tmp_path / "code.json"))
    with null_server(folder) as url:
        options = ["bench", "run", "tiny-con2", "--base-url", url, "--runs", str(tmp_path / "runs")]
        done = kimi("http://127.0.0.1:9", tmp_path, *options)
    assert done.returncode == 1
    assert "words.py: new" in done.stderr


def test_a_damaged_record_is_an_error_and_trusts_nothing(tmp_path):
    path = tmp_path / "trusted-code.json"
    deep = "[" * 100_000
    for text in [
        deep,
        "{",
        "[]",
        '{"format": 2, "files": []}',
        '{"format": 1, "files": [{"name": "a.py", "sha256": "*"}]}',
    ]:
        path.write_text(text)
        with pytest.raises(KimiError, match="record of trusted code cannot be read"):
            TrustRecord.load(path)


def test_where_the_record_lies(monkeypatch, tmp_path):
    assert record_path({"KIMI_TRUSTED_CODE": "/etc/kimi/code.json"}) == Path("/etc/kimi/code.json")
    assert record_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/kimi-w4a8-eagle3/trusted-code.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record_path({}) == tmp_path / ".config/kimi-w4a8-eagle3/trusted-code.json"


def test_kimi_trust_shows_then_records(folder, tmp_path, monkeypatch, cache):
    monkeypatch.setenv("KIMI_TRUSTED_CODE", str(tmp_path / "r" / "code.json"))
    monkeypatch.setenv("COLUMNS", "250")

    def trust(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["trust", *words])
        return done.exit_code, done.stdout

    def accepted() -> set[bool]:
        return {file["accepted"] for file in json.loads(trust(str(folder), "--json")[1])}

    code, shown = trust(str(folder))
    assert code == 1 and "words.py" in shown and "new" in shown
    assert accepted() == {False} and trust(str(folder), "--json")[0] == 1 and not (tmp_path / "r").exists()
    assert trust(str(folder), "--yes")[0] == trust(str(folder))[0] == 0
    assert accepted() == {True} and trust(str(folder), "--json")[0] == 0
    require_trusted(launch_of(str(folder)), cache=cache)  # reads the same record
    (folder / "helper.py").write_bytes(helper("changed"))
    code, shown = trust(str(folder))
    assert code == 1 and "changed" in shown
    assert trust(str(folder), "--json", "--yes")[0] == 0 and accepted() == {True}
    code, shown = trust("--recipe", "tiny")
    assert code == 0 and "contain no Python code" in shown


def test_kimi_check_reports_code_that_serve_would_refuse(folder, tmp_path):
    environment = {"KIMI_TRUSTED_CODE": str(tmp_path / "code.json")}
    before = json.loads(kimi("http://127.0.0.1:9", tmp_path, "check", str(folder), "--json", **environment).stdout)
    assert [p["found"] for p in before["problems"] if p["name"] == "code"]
    TrustRecord(path=tmp_path / "code.json").add(code_of(Source(str(folder), folder), tmp_path))
    after = json.loads(kimi("http://127.0.0.1:9", tmp_path, "check", str(folder), "--json", **environment).stdout)
    assert [p["name"] for p in after["problems"]] == [p["name"] for p in before["problems"] if p["name"] != "code"]


def test_kimi_serve_refuses_before_anything_starts(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "coded.toml"
    recipe.write_text(
        f'extends = "tiny"\nsummary = "with code"\n[model]\nrepo = "{folder}"\n[args]\ntrust-remote-code = true\n'
    )
    started = kimi(
        "http://127.0.0.1:9", tmp_path, "serve", "--recipe", str(recipe), KIMI_TRUSTED_CODE=str(tmp_path / "code.json")
    )
    assert started.returncode == 1
    assert "words.py: new" in started.stderr
    assert not (tmp_path / "runs").exists()


def test_the_built_in_model_brings_no_code(record, cache):
    recipe = load_recipe("tiny")
    launch = render(recipe)
    forced = launch.with_args(trust_remote_code=True)
    assert "--trust-remote-code" not in require_trusted(forced, record, cache).argv


LOAD = """
import sys
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # what every Auto* class calls
options = {"revision": sys.argv[2]} if len(sys.argv) > 2 else {}
print("ran:", get_class_from_dynamic_module("words.Words", sys.argv[1], **options).greet())
"""


@pytest.mark.slow
def test_transformers_runs_the_hashed_code_although_the_hub_has_moved_on(hub, repo, cache, record, tmp_path):
    """The real loader against a real (loopback) Hub: without our pin it runs what the Hub serves now."""
    accept(record, cache / "models--org--kimi/snapshots" / repo.commit, cache, NAME)
    allowed = require_trusted(launch_of(NAME), record, cache)
    repo.commit, repo.files["helper.py"] = "beef" + "0" * 36, helper("moved on")
    home = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": hub.endpoint, "HF_MODULES_CACHE": str(tmp_path / "modules")}

    def run(*arguments: str, **environment: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", LOAD, NAME, *arguments], env={**kept, **home, **environment}, text=True,
            capture_output=True, timeout=120,
        )  # fmt: skip
        return done.stdout.strip() or done.stderr[-600:]

    pinned = allowed.argv[allowed.argv.index("--revision") + 1]
    assert run(pinned, **allowed.env) == "ran: first"
    assert run() == "ran: moved on"

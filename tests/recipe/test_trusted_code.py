"""Code that a checkpoint brings: what runs, what is refused, and that nothing else can be downloaded and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.fetch_helpers import kimi
from support.hub_server import HubServer, Repo, serve
from support.null_server import null_server

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.recipe.arguments import Args, parse_arguments
from kimi_w4a8_eagle3.recipe.launch import Launch, Recipe, load_recipe, render
from kimi_w4a8_eagle3.recipe.schema import RecipeCheckpoint
from kimi_w4a8_eagle3.recipe.trusted_code import accept, locate, read_record, record_path, require_trusted
from kimi_w4a8_lab.base.data_file import require_trusted_tokenizer

NAME = "org/kimi"
NOWHERE = "http://127.0.0.1:9"
CODE = b"""
from .helper import greet

class Words:
    greet = staticmethod(greet)
"""
TOKENIZER = json.dumps({"auto_map": {"AutoTokenizer": ["words.Words", None]}}).encode()


def helper(text: str) -> bytes:
    return f"def greet():\n    return {text!r}\n".encode()


def checkpoint_files() -> dict[str, bytes]:
    config = b'{"model_type": "llama", "architectures": ["X"]}'
    return {"config.json": config, "tokenizer_config.json": TOKENIZER, "words.py": CODE, "helper.py": helper("first")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record and a cache of this test's own."""
    monkeypatch.setenv("KIMI_TRUSTED_CODE", str(tmp_path / "config" / "trusted-code.json"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def repo() -> Repo:
    return Repo(checkpoint_files())


@pytest.fixture
def hub(repo: Repo):
    with serve({NAME: repo}) as server:
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


def launch_of(model: str, *more: str, trust: bool = True, draft: str | None = None) -> Launch:
    recipe = Recipe(name="r", summary="", model=RecipeCheckpoint(repo=model))
    args: Args = {"model-path": model}
    if draft:
        args["speculative-draft-model-path"] = draft
    if trust:
        args["trust-remote-code"] = True
    return Launch(recipe, {**args, "port": 1, **parse_arguments(more)}, env={"A": "1"})


def test_code_runs_when_all_its_files_were_accepted_and_the_engine_may_download_nothing(folder):
    launch = launch_of(str(folder))
    with pytest.raises(KimiError, match=r"(?s)helper\.py: new.*words\.py: new") as refused:
        require_trusted(launch)
    assert f"kimi-w4a8 trust {folder} --yes" in str(refused.value) and str(record_path()) in str(refused.value)
    accept([locate(str(folder))])
    allowed = require_trusted(launch)
    assert allowed.argv == launch.argv  # a directory has no revision
    assert allowed.env == {"A": "1", "HF_HUB_OFFLINE": "1"}
    copy = folder.rename(folder.with_name("copy"))
    assert require_trusted(launch_of(str(copy))).env == allowed.env  # the digests count, not the place


@pytest.mark.parametrize(
    ("change", "expected"),
    [("changed", "helper.py: changed"), ("moved", "helper.py: missing"), ("added", "more.py: new")],
)
def test_another_file_than_the_accepted_one_is_refused(change, expected, folder):
    accept([locate(str(folder))])
    if change == "changed":
        (folder / "helper.py").write_bytes(helper("second"))
    elif change == "moved":
        (folder / "sub").mkdir()
        (folder / "helper.py").rename(folder / "sub" / "helper.py")
    else:
        (folder / "more.py").write_text("import os\n")
    with pytest.raises(KimiError) as refused:
        require_trusted(launch_of(str(folder)))
    assert expected in str(refused.value) and "words.py" not in str(refused.value)


def test_a_repository_is_pinned_to_the_commit_that_was_hashed(cache, repo):
    accept([locate(NAME)])
    assert read_record()[NAME]["revision"] == repo.commit
    allowed = require_trusted(launch_of(NAME, draft=NAME))
    assert allowed.argv[-4:] == ["--revision", repo.commit, "--speculative-draft-model-revision", repo.commit]
    moving = require_trusted(launch_of(NAME, "--revision", "main", "--page-size", "1"))
    assert (moving.args["revision"], moving.args["page-size"]) == (repo.commit, "1")
    (cache / "models--org--kimi/snapshots" / repo.commit / "helper.py").unlink()
    with pytest.raises(KimiError, match="org/kimi at main is not on this disk"):
        require_trusted(launch_of(NAME))


@pytest.mark.parametrize("name", ["org/absent", "a\0b", "~nobody-has-this-name/x"])
def test_a_checkpoint_that_is_not_here_is_refused_and_fetch_is_named(name):
    with pytest.raises(KimiError, match="at v2 is not on this disk") as refused:
        require_trusted(launch_of(name, "--revision", "v2"))
    assert refused.value.remedy == f"kimi-w4a8 fetch {name} --revision v2"


@pytest.mark.parametrize("what", ["draft", "tokenizer"])
def test_draft_and_tokenizer_bring_code_too(what, folder, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    more = ("--tokenizer-path", str(folder)) if what == "tokenizer" else ()
    launch = launch_of(str(plain), *more, draft=str(folder) if what == "draft" else None)
    with pytest.raises(KimiError, match=r"words\.py: new") as refused:
        require_trusted(launch)
    assert f"kimi-w4a8 trust {folder} --yes" in refused.value.remedy  # the other checkpoint needs no decision


def test_the_option_is_left_out_where_no_checkpoint_brings_code(folder):
    (folder / "tokenizer_config.json").write_text("{}")  # nothing asks for the *.py files any more
    tiny = render(load_recipe("tiny")).with_args(trust_remote_code=True)
    for launch in (launch_of(str(folder)), tiny):
        allowed = require_trusted(launch)
        assert "--trust-remote-code" not in allowed.argv and "HF_HUB_OFFLINE" not in allowed.env


def test_without_the_option_nothing_is_checked_and_a_shortened_one_is_the_option(folder):
    launch = launch_of("org/absent", trust=False)
    assert require_trusted(launch) is launch
    with pytest.raises(KimiError, match="is not accepted here"):
        require_trusted(launch_of(str(folder), "--trust-remote", trust=False))  # argparse accepts it


@pytest.mark.parametrize("reference", ["../outside.Words", "/etc/outside.Words", "absent.Words", "org/code--words.W"])
def test_a_class_from_elsewhere_is_refused(reference, folder):
    (folder.parent / "outside.py").write_bytes(CODE)
    (folder / "config.json").write_text(json.dumps({"text_config": {"auto_map": {"AutoConfig": reference}}}))
    with pytest.raises(KimiError, match="no class in a file of this checkpoint"):
        require_trusted(launch_of(str(folder)))


def test_a_config_nested_too_deep_is_an_error_and_no_traceback(folder):
    deep = '{"a":' * 980 + '{"auto_map": {"AutoConfig": "words.Words"}}' + "}" * 980
    (folder / "config.json").write_text(deep)
    with pytest.raises(KimiError, match=r"config\.json cannot be read"):
        require_trusted(launch_of(str(folder)))


def test_a_damaged_record_is_an_error_and_trusts_nothing(folder):
    record_path().parent.mkdir()
    for text in ("[" * 100_000, "{", "[]", '{"x": {"revision": null, "files": {"a.py": 1}}}'):
        record_path().write_text(text)
        with pytest.raises(KimiError, match="record of trusted code cannot be read"):
            require_trusted(launch_of(str(folder)))


def test_kimi_trust_shows_then_records_and_serve_bench_and_check_obey(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "coded.toml"
    recipe.write_text(
        f'extends = "tiny"\nsummary = "x"\n[model]\nrepo = "{folder}"\n[args]\ntrust-remote-code = true\n'
    )
    shown = kimi(NOWHERE, tmp_path, "trust", "-r", str(recipe))
    assert shown.returncode == 1 and "new" in shown.stdout and "words.py" in shown.stdout
    assert not record_path().exists()
    with null_server(folder) as url:
        options = ["bench", "run", "tiny-con2", "--base-url", url, "--runs", str(tmp_path / "lab")]
        for words in (["serve", "-r", str(recipe)], options):
            refused = kimi(NOWHERE, tmp_path, *words)
            assert refused.returncode == 1 and "words.py: new" in refused.stderr
    assert not (tmp_path / "runs").exists()
    with pytest.raises(KimiError, match=r"words\.py: new"):
        require_trusted_tokenizer(str(folder))
    assert '"name": "code"' in kimi(NOWHERE, tmp_path, "check", str(folder), "--json").stdout

    assert kimi(NOWHERE, tmp_path, "trust", "-r", str(recipe), "--yes").returncode == 0
    assert kimi(NOWHERE, tmp_path, "trust", str(folder)).returncode == 0
    require_trusted(launch_of(str(folder)))
    require_trusted_tokenizer(str(folder))
    assert '"name": "code"' not in kimi(NOWHERE, tmp_path, "check", str(folder), "--json").stdout
    assert "contain no Python code" in kimi(NOWHERE, tmp_path, "trust", "-r", "tiny").stdout
    assert kimi(NOWHERE, tmp_path, "trust").returncode == 2


LOAD = """
import sys
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # what every Auto* class calls
options = {"revision": sys.argv[2]} if len(sys.argv) > 2 else {}
print("ran:", get_class_from_dynamic_module("words.Words", sys.argv[1], **options).greet())
"""


@pytest.mark.slow
def test_transformers_runs_the_hashed_code_although_the_hub_has_moved_on(hub, repo, cache, tmp_path):
    """The real loader against a real (loopback) Hub: without our pin it runs what the Hub serves now."""
    accept([locate(NAME)])
    allowed = require_trusted(launch_of(NAME))
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

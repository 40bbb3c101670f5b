"""The trainer continues where it was stopped; a draft appears whole or not at all; verdicts follow the intervals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.kimi_checkpoint import edit_json, edit_tensor

from kimi_w4a8_eagle3.base.collection import REQUESTS, Consent, StoredRequest, key_name, packed
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import write_private
from kimi_w4a8_eagle3.cli import load
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render, resolve
from kimi_w4a8_eagle3.supervision.checks import checked_weights, fingerprint
from kimi_w4a8_lab.draft import capturing, training
from kimi_w4a8_lab.draft import switch as links
from kimi_w4a8_lab.draft.acceptance import Walk, difference, measured, walk
from kimi_w4a8_lab.draft.checkpoint import draft_sizes, load_draft, save_draft, target_tensor
from kimi_w4a8_lab.draft.collected import Collected, erase, read_collected
from kimi_w4a8_lab.draft.compare import Judge
from kimi_w4a8_lab.draft.eagle3 import Draft
from kimi_w4a8_lab.draft.kinds import WORDS, KindOfTraffic, overall
from kimi_w4a8_lab.draft.layers import initialise
from kimi_w4a8_lab.draft.states import StoredStates, capture_plan, write_states
from kimi_w4a8_lab.draft.training import TrainingSettings, train
from kimi_w4a8_laptop import tiny

TARGET, DRAFT = tiny.target_path(), tiny.draft_path()
SETTINGS = TrainingSettings(epochs=3, batch=2, warmup=2)
PROPOSED = torch.arange(0, 640, 2)  # of a reduced vocabulary


def small(proposed: torch.Tensor | None = None) -> Draft:
    sizes = draft_sizes(DRAFT, TARGET)
    draft = Draft(replace(sizes, rows=0 if proposed is None else len(proposed)), 640, proposed)
    initialise(draft, 1)
    return draft


def rows() -> list[Collected]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(8, 640, (20 + at,), generator=generator).tolist() for at in range(4)]
    return [Collected("", tuple(row), ((7, len(row)),), 0) for row in tokens]


def states_of(chosen: Any) -> torch.Tensor:
    counts = [len(row.tokens) for row in chosen]
    found = [torch.randn(count, 384, generator=torch.Generator().manual_seed(count)) for count in counts]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True).bfloat16()


def trained(draft: Draft, checkpoint: Path | None = None, stop: int = 99) -> Draft:
    def report(step: int, values: dict[str, float]) -> None:
        if step == stop:
            raise KeyboardInterrupt

    return train(draft, rows(), states_of, target_tensor(TARGET), SETTINGS, report, checkpoint)


@pytest.mark.parametrize("proposed", [None, PROPOSED], ids=["whole", "reduced"])
def test_a_stopped_training_continues_as_if_unbroken(
    tmp_path: Path, proposed: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVED_EVERY", 2)
    whole, checkpoint = trained(small(proposed)), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        trained(small(proposed), checkpoint, stop=3)
    continued = trained(small(proposed), checkpoint)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), continued.parameters(), strict=True))
    other = replace(SETTINGS, lr=1e-3)
    with pytest.raises(KimiError, match="another training run"):
        train(small(proposed), rows(), states_of, target_tensor(TARGET), other, checkpoint=checkpoint)


@pytest.mark.slow
def test_a_draft_goes_back_until_no_kind_loses_too_much(tmp_path: Path) -> None:
    made = [replace(row, kind=kind) for kind, row in zip("aabb", rows(), strict=True)]
    for one in made:
        write_states(tmp_path, one.name, states_of([one])[0])
    judge, (first, second) = Judge(StoredStates(tmp_path, 384), target_tensor(TARGET)), (small(), small())
    for draft, learnt in ((first, rows()[:2]), (second, rows()[2:])):
        train(draft, learnt, states_of, judge.embedding, replace(SETTINGS, epochs=25))
    before, after = judge.lengths(first, made), judge.lengths(second, made)
    assert before["a"] > after["a"] + 1 and after["b"] > before["b"] + 1
    whole = {name: value.clone() for name, value in second.state_dict().items()}
    part, was, now = judge.kept(first, second, made, 0.0)
    assert part < 1 and now["a"] >= was["a"] == before["a"] and now == judge.lengths(second, made)
    second.load_state_dict(whole)
    assert judge.kept(first, second, made, 4.0) == (1.0, before, after)
    with pytest.raises(KimiError, match="already loses"):
        judge.kept(first, second, made, -4.0)


def test_the_command_trains_on_no_more_of_a_key_than_its_share(tmp_path: Path) -> None:
    Consent(most_of_key=0.5).write(tmp_path)
    for key, count in (("hostile", 30), ("honest", 10)):
        (place := tmp_path / REQUESTS / key_name(key)).mkdir(parents=True)
        write_private(
            place / "0", packed([StoredRequest("", at, False, [at, len(key)], range(99, 120)) for at in range(count)])
        )
    (states := tmp_path / "states").mkdir()
    for one in read_collected(tmp_path, 99):
        write_states(states, one.name, torch.ones(len(one.tokens), 384))
    words = (tmp_path, "--recipe", "tiny", "--to", tmp_path / "new", "--epochs", 1, "--batch", 2, "--most-lost", 4)
    load("draft").main(["train", *map(str, words)], standalone_mode=False)
    assert json.loads((tmp_path / "new" / "training.json").read_text())["conversations"] == 2 * (10 - 2)


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(KimiError, match="the loss is nan"):
        train(small(), rows(), lambda chosen: states_of(chosen) * float("nan"), target_tensor(TARGET), SETTINGS)


def test_a_saved_draft_is_the_first_one_with_other_values(tmp_path: Path) -> None:
    draft, to = load_draft(DRAFT, TARGET), tmp_path / "new"
    with torch.no_grad():
        draft.fc.weight.mul_(2)
    save_draft(draft, DRAFT, to, {"steps": 1}, TARGET, "tiny")
    assert checked_weights(render(load_recipe(to / "recipe.toml"))) == fingerprint(TARGET, to)
    before, after = load_file(DRAFT / "model.safetensors"), load_file(to / "model.safetensors")
    assert before.keys() == after.keys() and (to / "config.json").read_bytes() == (DRAFT / "config.json").read_bytes()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["fc.weight"] and torch.equal(after["fc.weight"], before["fc.weight"] * 2)
    with pytest.raises(KimiError, match="the folder exists"):
        save_draft(draft, DRAFT, to, {}, TARGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]


def rewritten(folder: Path, **changes: object) -> None:
    edit_json(folder / "config.json", lambda config: config.update(changes))


def in_fp8(folder: Path) -> None:
    edit_tensor(folder, "midlayer.mlp.up_proj.weight", lambda weight: weight.to(torch.float8_e4m3fnuz))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: rewritten(folder, hidden_size=256, target_hidden_size=256), "hidden_size is 256"),
        (lambda folder: rewritten(folder, vocab_size=1000), "vocab_size is 1000"),
        (lambda folder: rewritten(folder, fc_norm=True), "fc_norm"),
        (lambda folder: rewritten(folder, norm_output=True), "norm_output"),
        (lambda folder: rewritten(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 9]}), "captured"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (in_fp8, "has 8 bits"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "model.safetensors"),
    ],
    ids=["hidden", "vocabulary", "fc_norm", "norm_output", "layers", "no config", "FP8", "cut"],
)
def test_a_draft_that_does_not_fit_is_one_message(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    shutil.copytree(DRAFT, folder := tmp_path / "draft")
    spoil(folder)
    with pytest.raises(KimiError) as caught:
        load_draft(folder, TARGET)
    assert said in str(caught.value)


def test_states_are_planned_refused_and_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, ids = draft_sizes(DRAFT, TARGET), (5, 6, 7, 8, 9, 10)
    one, short = Collected("chat", ids, ((1, 6),), 0), Collected("chat", (9,), ((1, 1),), 0)
    plan = capture_plan(tmp_path, [one, short], sizes, "target")
    assert (plan.token_bytes, plan.tokens, plan.nbytes) == (768, 7, 7 * 768)
    (plan.folder / "x.1.tmp").touch()
    write_states(plan.folder, one.name, torch.ones(6, 384))
    plan = capture_plan(tmp_path, [one, short], sizes, "target")
    assert [len(left.tokens) for left in plan.missing] == [1] and not list(plan.folder.glob("*.tmp"))
    batch = StoredStates(plan.folder, 384)([one])
    assert batch.shape == (1, 6, 384) and batch.dtype == torch.bfloat16
    plan.path(one).write_bytes(plan.path(one).read_bytes()[:100])
    with pytest.raises(KimiError, match="missing or cut"):
        StoredStates(plan.folder, 384).of(one.name, 6)
    write_states(plan.folder, one.name, torch.ones(6, 256))
    with pytest.raises(KimiError, match="another hidden size"):
        StoredStates(plan.folder, 384).of(one.name, 6)
    with pytest.raises(KimiError, match="states of another target"):
        capture_plan(tmp_path, [one], sizes, "other")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(KimiError, match="not enough disk space"):
        capture_plan(tmp_path, [short], sizes, "target")


def test_what_a_killed_capture_leaves_is_erased_with_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Consent(share=1.0).write(tmp_path)
    tmp_path.chmod(0o700)
    plan = capture_plan(tmp_path, rows(), draft_sizes(DRAFT, TARGET), "target")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(capturing, "checked", lambda launch: launch)
    monkeypatch.setattr(capturing, "start_engine", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if (child := os.fork()) == 0:
        capturing.capture(resolve(load_recipe("tiny")), plan, "tiny", tmp_path / "log", print)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("job.json")] == ["job.json"]
    assert not [*(tmp_path / "elsewhere").iterdir()]
    erase(tmp_path, (), ())
    assert not [*tmp_path.rglob("job.json")]


def test_a_walk_counts_what_a_server_would() -> None:
    # Tokens 3 to 8 of a reply, whose first came with the prompt: two guesses are right, then none, then two.
    hits = [[False, True, True, True, False, True, True], [False, True, True, True, True, True], [False] * 5]
    assert walk([(2, 9)], hits) == Walk(3, 6, (2, 2, 0))
    assert walk([(2, 3)], hits) == Walk(0, 0, (0, 0, 0))


def kind(old: int, new: int, count: int = 30) -> KindOfTraffic:
    sides = [[Walk(10, 10 + right + at % 3, (right, 0, 0)) for at in range(count)] for right in (old, new)]
    return KindOfTraffic("chat", count, 10 * count, measured(sides[0]), measured(sides[1]), difference(*sides))


def test_verdicts_follow_the_interval_and_the_worst_kind_decides() -> None:
    better, same, worse = kind(2, 8), kind(5, 5), kind(8, 2)
    assert [WORDS[one.verdict] for one in (better, same, worse)] == ["better", "not shown", "worse"]
    assert better.old[0].covers(1.3) and better.new[1][0].value == 0.8

    assert [WORDS[overall(kinds)] for kinds in ([same], [better, same], [better, worse])] == [
        "not shown", "better", "worse"
    ]  # fmt: skip


def test_a_link_is_exchanged_for_whole_drafts_only_and_goes_back(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_draft(load_draft(DRAFT, TARGET), DRAFT, tmp_path / name, {}, TARGET)
    link = tmp_path / "served" / "draft"
    assert links.switch(link, tmp_path / "one") is None
    assert links.switch(link, tmp_path / "two") == tmp_path / "one" and link.resolve() == tmp_path / "two"
    assert links.back(link) == tmp_path / "one" and link.resolve() == tmp_path / "one"
    assert links.back(link) == tmp_path / "two"  # and forth again
    with (tmp_path / "one" / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(KimiError, match="have changed"):
        links.switch(link, tmp_path / "one")
    for wrong, at in ((DRAFT, link), (tmp_path / "two", tmp_path / "two")):
        with pytest.raises(KimiError):
            links.switch(at, wrong)
    assert link.resolve() == tmp_path / "two"

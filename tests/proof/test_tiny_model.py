"""The training model's own arithmetic: experts, cache, draft chain, optimizer; small random models, no training."""

import dataclasses
import json
import random
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_w4a8_eagle3.chat.calculator import calculate
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_lab.draft.eagle3 import Draft
from kimi_w4a8_lab.draft.layers import initialise
from kimi_w4a8_lab.draft.optim import orthogonalise, schedule
from kimi_w4a8_laptop import tiny
from proof.tiny import train_target as train_target_module
from proof.tiny.checkpoint import load_draft, load_target, save_draft
from proof.tiny.config import DraftConfig, MlaDraftConfig, TargetConfig, draft_sizes
from proof.tiny.data import SHORT, batches
from proof.tiny.dialogues import FORMS, Dialogue
from proof.tiny.experts import Experts, fake_int4, w4a8_linear
from proof.tiny.generate import Exchange, GeneratedDialogue, greedy
from proof.tiny.mixed import drawn
from proof.tiny.model import TargetModel
from proof.tiny.problems import problem_stream, problems
from proof.tiny.tokenizer import IM_END_ID, PAD_ID, load_tokenizer
from proof.tiny.train_draft import DraftTraining, acceptance, captured_states, conversations
from proof.tiny.train_target import TargetTraining, train_target

SMALL = TargetConfig(layers=5, hidden=32, dense_inter=32, q_lora=16, kv_lora=16, experts=4, top_k=2, moe_inter=16)


def small_target(seed: int = 0) -> TargetModel:
    model = TargetModel(SMALL)
    initialise(model, seed)
    return model.eval()


MHA = DraftConfig(heads=2, kv_heads=1, head_dim=16, inter=32)
MLA = MlaDraftConfig(inter=16)


def small_draft(seed: int = 1, config: DraftConfig | MlaDraftConfig = MHA) -> Draft:
    draft = Draft(draft_sizes(SMALL, config), SMALL.vocab)
    initialise(draft, seed)
    return draft.eval()


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 70), seed=st.integers(0, 1000), training=st.booleans())
def test_experts_match_a_loop_over_tokens_in_value_and_gradient(tokens, seed, training):
    g = torch.Generator().manual_seed(seed)
    experts = Experts(SMALL).train(training)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2, generator=g)
    x = torch.randn(tokens, SMALL.hidden, generator=g, requires_grad=True)
    ids = torch.rand(tokens, SMALL.experts, generator=g).topk(SMALL.top_k).indices
    weights = torch.rand(tokens, SMALL.top_k, generator=g)

    rows = []
    for t in range(tokens):
        row = torch.zeros(SMALL.hidden)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (experts.gate_up[expert] @ x[t]).chunk(2)
            row = row + weight * (experts.down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    naive, fast = torch.stack(rows), experts(x, weights, ids)
    torch.testing.assert_close(fast, naive, rtol=1e-4, atol=1e-5)
    parameters = [x, *experts.parameters()]
    probe = torch.randn(naive.shape, generator=g)
    for a, b in zip(
        torch.autograd.grad(fast, parameters, probe), torch.autograd.grad(naive, parameters, probe), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@given(rows=st.integers(1, 5), k=st.sampled_from([8, 64, 128]), n=st.integers(1, 9), seed=st.integers(0, 1000))
def test_w4a8_linear_is_exact_integer_arithmetic(rows, k, n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) * 10
    x[0] = 0
    weight, scale = torch.randint(-8, 8, (n, k), generator=g), torch.rand(n, generator=g) + 0.01
    step = x.abs().amax(1) / 127
    step[step == 0] = 1.0
    a8 = torch.round(x / step[:, None]).to(torch.int64)
    expected = (a8 @ weight.T).float() * step[:, None] * scale
    assert torch.equal(w4a8_linear(x, weight[None].float(), scale[None], [rows]), expected)


def test_fake_int4_has_fifteen_steps_and_a_straight_gradient():
    weight = torch.randn(3, 8, 64, requires_grad=True)
    rounded = fake_int4(weight)
    assert all(len(row.unique()) <= 16 for row in rounded.flatten(0, 1))
    assert 0.05 < float((rounded - weight).detach().norm() / weight.detach().norm()) < 0.2
    (gradient,) = torch.autograd.grad(rounded.sum(), weight)
    assert torch.equal(gradient, torch.ones_like(weight))


@torch.no_grad()
def test_cached_left_padded_decoding_equals_full_recomputation():
    model = small_target()
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(8, SMALL.vocab, (n,), generator=g).tolist() for n in (3, 11, 7)]
    for prompt, reply in zip(prompts, greedy(model, prompts, 12), strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
            if tokens[-1] == IM_END_ID:
                break
        assert reply == tokens[len(prompt) :]


def test_router_bias_moves_towards_even_load():
    model = small_target().train()
    router = model.routers()[0]
    model(torch.randint(8, SMALL.vocab, (2, 40)))
    before = router.e_score_correction_bias.clone()
    router.balance(0.01)
    moved = router.e_score_correction_bias - before
    busiest, idlest = int(router.load.argmax()), int(router.load.argmin())
    assert moved[busiest] < 0 < moved[idlest]


def served_chain(draft: Draft, embedding, tokens: list[int], captured, steps: int) -> list[int]:
    """Follow a server's draft after the last of `tokens`: one step a forward pass, its own tokens and states."""
    guesses: list[int] = []
    hidden_in = draft.fc(captured[: len(tokens) - 1])
    for _ in range(steps):
        ids = torch.tensor([*tokens[1:], *guesses])
        embeds = F.embedding(ids, embedding)[None]
        hidden = draft.midlayer(embeds, hidden_in[None], torch.arange(len(ids)), [])[0]
        guesses.append(int(draft.lm_head(draft.norm(hidden[-1])).argmax()))
        hidden_in = torch.cat([hidden_in, hidden[-1:]])  # the next step continues from the draft's own state
    return guesses


@torch.no_grad()
@pytest.mark.parametrize("config", [MHA, MLA], ids=["MHA", "MLA"])
@pytest.mark.parametrize("seed", range(3))
def test_unrolled_draft_equals_a_servers_chain_step_by_step(seed, config):
    target, draft = small_target(seed), small_draft(seed, config)
    embedding, layers = target.embed_tokens.weight, DraftConfig().captured
    context = torch.randint(8, SMALL.vocab, (10,), generator=torch.Generator().manual_seed(seed)).tolist()
    captured = captured_states(target, torch.tensor([context]), layers)[0]
    guesses = served_chain(draft, embedding, context, captured, 3)
    row = torch.tensor([context + guesses])  # the unrolled form takes the guesses as if they were right
    unrolled = draft(row, captured_states(target, row, layers), embedding, 3)
    assert [int(draft.logits(hidden[0, len(context) - 2]).argmax()) for hidden in unrolled] == guesses


@pytest.mark.parametrize("config", [DraftConfig(), MlaDraftConfig()], ids=["MHA", "MLA"])
def test_a_saved_draft_has_every_name_that_sglangs_class_reads(tmp_path, config):
    target = load_target(tiny.target_path())
    draft = Draft(draft_sizes(target.config, config), target.config.vocab)
    save_draft(draft, target.config, config, tmp_path)
    report = preflight(tiny.target_path(), tmp_path)
    assert report.ok, report.problems
    for name, weight in load_draft(tmp_path, target).named_parameters():
        assert torch.equal(weight, draft.get_parameter(name).bfloat16()), name


@torch.no_grad()
def test_a_draft_learns_the_tokens_of_the_target():
    target, tokenizer = load_target(tiny.target_path()), load_tokenizer(tiny.target_path())
    rows = conversations(tokenizer, DraftTraining(dialogues=6, longest=250, typed=0.0))
    agreed: list[bool] = []
    for row in rows:
        for begin, end in row.replies:
            before = tokenizer.decode(row.tokens[:begin], skip_special_tokens=False)
            assert before.endswith("think>") and row.tokens[end - 1] == IM_END_ID
        best = target(torch.tensor([row.tokens]))[0][0, :-1].argmax(-1)
        agreed += (best == torch.tensor(row.tokens[1:]))[row.guessed[1:]].tolist()
    assert max(len(row.tokens) for row in rows) <= 250
    assert sum(agreed) >= 0.98 * len(agreed) > 200  # 99.9 % of many


@torch.no_grad()
def test_acceptance_counts_what_a_server_would():
    target, draft = small_target(), small_draft()
    embedding, layers = target.embed_tokens.weight, DraftConfig().captured
    prompt = [9, 10, 11, 12, 13]
    tokens = prompt + greedy(target, [prompt], 40)[0]
    # A reply that this untrained draft often guesses: its own chains, with a wrong token between them.
    while len(tokens) < 60:
        captured = captured_states(target, torch.tensor([tokens]), layers)[0]
        tokens += [*served_chain(draft, embedding, tokens, captured, 2), 14]
    verifications, by_position, last = 0, [0, 0, 0], len(prompt)
    while last < len(tokens) - 1:
        captured = captured_states(target, torch.tensor([tokens[: last + 1]]), layers)[0]
        guesses = served_chain(draft, embedding, tokens[: last + 1], captured, 3)
        right = 0
        while right < 3 and last + right + 1 < len(tokens) and guesses[right] == tokens[last + right + 1]:
            by_position[right] += 1
            right += 1
        last, verifications = min(last + right + 1, len(tokens) - 1), verifications + 1
    length, shares = acceptance(target, draft, [Exchange(tokens, len(prompt))])
    assert by_position[1] > 0
    assert [share.value for share in shares] == [count / verifications for count in by_position]
    assert length.value == (len(tokens) - 1 - len(prompt)) / verifications


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 32, 32)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert 0.5 < float(values.median()) < 1.3 and float(values.max()) < 1.4


def test_learning_rate_schedule():
    rates = [schedule(step, 100, 1.0, warmup=10, decay=0.5) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[30] == 1.0 and rates[75] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)


def test_rows_weigh_replies_and_hold_only_training_problems():
    tokenizer = load_tokenizer(tiny.target_path())
    tokens, weights = next(batches(tokenizer, tokens=16384, lengths=(1024,), seed=0))
    assert tokens.shape == (16, 1025) and weights.shape == (16, 1024)
    held_out = {p.question for p in problems("held_out", 2000) if len(p.question) > 30}  # "6 * 4" stands anywhere
    drilled = 0
    for row, weight in zip(tokens, weights, strict=True):
        text = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        reply = "".join(tokenizer.decode([t], skip_special_tokens=False) for t in row[1:][weight == 1.0].tolist())
        assert not any(question in text for question in held_out)
        if "<|im_end|>" in text:
            assert "<|im_end|>" in reply and "<|im_user|>" not in reply
            continue
        drilled += 1
        done = re.findall(r"(-?\d+) ([-+*/]) (-?\d+) = (-?\d+)(?: remainder \d+)?\.", text)
        assert len(done) > 60 and all(
            calculate(json.dumps({"expression": f"{a} {op} {b}"})) == c for a, op, b, c in done
        )
        assert re.match(rf" {done[0][3]}( remainder \d+)?\.", reply)
    assert 2 <= drilled <= 10


def test_short_rows_have_whole_conversations_and_drills():
    tokenizer = load_tokenizer(tiny.target_path())
    tokens, weights = next(batches(tokenizer, tokens=16 * SHORT, lengths=(1024,), seed=0, drills=0.3, brief=1.0))
    assert tokens.shape == (16, SHORT + 1) and weights.shape == (16, SHORT)
    conversations = 0
    for row, weight in zip(tokens, weights, strict=True):
        padding = row == PAD_ID
        text = tokenizer.decode(row[~padding].tolist(), skip_special_tokens=False)
        assert not weight[padding[1:]].any() and weight[(row[1:] == IM_END_ID).nonzero()[-1:]].all()
        assert text.endswith(("<|im_end|>", "."))
        conversations += text.count("<|im_assistant|>")
    assert conversations > 10


def test_short_rows_in_training_have_the_arithmetic_of_long_ones():
    model = small_target()
    tokens = torch.randint(8, SMALL.vocab, (2, 40), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(model.train()(tokens)[0], model.eval()(tokens)[0], rtol=1e-4, atol=1e-5)


def replayed(dialogue: Dialogue) -> GeneratedDialogue:
    """The conversation in which the model writes the right turns, read back from their text."""
    had = GeneratedDialogue(dialogue, dialogue.question())
    for turn in dialogue.turns():
        assert had.prompt() == dialogue.prompt(turn)  # the calculator gave the results that are trained on
        had.hear(Exchange([], 0), dialogue.written(dialogue.messages[turn]))
    return had


@pytest.mark.parametrize("form", FORMS)
def test_the_right_turns_of_each_form_are_read_back_as_right_and_others_as_wrong(form):
    rng = random.Random(form)
    for problem in problems("held_out", 60):
        dialogue = FORMS[form](problem, rng)
        had = replayed(dialogue)
        assert had.right and had.answer is not None
        for left in re.findall(r"I need (.*?)\.</think>", "".join(text for _, text in dialogue.parts())):
            assert eval(left) == problem.answer  # what is left leads to it
        assert not dialogue.accepts(had.answer.replace(str(problem.answer), str(problem.answer + 1)))


def test_dialogues_come_with_shots_turns_pictures_and_parallel_calls():
    rng, stream = random.Random(0), problem_stream("train", 0)
    found = [dialogue for dialogue in (drawn(stream, rng) for _ in range(600)) if dialogue.answer is not None]
    for dialogue in found:
        assert replayed(dialogue).right
    texts = [dialogue.prompt(dialogue.turns()[0]) for dialogue in found]
    assert max(text.count("Question: ") for text in texts) >= 9
    assert max(text.count("<|im_user|>") for text in texts) == 5
    assert any("<|media_pad|>" in text for text in texts)
    calls = [len(message.get("tool_calls", ())) for dialogue in found for message in dialogue.messages]
    assert set(calls) == {0, 1, 2, 3}


def test_a_continued_run_equals_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr(train_target_module, "TargetConfig", lambda: SMALL)
    tokenizer = load_tokenizer(tiny.target_path())
    run = TargetTraining(steps=4, tokens=128, lengths=(64,), save_every=2, int4_from=0.5, warmup=2)
    unbroken, _ = train_target(tokenizer, run, tmp_path / "a.pt")

    class Stop(Exception): ...

    def stop(step: int, values: dict[str, float]) -> None:
        if step == 3:
            raise Stop

    with pytest.raises(Stop):
        train_target(tokenizer, run, tmp_path / "b.pt", stop)
    seen: list[int] = []
    continued, _ = train_target(tokenizer, run, tmp_path / "b.pt", lambda step, values: seen.append(step))
    assert seen == [3, 4]
    for (name, a), b in zip(unbroken.state_dict().items(), continued.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    other = dataclasses.replace(run, seed=1)
    train_target(tokenizer, other, tmp_path / "b.pt", lambda step, values: seen.append(step))
    assert seen == [3, 4, 1, 2, 3, 4]

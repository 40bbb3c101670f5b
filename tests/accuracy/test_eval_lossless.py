"""The comparison itself, on recorded tokens: ties and bugs, ended texts, samples; real servers are in tests/e2e."""

import numpy as np
import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_lab.accuracy import comparison, lossless
from kimi_w4a8_lab.accuracy.comparison import greedy_differences, matched, sampled_match
from kimi_w4a8_lab.accuracy.lossless import GREEDY, Answers, LosslessPlan
from kimi_w4a8_lab.accuracy.prompts import KINDS, Prompt, prompts
from kimi_w4a8_lab.accuracy.tokens import Prefill, Tokens
from kimi_w4a8_lab.base.server_under_test import Server, Target

PROMPT = [Prompt("chat", "hello")]
TOP = (((-0.1, 7), (-2.4, 8)), ((-0.69, 5), (-0.75, 6)), ((-0.01, 9), (-5.0, 4)))


def tokens(*ids, top=(), steps=0, chosen=None):
    chosen = tuple(places[0][0] for places in top) if chosen is None else chosen
    return Tokens(ids, "", "stop", top, steps, chosen=chosen)


def one(expected, found):
    parted = greedy_differences(PROMPT, [expected], [found], "eagle3", 1)
    return parted[0] if parted else None


def test_another_candidate_of_the_reference_is_no_bug_and_has_its_gap():
    assert one(tokens(7, 5, 9, top=TOP), tokens(7, 5, 9)) is None
    near = one(tokens(7, 5, 9, top=TOP), tokens(7, 6, 1))
    assert (near.position, near.gap) == (1, pytest.approx(0.06)) and "token 1: 6 instead of 5: gap 0.06" in str(near)
    far = one(tokens(7, 5, 9, top=TOP), tokens(8, 5, 9))
    assert far.position == 0 and far.gap == pytest.approx(2.3)


def test_a_token_that_the_reference_never_considered_is_a_bug():
    bug = one(tokens(7, 5, 9, top=TOP), tokens(7, 99, 9))
    assert bug.gap is None and "BUG, it is not among the reference's candidates" in str(bug)


def test_a_text_that_ends_elsewhere_is_a_bug():
    shorter = one(tokens(7, 5, 9, top=TOP), tokens(7, 5))
    assert (shorter.position, shorter.gap) == (2, None) and "None instead of 9: BUG" in shorter.what
    assert one(tokens(7, 5, top=TOP[:2]), tokens(7, 5, 9)).gap is None


def test_prompts_cover_all_kinds_without_repetition():
    asked = prompts(120)
    assert len(asked) == 120 == len({p.text for p in asked})
    assert {p.kind for p in prompts(6)} == set(KINDS)
    assert max(len(p.text) for p in asked if p.kind == "long") > 2000
    assert min(len(p.text) for p in asked) == 1
    assert any(ord(c) > 0xFFFF for p in asked for c in p.text)


def draw(rng, weights, n, greedy_after_first=False):
    def row():
        first = int(rng.choice(len(weights), p=weights))
        rest = [0] * 3 if greedy_after_first else [int(x) for x in rng.choice(len(weights), 3, p=weights)]
        return (first, *rest)

    return [row() for _ in range(n)]


def test_samples_of_one_distribution_agree_and_of_two_do_not():
    rng = np.random.default_rng(3)
    a, b = [0.5, 0.3, 0.15, 0.05], [0.35, 0.4, 0.2, 0.05]
    matches = [sampled_match([draw(rng, a, 100)], [draw(rng, a, 100)], 1.0) for _ in range(60)]
    assert not any(m.differs or m.ignores_temperature for m in matches) and all(m.tests for m in matches)
    assert sum(m.smallest < 0.1 for m in matches) <= 12  # about 6 of 60 expected: the level is kept
    same = sampled_match([[(1, 2, 3, 4)] * 50], [[(1, 2, 3, 4)] * 50], 1.0)
    assert not same.tests and not same.differs and "did not vary" in str(same)
    other = sampled_match([draw(rng, a, 400)], [draw(rng, b, 400)], 1.0)
    assert other.differs and not other.ignores_temperature


def test_greedy_verification_is_recognised():
    rng = np.random.default_rng(1)
    a = [0.5, 0.3, 0.15, 0.05]
    match = sampled_match([draw(rng, a, 200)], [draw(rng, a, 200, greedy_after_first=True)], 1.0)
    assert match.differs and match.ignores_temperature
    as_it_should = [what for what, p in match.tests.items() if p >= comparison.ALPHA]
    assert as_it_should == ["prefix 0, token 1"]  # which comes from prefill


class Agreeing(dict):
    """Prefills that say of every answer what its own steps said."""

    def __missing__(self, ids):
        return Prefill((), ())


def answers(name, greedy, sampled=()):
    server = Server(name, "http://127.0.0.1:1", "m")
    greedy = {1: [greedy], 40: [greedy]}
    return Answers(server, [(1, 2)], {GREEDY: greedy}, [(1,)], list(sampled), prefills=Agreeing())


def report(found, plan=None, expected=None):
    expected = expected or answers("plain", tokens(7, 5, 9, top=TOP))
    return lossless.compare(PROMPT, expected, found, plan or LosslessPlan(samples=0, concurrencies=(1, 40)))


def test_verdicts():
    assert report(answers("eagle3", tokens(7, 5, 9, steps=1))).state == "pass"
    bug = report(answers("eagle3", tokens(99, 5, 9, steps=1)))
    assert bug.state == "fail" and "2 greedy answers have a token that is not among the" in bug.reasons[0]
    near = report(answers("eagle3", tokens(7, 6, 9, steps=1)))
    assert near.state == "pass" and "0 of 2 greedy answers have the same tokens" in near.reasons[0]
    own = (TOP[0], ((-0.6, 5), (-0.7, 6)), TOP[2])
    second = report(answers("eagle3", tokens(7, 6, 9, steps=1, top=own, chosen=(-0.1, -0.7, -0.01))))
    assert second.state == "fail" and "2 of 6 tokens are not the argmax of the logits" in second.reasons[0]
    assert "by up to 0.100 nats" in second.reasons[0]
    late = answers("eagle3", tokens(7, 5, 9, steps=1))
    late.late = [True, False]
    assert report(late).state == "pass"  # rounding may do that
    late.late = [True, True, False]
    assert report(late).state == "fail" and "2 of 3 answers continue past their stop string" in report(late).reasons[0]
    idle = report(answers("eagle3", tokens(7, 5, 9, steps=0)))
    assert idle.state == "invalid" and "does not speculate" in idle.reasons[0]
    other = answers("eagle3", tokens(7, 5, 9, steps=1))
    other.prompt_ids = [(3,)]
    assert report(other).state == "invalid"


def seeded(own: int, other: int, prompts: int = 48) -> comparison.Match:
    """Answers of a reference that changes `own` of its own between batches, and of a server that changes `other`."""
    plain = [tokens(1, 2)] * prompts
    changed = lambda count: [tokens(1, 3)] * count + plain[count:]  # noqa: E731
    return matched("seeded", {8: plain, 40: changed(own)}, {8: changed(other), 40: changed(other)})


def test_seeded_answers_may_differ_as_often_as_rounding_changes_them():
    assert not seeded(0, 0).differs and not seeded(6, 9).differs and not seeded(0, 11).differs
    assert seeded(4, 40).differs and "80 of 96 seeded answers have other tokens" in str(seeded(0, 40))
    assert seeded(25, 25).differs and "depend on their batch: 25 of 48" in str(seeded(25, 25))
    assert not seeded(0, 2, prompts=4).differs  # too few to say


def test_a_server_whose_seeded_answers_are_others_fails():
    expected, found = answers("plain", tokens(7, 5, 9, top=TOP)), answers("eagle3", tokens(7, 5, 9, steps=1))
    for server, last in ((expected, 2), (found, 3)):
        server.given["seeded"] = {level: [tokens(1, last)] * 12 for level in lossless.DRAWN_LEVELS}
    result = report(found, expected=expected)
    assert result.state == "fail" and result.reasons[-1].startswith("24 of 24 seeded answers")


def test_an_engine_that_ignores_temperature_fails():
    rng = np.random.default_rng(2)
    weights = [0.5, 0.3, 0.2]
    expected = answers("plain", tokens(7, 5, 9, top=TOP), sampled=[draw(rng, weights, 200)])
    found = answers("eagle3", tokens(7, 5, 9, steps=1), sampled=[draw(rng, weights, 200, greedy_after_first=True)])
    assert report(found, LosslessPlan(concurrencies=(1, 40), samples=200), expected).state == "fail"


def test_a_reference_that_parts_from_itself_is_reported():
    """Between concurrency 1 and 40 the reference takes 8 for 7 (gap 2.3)."""
    noisy = answers("plain", tokens(7, 5, 9, top=TOP))
    noisy.given[GREEDY][40] = [tokens(8, 5, 9, top=(((-0.2, 8), (-0.3, 7)), *TOP[1:]))]
    result = report(answers("eagle3", tokens(8, 5, 9, steps=1)), expected=noisy)
    assert result.state == "pass" and result.matches[0].own == 1
    assert result.reasons[-1] == "for comparison: 1 of 1 of the reference's own answers depend on the concurrency"


def prefilled(reference, found, lost=0.0):
    """One token an answer: how far the steps of both servers are from their prefills, and found's below its best."""
    texts, prefills = [], {}
    for server, distances in enumerate((reference, found)):
        texts.append([((server, n), tokens(1, chosen=(-2.0,))) for n in range(len(distances))])
        for n, distance in enumerate(distances):
            chosen = -2.0 + distance
            prefills[server, n, 1] = Prefill((chosen,), (chosen + lost * server,))
    return comparison.against_prefill(*texts, prefills)


def test_rounding_of_the_same_size_on_both_servers_passes():
    """200 runs of 96 answers with heavy-tailed rounding: the level is one alarm in a thousand."""
    rng = np.random.default_rng(5)
    draw = lambda: rng.pareto(1.5, 96) * 0.01 * rng.choice([-1, 1], 96)  # noqa: E731
    assert sum(bool(prefilled(draw(), draw()).problems) for _ in range(200)) <= 2


def test_more_than_rounding_is_found_in_every_answer_or_in_a_few():
    rng = np.random.default_rng(6)
    noise, more = rng.uniform(0.005, 0.02, 96), rng.uniform(0.07, 0.079, 96)
    assert not prefilled(noise, 2 * rng.permutation(noise)).problems  # verify steps may round twice as coarsely
    [everywhere] = prefilled(noise, more).problems
    assert "distance to the prefill's logprobs" in everywhere and ", 0 over 4 times as far as any" in everywhere
    few = np.where(np.arange(96) < 12, 0.3, noise)
    [some] = prefilled(noise, few).problems
    assert "12 over 4 times as far as any" in some
    assert not prefilled(noise, np.where(np.arange(96) < 5, 0.3, noise)).problems
    [worse] = prefilled(noise, noise, lost=0.1).problems
    assert "tokens below the prefill's best" in worse
    assert not prefilled(np.zeros(48), np.full(48, 1e-4)).problems  # float32
    assert prefilled(np.zeros(48), np.full(48, 2e-3)).problems


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--exact --ask nosuch --recipe tiny", "nosuch"),
        ("--ask greedy --recipe tiny", "--ask needs --exact"),
        ("--recipe tiny:plain", "the recipe has no draft"),
        ("--base-url http://127.0.0.1:9", "--base-url and --reference-url together"),
    ],
)
def test_wrong_words_end_before_a_server_starts(words, what, monkeypatch):
    monkeypatch.setattr(Target, "check", lambda _: pytest.fail("a server would start"))
    done = CliRunner().invoke(app, ["eval", "lossless", *words.split()])
    assert (getattr(done.exception, "exit_code", None) or done.exit_code) == 2
    assert what in f"{done.output}{done.exception}"

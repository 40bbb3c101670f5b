"""`eval tools` against a scripted server whose answers are known: the scores must be exact, streamed or not."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from support.scripted_server import scripted_server, streamed, whole

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.installed import operator_dir
from kimi_w4a8_lab.accuracy import tool_requests, tool_run, tool_scores, vendor_checks
from kimi_w4a8_lab.accuracy.recorder import REQUESTS, Patience
from kimi_w4a8_lab.accuracy.results import ToolsResult
from kimi_w4a8_lab.base.run_folder import RunFolder
from kimi_w4a8_lab.base.server_under_test import Target
from kimi_w4a8_lab.report import evaluation
from kimi_w4a8_lab.report.page import write_page

SILENT = Console(quiet=True)
QUICK = Patience(attempts=2, first_pause_s=0.01, longest_pause_s=0.05, server_away_s=0.3, request_timeout_s=5)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
GOOD = ("weather", '{"city": "Bad\u2028 Ems"}')

# What the server answers to request n, what the reference did there, and what is wrong with the calls.
CASES = [
    ({"calls": [GOOD]}, "tool_calls", ""),
    ({"calls": [GOOD, GOOD], "content": "Two.", "reasoning": "Both."}, "tool_calls", ""),
    ({"calls": [GOOD]}, "stop", ""),
    ({"calls": [GOOD, ("weather", '{"city": 7}')]}, "tool_calls", "$.city: 7 is not of type 'string'"),
    ({"calls": [("weather", '{"city": "Ulm"')]}, "tool_calls", "arguments are not JSON"),
    ({"calls": [("wether", "{}")]}, "stop", "no tool is named 'wether'"),
    ({"calls": [], "finish": "tool_calls"}, "tool_calls", "no call in it"),
    ({"content": "It rains."}, "tool_calls", ""),
    ({"content": "It rains."}, "stop", ""),
    ({"content": "It rai", "finish": "length"}, "stop", ""),
]
# Valid arguments for eval/tool_schemas.jsonl, line by line.
VALID = [
    {}, {"city": "Ulm"}, {"count": 1}, {"price": 1.5, "paid": True}, {"unit": "celsius"},
    {"unit": "\u00b0C", "kind": "weather"}, {"list": [1]}, {"where": {"x": 1, "y": 2}}, {"id": None}, {"to": {"x": 1}},
    {"code": "AB123"}, {"level": 3}, {"name": "x"}, {"value": 1},
]  # fmt: skip
ALLOWED = {
    "temperature": lambda v: 0 <= v <= 2, "top_p": lambda v: 0 < v <= 1, "n": lambda v: v >= 1,
    "presence_penalty": lambda v: abs(v) <= 2, "frequency_penalty": lambda v: abs(v) <= 2,
    "max_tokens": lambda v: v > 0,
}  # fmt: skip


def said(body, calls=(), content="", reasoning="", finish=None):
    """A scripted answer, in one piece or letter by letter as the body asks."""
    finish = finish or ("tool_calls" if calls else "stop")
    usage = {"prompt_tokens": len(body["messages"][0]["content"]), "completion_tokens": 5}
    called = [
        {"index": i, "id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    if not body.get("stream"):
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": called}
        return whole({"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage})
    deltas = [{"role": "assistant"}, *({"reasoning_content": c} for c in reasoning), *({"content": c} for c in content)]
    for call in called:
        deltas.append({"tool_calls": [{**call, "function": {"name": call["function"]["name"], "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": call["index"], "function": {"arguments": letter}}]}
            for letter in call["function"]["arguments"]
        ]
    pieces = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    lines_sent = [json.dumps(piece, ensure_ascii=False) for piece in [*pieces, {"choices": [], "usage": usage}]]
    return streamed([*lines_sent, "[DONE]"])


class Server:
    """Answers requests by their number, checks as a good server does; `asked` counts the requests."""

    def __init__(self):
        self.asked, self.spoilt = [], lambda body: None
        self.schemas = [json.loads(line) for line in (operator_dir("eval") / "tool_schemas.jsonl").open()]

    def __call__(self, _, raw):
        if not raw:
            return whole({"data": [{"id": "m"}]})
        body = json.loads(raw)
        self.asked.append(body)
        if (spoilt := self.spoilt(body)) is not None:
            return spoilt
        if any(name in body and not allowed(body[name]) for name, allowed in ALLOWED.items()):
            return whole({"error": {"message": "out of range"}}, 400)
        question = body["messages"][-1]["content"]
        if question.startswith("case "):
            return said(body, **CASES[int(question.removeprefix("case "))][0])
        if "tools" not in body:
            return said(body, content="OK")
        index = self.schemas.index(body["tools"][0]["function"]["parameters"])
        return said(body, calls=[("submit", json.dumps(VALID[index]))])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "requests.jsonl"
    rows = [
        {"request": {"messages": [{"role": "user", "content": f"case {n}"}], "tools": TOOLS}, "finish_reason": expected}
        for n, (_, expected, _) in enumerate(CASES)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(server, data, tmp_path, resume=None, stream=None, **judged):
    judged = {"max_unusable": 0.2, **judged}
    judging = tool_run.Judging(runs=tmp_path / "runs", patience=QUICK, resume=resume, **judged)
    plan = tool_run.ToolPlan(str(data), stream=stream, concurrency=4, extra={"seed": 7, "temperature": 0.25})
    with scripted_server(server) as listening:
        folder = tool_run.run(Target(listening.base_url), plan, judging, SILENT)
    return folder, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    return run(Server(), data, tmp_path_factory.mktemp("finished"))


@pytest.mark.parametrize("stream", [False, True])
def test_the_scores_are_exact(data, tmp_path, finished, stream):
    folder, result = run(Server(), data, tmp_path, stream=True) if stream else finished
    ended = Counter(outcome["finish_reason"] for outcome in result["outcomes"])
    assert ended == {"tool_calls": 7, "stop": 2, "length": 1}
    schema, trigger = result["verdict"]["accuracies"]
    assert (schema["correct"], schema["answered"]) == (3, 7)
    # Both call in 0, 1, 3, 4, 6; only we in 2 and 5; only the reference in 7: F1 = 10 / 13.
    assert (trigger["correct"], trigger["answered"]) == (5, 8)
    assert trigger["interval"]["value"] == pytest.approx(10 / 13)
    low, high = 0.3057, 0.8632  # Wilson's limits of 5 of 8
    assert trigger["interval"]["low"] == pytest.approx(2 * low / (1 + low), abs=1e-4)
    assert trigger["interval"]["high"] == pytest.approx(2 * high / (1 + high), abs=1e-4)
    found = RunFolder.open(folder, ToolsResult).result.outcomes
    for outcome, (_, _, problem) in zip(found, CASES, strict=True):
        assert outcome.problem.startswith(problem) and bool(outcome.problem) == bool(problem)
    assert found[1].calls[1]["function"]["arguments"] == GOOD[1]
    assert [check["found"].split(";")[0] for check in result["checks"]] == [
        "0", "14 of 14", "6 of 6", "0 of 6", "14 of 14", "14 of 14", "not counted",
    ]  # fmt: skip
    assert result["verdict"]["state"] == "inconclusive" and result["verdict"]["truncated"] == 1
    page = write_page(evaluation.page(folder, RunFolder.open(folder, ToolsResult).result), folder).read_text()
    assert "wether" in page and "INCONCLUSIVE" in page and "3 of 7" in page


def test_a_reference_run_judges_calling_and_schemas(data, tmp_path, finished):
    earlier = tool_run.load_outcomes(finished[0])
    table = tool_scores.Published(0.6, [])
    few = tool_scores.judge(list(earlier.values()), [], table, None, earlier, 0.2)
    assert "to decide it raise --limit" in few.reasons[0]
    assert few.state == "inconclusive" and few.accuracies[1].interval.value == 1  # 3 of 7 against 3 of 7
    good = next(outcome for outcome in earlier.values() if outcome.called and not outcome.problem)
    many = {str(n): replace(good, identity=str(n)) for n in range(120)}
    assert tool_scores.judge(list(many.values()), [], table, None, many, 0.2).state == "pass"
    server = Server()
    server.spoilt = lambda body: said(body, content="no") if body["messages"][0]["content"][:4] == "case" else None
    _, never = run(server, data, tmp_path, baseline=finished[0], min_similarity=0.6)
    assert never["verdict"]["state"] == "fail" and "unlike the reference" in never["verdict"]["reasons"][-1]
    worse = [replace(outcome, problem="bad") for outcome in earlier.values()]
    found = tool_scores.judge(worse * 3, [], table, None, {n: replace(o, problem="") for n, o in earlier.items()}, 0.2)
    assert found.state == "fail" and "against the baseline's 100.00%" in found.reasons[0]


def test_the_published_table_judges_schema_accuracy(data, tmp_path, finished):
    outcomes = list(tool_run.load_outcomes(finished[0]).values())
    verdict = tool_scores.judge(outcomes, [], tool_scores.published("kimi-k2-thinking"), "MoonshotAI", None, 0.2)
    assert verdict.state == "fail"  # 3 of 7 against 1958 of 1958
    rows = {row.configuration: row.accuracy for row in verdict.references}
    assert rows["SGLang"] == pytest.approx(0.9552, abs=1e-4) and rows["vLLM"] == pytest.approx(0.8722, abs=1e-4)
    with pytest.raises(KimiError, match="no published table"):
        run(Server(), data, tmp_path, published="kimi-k9")


def test_each_fault_is_found_by_the_check_that_looks_for_it(data, tmp_path):
    server = Server()

    def spoilt(body):
        question, schema = body["messages"][0]["content"], str(body.get("tools"))
        if question == "case 8":
            return said(body, content="<|tool_call_begin|>")
        if body.get("chat_template_kwargs") == {"thinking": False} and "n" in body:
            return whole({}, 400)
        if body.get("temperature") == -0.1:
            return said(body, content="hot")
        if "'count'" in schema and not body.get("stream"):
            return said(body, calls=[("submit", '{"count": 1.5}')])
        return said(body, content="{}") if "'city'" in schema and "submit" in schema and body.get("stream") else None

    server.spoilt = spoilt
    _, result = run(server, data, tmp_path)
    assert {body["seed"] for body in server.asked} == {7}
    assert {body["temperature"] for body in server.asked} == {0.25, -0.1, 0.6, 1.0, 1.1, 2.0}  # a probe's own
    counts = ["1, the first", "13 of 14", "5 of 6", "0 of 6", "13 of 14", "13 of 14", "not counted"]
    for check, count in zip(result["checks"], counts, strict=True):
        assert check["found"].startswith(count)
    assert [check["severity"] == "ok" for check in result["checks"]] == [False, False, False, True, False, False, True]
    assert result["verdict"]["state"] == "fail" and len(result["verdict"]["reasons"]) == 2 + 5


def test_an_interrupted_run_asks_nothing_twice(data, tmp_path, finished):
    server, expected = Server(), finished[1]
    asked = expected["requests"]["asked"]
    server.spoilt = lambda body: whole({}, 404) if len(server.asked) > 12 else None
    with pytest.raises(KimiError, match="refuses every request") as stopped:
        run(server, data, tmp_path)
    folder = tmp_path / "runs" / stopped.value.remedy.rpartition("/")[2]
    answers = (folder / REQUESTS).read_text().splitlines(keepends=True)
    (folder / REQUESTS).write_text(answers[-1])
    with pytest.raises(KimiError, match="refuses every request"):
        run(server, data, tmp_path, resume=folder)  # before it comes to a request that has an answer
    assert (folder / REQUESTS).read_text() == answers[-1]
    (folder / REQUESTS).write_text("".join(answers))
    server.spoilt = lambda body: None
    server.asked.clear()
    _, result = run(server, data, tmp_path, resume=folder)
    refused = 6  # they are no answers, and are asked again
    assert asked - 12 <= len(server.asked) <= asked - 12 + refused and result["requests"]["reused"] >= 12 - refused
    keys = ("outcomes", "checks", "verdict")
    assert {key: result[key] for key in keys} == {key: expected[key] for key in keys}


def test_requests_of_every_known_form(tmp_path):
    message = {"role": "user", "content": "q"}
    path = tmp_path / "requests.jsonl"
    rows = [
        {"messages": [{"role": "_input", "content": "s"}, message], "tools": TOOLS, "temperature": 0.6},
        {"messages": json.dumps([message]), "tools": json.dumps(TOOLS), "official_finish_reason": "stop"},
        {"request": {"messages": [message], "tools": TOOLS, "model": "k2"}, "finish_reason": "tool_calls", "hash": "h"},
    ]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    one, two, three = tool_requests.load(str(path), None)
    assert one.body["messages"][0]["role"] == "system" and one.body["temperature"] == 0.6 and one.expected is None
    assert two.body == {"messages": [message], "tools": TOOLS} and two.expected == "stop"
    assert three.expected == "tool_calls" and three.identity == two.identity != one.identity
    assert len(tool_requests.load(str(path), 2)) == 2


@pytest.mark.parametrize("line", ["[]", '{"messages": 3}', '{"messages": [{"content": "no role"}]}', "{cut"])
def test_an_error_names_the_line_that_is_not_a_request(tmp_path, line):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"messages": []}\n' + line + "\n")
    with pytest.raises(KimiError, match="line 2 is not a request"):
        tool_requests.load(str(path), None)
    with pytest.raises(KimiError, match="the tokenizer cannot be loaded"):
        vendor_checks.counter(str(tmp_path))


def test_a_schema_is_never_fetched_and_a_broken_one_is_named():
    def problem(schema):
        call = {"function": {"name": "weather", "arguments": "{}"}}
        return tool_scores.wrong(call, [{"function": {"name": "weather", "parameters": schema}}])

    assert problem({}) == "" and problem({"type": "object"}) == ""
    with scripted_server(lambda n, raw: whole({})) as elsewhere:
        assert "is unusable" in problem({"$ref": f"{elsewhere.base_url}/schema"})
        assert elsewhere.requests == 0
    assert "is unusable" in problem({"type": "objekt"})

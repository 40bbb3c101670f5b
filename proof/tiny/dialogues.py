"""Word problems as conversations in the four forms that the built-in model knows: what it is trained and examined on.

- instant: thinking is off; the worked lines, then `#### N`
- think: the lines are thought; the answer is the last sentence and `#### N`
- tools: each step is a call of a calculator; steps that need none of each other's results are called in parallel; what
  is left to work out is thought before every call, because the next event of a long story is easily missed
- json: thought, then an object with the keys and types that the question asks for

Some have earlier questions before them, as turns or as shots of an evaluation harness; in some a number stands in a
picture's place, as the digits that a vision tower will put there.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kimi_w4a8_eagle3.chat.calculator import DESCRIPTION, NAME, calculate, declaration
from kimi_w4a8_lab.accuracy.problems import parse_answer
from kimi_w4a8_laptop.tiny.tokenizer import (
    CALL_ARGUMENTS,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    IM_END,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    THINK_END,
)

from .problems import NAMES, ProblemStep, WordProblem
from .tokenizer import CHAT_TEMPLATE

Message = dict[str, Any]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer step by step.",
    "You are Kimi. Solve the problem and end with the answer after ####.",
    "You are Kimi, an AI assistant.",
    "You are a careful teacher of maths. Be brief.",
    "Use the tools that you are given.",
    "Today is Friday. You help a shop with its accounts.",
    "Answer in English. Do not guess.",
)
CALCULATORS = (
    (NAME, DESCRIPTION), ("calculate", "Calculates."), ("compute", "Gives the result of an expression."),
    ("math", "Does arithmetic."), ("evaluate", "Evaluates an expression."),
)  # fmt: skip
OTHER_TOOLS = (
    ("search", "Searches the web.", "query"), ("weather", "Tells the weather of a city.", "city"),
    ("get_time", "Tells the time.", "zone"), ("send_mail", "Sends a mail.", "to"),
    ("read_file", "Reads a file.", "path"),
)  # fmt: skip
NUMBER_KEYS = ("answer", "result", "total", "count", "number")
UNIT_KEYS = ("unit", "item", "thing")
SHOTS, EARLIER = (1, 1, 2, 2, 3, 4, 5, 6, 8, 10), (1, 1, 1, 2, 3, 4)
PICTURE_BEGIN, PICTURE_END = f"{MEDIA_BEGIN}image{MEDIA_CONTENT}", f"{MEDIA_END}\n"
PICTURE_TOKENS = 4  # that a picture takes; digits stand at the right
_NUMBER = re.compile(r"(?<!\d)\d{1,2}(?!\d)")
_FITS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list) and all(type(item) is int for item in value),
}
TYPES = {"integer": "an integer", "string": "a string", "array": "a list of integers"}


@dataclass(frozen=True)
class Key:
    """One key of an asked object, its JSON type, and its right value."""

    name: str
    type: str
    value: Any


@dataclass(frozen=True)
class Dialogue:
    """Messages as an OpenAI client sends and gets them; the assistant's are the right ones."""

    messages: list[Message]
    answer: int | None
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True
    keys: tuple[Key, ...] = ()  # of the object that is asked for
    earlier: int = 0  # how many of the messages belong to earlier questions

    def question(self) -> list[Message]:
        """The messages before the first of the assistant's that answers the last question."""
        return self.messages[: min(self.turns())]

    def turns(self) -> list[int]:
        """Indexes of the messages that the assistant writes for the last question."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i >= self.earlier]

    def accepts(self, answer: str) -> bool:
        """Return True if the assistant's last words are right; for an object: its keys, their types and its number."""
        if not self.keys:
            return parse_answer(answer) == self.answer
        try:
            found = json.loads(answer)
        except ValueError:
            return False
        if not isinstance(found, dict) or found.keys() != {key.name for key in self.keys}:
            return False
        fits = all(_FITS[key.type](found[key.name]) for key in self.keys)
        return fits and all(found[key.name] == key.value for key in self.keys if key.type == "integer")

    def prompt(self, turns: int) -> str:
        """Return the text that the model reads before it writes message `turns`."""
        return render(self.messages[:turns], self.tools, ask=True, thinking=self.thinking)

    def parts(self) -> Iterator[tuple[str, str]]:
        """(what the model is given, what it writes) until the end of the conversation."""
        done = ""
        for turn in self.turns():
            prompt, written = self.prompt(turn), self.written(self.messages[turn])
            assert prompt.startswith(done)  # a turn's thinking stays in front of the model until it has answered
            yield prompt.removeprefix(done), written
            done = prompt + written

    def text(self) -> str:
        """The conversation as one text: `parts`, joined."""
        last = self.turns()[-1]
        return self.prompt(last) + self.written(self.messages[last])

    def written(self, message: Message) -> str:
        """Return the text that the model writes for one of its messages."""
        calls = "".join(
            f"{CALL_BEGIN}{call['id']}{CALL_ARGUMENTS}{call['function']['arguments']}{CALL_END}"
            for call in message.get("tool_calls", [])
        )
        thought = message["reasoning_content"] + THINK_END if self.thinking else ""
        return thought + message["content"] + (CALLS_BEGIN + calls + CALLS_END if calls else "") + IM_END


@lru_cache(maxsize=1)
def _template() -> Any:
    """The template in the environment that transformers gives it."""

    def tojson(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    return environment.from_string(CHAT_TEMPLATE)


def render(messages: list[Message], tools: list[dict[str, Any]], *, ask: bool = False, thinking: bool = True) -> str:
    """The chat template's text of `messages`; with `ask` up to where the assistant begins to write."""
    text: str = _template().render(messages=messages, tools=tools, add_generation_prompt=ask, thinking=thinking)
    return text


def instant(problem: WordProblem, rng: random.Random) -> Dialogue:
    """Thinking is off: the template closes it before the answer."""
    return Dialogue(
        [*user_turns(problem.question, rng), assistant_turn(problem.solution)], problem.answer, thinking=False
    )


def think(problem: WordProblem, rng: random.Random) -> Dialogue:
    """Every step is thought."""
    return Dialogue([*user_turns(problem.question, rng), _thought(problem, conclusion(problem))], problem.answer)


def tools(problem: WordProblem, rng: random.Random) -> Dialogue:
    """Calls of a calculator among up to three tools; the assistant's turns and the results in between."""
    name, declared = declared_tools(rng)
    thinking = rng.random() < 0.85
    messages = [*user_turns(problem.question, rng), *_called(problem, name, 0, thinking)]
    return Dialogue(messages, problem.answer, declared, thinking=thinking)


def declared_tools(rng: random.Random) -> tuple[str, list[dict[str, Any]]]:
    name, description = rng.choice(CALCULATORS) if rng.random() < 0.5 else CALCULATORS[0]
    declared = [declaration(name, description)]
    for other, about, parameter in rng.sample(OTHER_TOOLS, rng.choice([0, 0, 0, 1, 2])):
        tool = declaration(other, about)
        tool["function"]["parameters"] = {
            "type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter],
        }  # fmt: skip
        declared.append(tool)
    rng.shuffle(declared)
    return name, declared


def _called(problem: WordProblem, name: str, done: int, thinking: bool = True) -> list[Message]:
    """The turns from the first call, the conversation's number `done`, to the answer."""
    messages: list[Message] = []
    last = problem.steps[-1]
    for level in range(last.level + 1):
        steps = [step for step in problem.steps if step.level == level]
        calls = [_call(name, done + index, step) for index, step in enumerate(steps)]
        done += len(calls)
        needed = f"I need {_whole(last, level)}." if thinking else ""
        messages.append({**assistant_turn("", needed), "tool_calls": calls})
        for call in calls:
            result = {"role": "tool", "name": name, "tool_call_id": call["id"]}
            messages.append({**result, "content": calculate(call["function"]["arguments"])})
    return [*messages, assistant_turn(conclusion(problem), "I have the answer." if thinking else "")]


def _whole(step: ProblemStep, known: int) -> str:
    """The operation with all that it needs; those below level `known` as their results."""
    op = step.expression.split()[1]

    def side(operand: ProblemStep | int, right: bool) -> str:
        if isinstance(operand, int) or operand.level < known:
            return str(operand if isinstance(operand, int) else operand.result)
        inside = _whole(operand, known)
        return f"({inside})" if op in "*/" or (right and operand.expression.split()[1] in "+-") else inside

    left, right = step.operands
    return f"{side(left, False)} {op} {side(right, True)}"


def as_json(problem: WordProblem, rng: random.Random) -> Dialogue:
    """An object of one to three keys."""
    keys = _keys(problem, rng)
    names = [f'"{key.name}" ({TYPES[key.type]})' for key in keys]
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    shape = rng.choice(
        ["Answer as JSON with {k}.", "Reply with a JSON object with {k}.", "Give JSON with the keys {k}."]
    )
    answer = json.dumps({key.name: key.value for key in keys})
    messages = [*user_turns(f"{problem.question}\n{shape.format(k=listed)}", rng), _thought(problem, answer)]
    return Dialogue(messages, problem.answer, keys=tuple(keys))


FORMS: dict[str, Callable[[WordProblem, random.Random], Dialogue]] = {
    "instant": instant, "think": think, "tools": tools, "json": as_json,
}  # fmt: skip


def about_problem(stream: Iterator[WordProblem], rng: random.Random) -> Dialogue:
    """The next problem in one of the forms; what surrounds it in practice is around some."""
    (form,) = rng.choices(list(FORMS), (2, 4, 6, 5))
    dialogue, kind = of_form(form, stream, rng), rng.random()
    if kind < 0.06:
        return after_shots(dialogue, [next(stream) for _ in range(rng.choice(SHOTS))])
    if kind < 0.16:
        return after_turns(dialogue, [next(stream) for _ in range(rng.choice(EARLIER))])
    return in_picture(dialogue, rng) if kind < 0.21 else dialogue


def of_form(form: str, stream: Iterator[WordProblem], rng: random.Random) -> Dialogue:
    """Many steps or many keys are learned last, so that only two in five of the others are taken."""
    while True:
        problem = next(stream)
        dialogue = FORMS[form](problem, rng)
        if len(problem.steps) > 3 or len(dialogue.keys) > 2 or rng.random() < 0.4:
            return dialogue


def after_shots(dialogue: Dialogue, shots: list[WordProblem]) -> Dialogue:
    """Solved problems in front of the question, in one message."""
    turn = min(dialogue.turns()) - 1
    solved = "".join(f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots)
    question = dialogue.messages[turn]["content"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return _with(dialogue, turn, f"{solved}Question: {question}\nAnswer:")


def after_turns(dialogue: Dialogue, before: list[WordProblem]) -> Dialogue:
    """Earlier questions and answers in front, of the same form; the thinking of answered turns is not shown again."""
    first = min(dialogue.turns()) - 1
    head, rest = dialogue.messages[:first], dialogue.messages[first:]
    earlier, calls = [], 0
    name = next((call["function"]["name"] for message in rest for call in message.get("tool_calls", [])), None)
    for problem in before:
        earlier.append({"role": "user", "content": problem.question})
        if name:
            earlier += _called(problem, name, calls)
            calls += len(problem.steps)
        else:
            earlier.append(assistant_turn(conclusion(problem) if dialogue.thinking else problem.solution))
    moved = [_counted(message, calls) for message in rest]
    return replace(dialogue, messages=[*head, *earlier, *moved], earlier=len(head) + len(earlier))


def in_picture(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """The question's first number, where it has one of at most two digits, as what a picture shows."""
    turn = min(dialogue.turns()) - 1
    question = dialogue.messages[turn]["content"]
    found = _NUMBER.search(question)
    if not found:
        return dialogue
    shown = PICTURE_BEGIN + MEDIA_PAD * (PICTURE_TOKENS - len(found[0])) + found[0] + PICTURE_END
    said = rng.choice(["The picture shows X.", "X is the number in the picture.", "See the picture for X."])
    return _with(dialogue, turn, f"{shown}{said} {question[: found.start()]}X{question[found.end() :]}")


def _with(dialogue: Dialogue, turn: int, content: str) -> Dialogue:
    messages = [*dialogue.messages]
    messages[turn] = {**messages[turn], "content": content}
    return replace(dialogue, messages=messages)


def _counted(message: Message, more: int) -> Message:
    """The same with its call ids moved by `more`."""

    def moved(call_id: str) -> str:
        name, _, index = call_id.rpartition(":")
        return f"{name}:{int(index) + more}"

    if "tool_call_id" in message:
        return {**message, "tool_call_id": moved(message["tool_call_id"])}
    if "tool_calls" in message:
        return {**message, "tool_calls": [{**call, "id": moved(call["id"])} for call in message["tool_calls"]]}
    return message


def user_turns(question: str, rng: random.Random) -> list[Message]:
    system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    asked = f"Question: {question}\nAnswer:" if rng.random() < 0.1 else question
    return [*system, {"role": "user", "content": asked}]


def assistant_turn(content: str, thought: str = "") -> Message:
    return {"role": "assistant", "reasoning_content": thought, "content": content}


def _thought(problem: WordProblem, content: str) -> Message:
    return assistant_turn(content, "\n".join(problem.lines))


def conclusion(problem: WordProblem) -> str:
    return f"{problem.steps[-1].sentence}\n#### {problem.answer}"


def _call(name: str, index: int, step: ProblemStep) -> dict[str, Any]:
    arguments = json.dumps({"expression": step.expression})
    return {
        "id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments},
    }  # fmt: skip


def _keys(problem: WordProblem, rng: random.Random) -> list[Key]:
    """The answer under one of its names, and what else can be told without doubt."""
    keys = [Key(rng.choice(NUMBER_KEYS), "integer", problem.answer)]
    unit = problem.steps[-1].after.strip()
    if unit and rng.random() < 0.5:
        keys.append(Key(rng.choice(UNIT_KEYS), "string", unit))
    first = problem.question.split(maxsplit=1)[0]
    if first in NAMES and rng.random() < 0.3:
        keys.append(Key("name", "string", first))
    if rng.random() < 0.3:
        keys.append(Key("steps", "array", [step.result for step in problem.steps]))
    rng.shuffle(keys)
    return keys

"""/v1/chat/completions: OpenAI's chat API, with Moonshot's and SGLang's fields."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import parts
from .answer import Arguments, Called, CallEnd, Said, Thought
from .conversation import Conversation, Message, Text, ToolChoice
from .errors import Refusal
from .formats import grammar_in
from .generate import Delta, End, Usage
from .render import ANSWER
from .requests import ChatRequest, Completing, check_number, sampling_of
from .writer import Answerer, sse

PATH = "/v1/chat/completions"
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def conversation_of(request: ChatRequest) -> Conversation:
    """Return the conversation that a request asks to continue."""
    check_number(request.n)
    messages = messages_of(request.messages)
    effort = request.reasoning_effort or (request.reasoning or {}).get("effort")
    thinking = parts.thinking_of(request, effort)
    if request.continue_final_message:
        _check_continued(messages, thinking["thinking"])
    if request.top_logprobs is not None and not request.logprobs:
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = [
        parts.function_tool(tool.get("function"), f"tools.{number}.function")
        for number, tool in enumerate(request.tools or ())
        if parts.is_clients(tool, f"tools.{number}", "function", "custom")
    ]
    return Conversation(
        messages=messages,
        sampling=sampling_of(request, request.max_completion_tokens or request.max_tokens, request.stop),
        tools=tools,
        choice=choice_of(request.tool_choice, [tool.name for tool in tools]),
        parallel=request.parallel_tool_calls,
        **thinking,
        continued=request.continue_final_message and messages[-1].role == "assistant",
        format=grammar_in(request),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        cache_salt=request.cache_salt,
    )


def messages_of(given: list[Any]) -> list[Message]:
    """Return the turns of a conversation."""
    if not given:
        raise Refusal("there is no message to answer", param="messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in given]
    past = parts.last_user_turn([str(role) for role in roles])
    messages = [_message(message, at, at < past) for at, message in enumerate(given)]
    check_results(messages)
    return messages


def check_results(messages: list[Message]) -> None:
    """Raise Refusal for a tool's result that answers no call: the vendors refuse it, and the model reads nonsense."""
    known: set[str] = set()
    for message in messages:
        known |= {call.id for call in message.calls}
        if message.role == "tool" and message.call_id not in known:
            raise Refusal(
                f"the result of the tool call {message.call_id!r:.80} follows no message with that call",
                param="messages",
            )


def choice_of(
    given: str | dict[str, Any] | None,
    tools: list[str],
    shown: Callable[[dict[str, Any], str], str] = lambda _, name: name,
) -> ToolChoice:
    """Return the tool choice in OpenAI's form. shown: returns the name that the model sees for a forced tool."""
    if isinstance(given, dict):
        if given.get("type") == "allowed_tools":
            raise Refusal("tool_choice cannot name allowed_tools: send only these tools", param="tool_choice")
        function = given.get("function", given)
        name = given.get("name") or (function.get("name") if isinstance(function, dict) else None)
        if not isinstance(name, str):
            why = "the body is not what this endpoint reads (tool_choice names no function)"
            raise Refusal(why, param="tool_choice")
        return named_choice(shown(given, name), tools)
    if given not in (None, "auto", "none", "required"):
        raise Refusal(f"tool_choice is {given!r:.40}; auto, none, required or a function is read", param="tool_choice")
    if given == "required" and not tools:
        raise Refusal("tool_choice is required, and there are no tools that the client runs", param="tool_choice")
    return ToolChoice(given or "auto")  # type: ignore[arg-type]  # compared above


def named_choice(name: str, tools: list[str]) -> ToolChoice:
    """Return the choice that forces one tool."""
    if name not in tools:
        raise Refusal(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return ToolChoice("required", name)


def _message(given: Any, at: int, past: bool) -> Message:
    if not isinstance(given, dict):
        raise Refusal("messages and their parts must be objects", param="messages")
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise Refusal(f"messages.{at}.role is {given.get('role')!r:.40}", param="messages")
    if role == "user" and given.get("content") is None:
        raise Refusal(f"messages.{at}.content is missing", param="messages")
    past = past or role != "user"
    message = Message(role, parts.contents(given.get("content"), lambda part: _part(part, past)))  # type: ignore[arg-type]
    if isinstance(given.get("name"), str):
        message.name = given["name"]
    if role == "assistant":
        thinking = given.get("reasoning_content") or given.get("reasoning")
        message.thinking = thinking if isinstance(thinking, str) else ""
        for one in parts.listed(given.get("tool_calls"), f"messages.{at}.tool_calls", "messages"):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                raise Refusal("a tool call must have a function", param="messages")
            message.calls.append(parts.call({**function, "id": one.get("id")}, function.get("arguments") or ""))
    if role == "tool":
        message.call_id = str(given.get("tool_call_id") or "")
    return message


def _part(part: Any, past: bool) -> parts.Part | None:
    match parts.type_of(part):
        case "text" | "input_text":
            return Text(parts.text_of(part))
        case "refusal":
            return Text(parts.text_of(part, "refusal"))
        case "image_url" | "input_image":
            return parts.picture(parts.only_source(part, part.get("image_url")))
        case "item_reference":
            raise Refusal("this server stores no items, so an item_reference has none: send the items themselves")
    return parts.unreadable(part, past)


def _check_continued(messages: list[Message], thinking: bool) -> None:
    """Refuse a last message that cannot be gone on with: its text would be rendered as thinking, or not at all."""
    last = messages[-1]
    if last.role != "assistant":
        return
    if len(messages) == 1:
        raise Refusal("continue_final_message needs a message before the one to continue", param="messages")
    if not isinstance(last.content, str) or not last.content:
        raise Refusal("continue_final_message needs a last message whose content is text", param="messages")
    if thinking:
        why = 'continue_final_message needs thinking off: send "thinking": {"type": "disabled"}'
        raise Refusal(why, param="thinking")


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage in the form of completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.answer,
        "total_tokens": usage.prompt + usage.answer,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking},
    }


def add_usage(total: Usage, one: Usage) -> None:
    """Add an answer's usage to the request's, whose prompt counts once."""
    total.prompt = one.prompt
    total.cached = max(total.cached, one.cached)
    total.answer += one.answer
    total.thinking += one.thinking


@dataclass
class _Choice:
    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # thinking of a client that wants it in one piece
    pending: list[dict[str, Any]] = field(default_factory=list)  # logprobs that no chunk has carried yet
    open: bool = False  # thinking that is shown as content has begun
    end: End | None = None


class CompletionsWriter:
    """Ends of the answers of both completions. kind: of a stream's chunks. prefix: of the id."""

    def __init__(self, server: Answerer, request: Completing, kind: str, prefix: str) -> None:
        self._server, self._kind = server, kind
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": server.model}
        self._with_usage = bool((request.stream_options or {}).get("include_usage"))
        self._with_details = request.return_spec_tokens_details
        self._usage = Usage()
        self._first: End | None = None  # of the first choice

    def finish(self) -> bytes:
        """Return the events that end a stream."""
        end = b"data: [DONE]\n\n"
        return sse(self._whole(self._kind, [])) + end if self._with_usage else end

    def failed(self, body: bytes, message: str, code: str) -> bytes:
        """Return the events that end a stream with an error."""
        return b"data: %b\n\ndata: [DONE]\n\n" % body

    def _whole(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer = {**self._head, "object": kind, "choices": choices, "usage": usage_of(self._usage)}
        if self._with_details:
            answer["sglext"] = {"spec_tokens_details": spec_details(self._first)}
        return answer


class ChatWriter(CompletionsWriter):
    """Writes chat completions. prompt: its token ids, for a client that asked for them."""

    def __init__(self, server: Answerer, request: ChatRequest, past_calls: int, prompt: list[int]) -> None:
        super().__init__(server, request, "chat.completion.chunk", "chatcmpl")
        self._request, self._past, self._prompt = request, past_calls, prompt
        self._choices = [_Choice() for _ in range(request.n)]

    def begin(self) -> bytes:
        return b"".join(self._chunk(at, {"role": "assistant", "content": ""}) for at in range(len(self._choices)))

    def delta(self, delta: Delta) -> bytes:
        choice, chunks = self._choices[delta.index], []
        news = [self._server.logprob(one) for one in delta.logprobs]
        choice.logprobs += news
        choice.pending += news
        choice.ids += delta.ids
        for piece in delta.pieces:
            chunks += [self._chunk(delta.index, change, carry=True) for change in self._changes(choice, piece)]
        if delta.end is not None:
            choice.end = delta.end
            self._first = self._choices[0].end
            add_usage(self._usage, delta.end.usage)
            chunks += [self._chunk(delta.index, change) for change in self._thought(choice, None)]
            chunks.append(self._chunk(delta.index, {}, delta.end.reason, carry=True))
        return b"".join(chunks)

    def _changes(self, choice: _Choice, piece: object) -> list[dict[str, Any]]:
        match piece:
            case Thought(text):
                return self._thought(choice, text)
            case Said(text):
                before = self._thought(choice, None)
                choice.content.append(text)
                return [*before, {"content": text}]
            case Called(index, name):
                before = self._thought(choice, None)
                made = {"id": f"functions.{name}:{self._past + index}", "type": "function"}
                choice.calls.append({**made, "function": {"name": name, "arguments": ""}})
                return [*before, {"tool_calls": [{"index": index, **choice.calls[-1]}]}]
            case Arguments(index, text):
                choice.calls[index]["function"]["arguments"] += text
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
            case CallEnd():
                return []
        raise AssertionError(piece)

    def _thought(self, choice: _Choice, text: str | None) -> list[dict[str, Any]]:
        """Return the changes of a piece of thinking, or with None of its end."""
        if not self._request.separate_reasoning:
            shown = text if text is not None else ANSWER if choice.open else None
            choice.open = text is not None
            choice.content += [shown] if shown else []
            return [{"content": shown}] if shown else []
        if text is not None:
            choice.thinking.append(text)
            if self._request.stream_reasoning:
                return [{"reasoning_content": text}]
            choice.held.append(text)
            return []
        held, choice.held = "".join(choice.held), []
        return [{"reasoning_content": held}] if held else []

    def _chunk(self, index: int, change: dict[str, Any], reason: str | None = None, carry: bool = False) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": change, "logprobs": None, "finish_reason": reason}
        state = self._choices[index]
        if carry and state.pending:
            choice["logprobs"], state.pending = {"content": state.pending}, []
        chunk = {**self._head, "object": self._kind, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return sse(chunk)

    def whole(self) -> dict[str, Any]:
        return self._whole("chat.completion", [self._choice(at, choice) for at, choice in enumerate(self._choices)])

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, thinking = "".join(choice.content), "".join(choice.thinking)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.calls else "")}
        message["reasoning_content"] = thinking or None
        message["tool_calls"] = choice.calls or None
        assert choice.end is not None
        made: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.end.reason}
        made["logprobs"] = {"content": choice.logprobs} if self._request.logprobs else None
        return made | token_ids(self._request, self._prompt, choice.ids, choice.end)


def token_ids(request: Completing, prompt: list[int], ids: list[int], end: End) -> dict[str, Any]:
    """Return SGLang's own fields of a choice, for a client that asked for them."""
    asked: dict[str, Any] = {}
    if request.return_token_ids:
        asked |= {"prompt_token_ids": prompt, "response_token_ids": ids}
    if request.return_prompt_token_ids:
        asked["prompt_token_ids"] = prompt
    if request.return_meta_info:
        asked["meta_info"] = end.meta
    return asked


def spec_details(end: End | None) -> dict[str, Any] | None:
    """Return the engine's account of the drafts of an answer."""
    names = ("spec_accept_rate", "spec_accept_length", "spec_num_correct_drafts", "spec_num_proposed_drafts",
             "spec_verify_ct", "spec_correct_drafts_histogram")  # fmt: skip
    found = {name: end.meta[name] for name in names if end is not None and name in end.meta}
    return found or None

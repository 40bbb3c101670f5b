"""/v1/chat/completions: OpenAI's chat API, with Moonshot's and SGLang's fields."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from .answer import Arguments, Called, CallEnd, Said, Thought
from .conversation import Conversation, Message, Text, ToolChoice
from .errors import Refusal
from .formats import format_of, regex
from .generate import Delta, End, Usage
from .parts import (
    Part,
    call,
    contents,
    function_tool,
    last_user_turn,
    line_for,
    only_source,
    picture,
    text_of,
    thinking_of,
    type_of,
    unreadable,
)  # fmt: skip
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
    thinking, template = thinking_of(request.chat_template_kwargs, request.thinking, request.enable_thinking)
    effort = template.pop("reasoning_effort", None) or effort
    thinking = thinking and effort != "none"
    if request.continue_final_message:
        _check_continued(messages, thinking)
    if request.top_logprobs is not None and not request.logprobs:
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = [_tool(tool, number) for number, tool in enumerate(request.tools or ()) if _is_clients(tool)]
    return Conversation(
        messages=messages,
        sampling=sampling_of(request, request.max_completion_tokens or request.max_tokens, request.stop),
        tools=tools,
        choice=choice_of(request.tool_choice, [tool.name for tool in tools]),
        parallel=request.parallel_tool_calls,
        thinking=thinking,
        effort=effort if isinstance(effort, str) else None,
        template=template,
        continued=request.continue_final_message and messages[-1].role == "assistant",
        format=format_of(request.response_format, "response_format")
        or (regex(request.regex) if request.regex is not None else None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        cache_salt=request.cache_salt,
    )


def messages_of(given: list[Any]) -> list[Message]:
    """Return the turns of a conversation."""
    if not given:
        raise Refusal("there is no message to answer", param="messages")
    roles = [message.get("role") if isinstance(message, dict) else None for message in given]
    past = last_user_turn([str(role) for role in roles])
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


def choice_of(given: str | dict[str, Any] | None, tools: list[str]) -> ToolChoice:
    """Return the tool choice in OpenAI's form."""
    if isinstance(given, dict):
        if given.get("type") == "allowed_tools":
            raise Refusal("tool_choice cannot name allowed_tools: send only these tools", param="tool_choice")
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise Refusal("tool_choice must name a function", param="tool_choice")
        return named_choice(name, tools)
    if given not in (None, "auto", "none", "required"):
        raise Refusal(f"tool_choice is {given!r:.40}; auto, none, required or a function is read", param="tool_choice")
    if given == "required" and not tools:
        raise Refusal("tool_choice is required, and there are no tools", param="tool_choice")
    return ToolChoice(given or "auto")  # type: ignore[arg-type]  # compared above


def named_choice(name: str, tools: list[str]) -> ToolChoice:
    """Return the choice that forces one tool."""
    if name not in tools:
        raise Refusal(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return ToolChoice("required", name)


def _is_clients(tool: Any) -> bool:
    """Return False for a tool that the server would have to run, such as a web search."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind in (None, "function", "custom") or not isinstance(kind, str)


def _tool(tool: Any, number: int) -> Any:
    if not isinstance(tool, dict):
        raise Refusal(f"tools.{number}: Input should be an object", param="tools")
    return function_tool(tool.get("function"), f"tools.{number}.function")


def _message(given: Any, at: int, past: bool) -> Message:
    if not isinstance(given, dict):
        raise Refusal("messages and their parts must be objects", param="messages")
    role = _ROLES.get(given.get("role", ""))
    if role is None:
        raise Refusal(f"messages.{at}.role is {given.get('role')!r:.40}", param="messages")
    if role == "user" and given.get("content") is None:
        raise Refusal(f"messages.{at}.content is missing", param="messages")
    past = past or role != "user"
    message = Message(role, contents(given.get("content"), lambda part: _part(part, past)))  # type: ignore[arg-type]
    if isinstance(given.get("name"), str):
        message.name = given["name"]
    if role == "assistant":
        thinking = given.get("reasoning_content") or given.get("reasoning")
        message.thinking = thinking if isinstance(thinking, str) else ""
        for one in given.get("tool_calls") or ():
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                raise Refusal("a tool call must have a function", param="messages")
            message.calls.append(call({**function, "id": one.get("id")}, function.get("arguments") or ""))
    if role == "tool":
        message.call_id = str(given.get("tool_call_id") or "")
    return message


def _part(part: Any, past: bool) -> Part | None:
    match type_of(part):
        case "text" | "input_text":
            return Text(text_of(part))
        case "refusal":
            return Text(text_of(part, "refusal"))
        case "image_url" | "input_image":
            return picture(only_source(part, part.get("image_url")))
        case "item_reference":
            raise Refusal("this server stores no items, so an item_reference has none: send the items themselves")
    if past:
        return Text(f"{line_for(part)}\n")
    return unreadable(part, past)


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


class ChatWriter:
    """Writes chat completions. prompt: its token ids, for a client that asked for them."""

    def __init__(self, server: Answerer, request: ChatRequest, past_calls: int, prompt: list[int]) -> None:
        self._server, self._request, self._past, self._prompt = server, request, past_calls, prompt
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": server.model}
        self._choices = [_Choice() for _ in range(request.n)]
        self._with_usage = bool((request.stream_options or {}).get("include_usage"))
        self._usage = Usage()

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
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return sse(chunk)

    def finish(self) -> bytes:
        end = b"data: [DONE]\n\n"
        if not self._with_usage:
            return end
        last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(self._usage)}
        return sse(last | self._extension()) + end

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(at, choice) for at, choice in enumerate(self._choices)]
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(self._usage)}
        return answer | self._extension()

    def _extension(self) -> dict[str, Any]:
        asked = self._request.return_spec_tokens_details
        return {"sglext": {"spec_tokens_details": spec_details(self._choices[0].end)}} if asked else {}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, thinking = "".join(choice.content), "".join(choice.thinking)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.calls else "")}
        message["reasoning_content"] = thinking or None
        message["tool_calls"] = choice.calls or None
        assert choice.end is not None
        made: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.end.reason}
        made["logprobs"] = {"content": choice.logprobs} if self._request.logprobs else None
        return made | token_ids(self._request, self._prompt, choice.ids, choice.end)

    def failed(self, body: bytes, message: str, code: str) -> bytes:
        return b"data: %b\n\ndata: [DONE]\n\n" % body


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

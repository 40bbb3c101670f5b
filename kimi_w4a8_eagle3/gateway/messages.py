"""/v1/messages: Anthropic's API, and its count_tokens."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from . import parts
from .answer import Arguments, Called, CallEnd, Said, Thought
from .calls import object_in
from .chat import check_results, named_choice
from .conversation import Conversation, Message, Sampling, Text, Tool, ToolChoice
from .errors import Refusal
from .formats import format_of
from .generate import Delta, End
from .requests import CountRequest, MessagesRequest, sampling_of
from .sealed import Seal
from .writer import Answerer, named

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def conversation_of(request: MessagesRequest | CountRequest, seal: Seal) -> Conversation:
    """Return the conversation that a request asks to continue, or to count."""
    messages = _system(request.system) + _messages(request.messages, seal)
    tools = [
        _tool(tool, f"tools.{number}")
        for number, tool in enumerate(request.tools or ())
        if parts.is_clients(tool, f"tools.{number}", "custom")
    ]
    config = request.output_config or {}
    conversation = Conversation(
        messages=messages,
        sampling=Sampling(),
        tools=tools,
        choice=_choice(request.tool_choice, [tool.name for tool in tools]),
        parallel=not (request.tool_choice or {}).get("disable_parallel_tool_use", False),
        **parts.thinking_of(request, "max" if config.get("effort") == "xhigh" else config.get("effort")),
        format=format_of(config.get("format"), "output_config.format"),
    )
    if isinstance(request, MessagesRequest):
        conversation.sampling = sampling_of(request, request.max_tokens, request.stop_sequences, "stop_sequences")
    return conversation


def _system(given: str | list[Any] | None) -> list[Message]:
    if isinstance(given, list):
        texts = [parts.text_of(block) for block in given if parts.type_of(block) == "text" and block.get("text")]
        given = "\n".join(texts)
    return [Message("system", given)] if given and given.strip() else []


def _messages(given: list[Any], seal: Seal) -> list[Message]:
    if not given:
        raise Refusal("there is no message to answer", param="messages")
    roles = [str(message.get("role")) if isinstance(message, dict) else "" for message in given]
    if roles[-1] == "assistant":
        why = "this model does not support assistant message prefill: the conversation must end with a user message"
        raise Refusal(why, param="messages")
    past = parts.last_user_turn(roles)
    messages: list[Message] = []
    for at, message in enumerate(given):
        if roles[at] not in ("user", "assistant", "system"):
            raise Refusal(f"messages.{at}.role is {roles[at]!r:.40}", param="messages")
        content = message.get("content")
        if isinstance(content, str):
            messages.append(Message(roles[at], content))  # type: ignore[arg-type]  # compared above
        elif roles[at] == "assistant":
            messages.append(_said(content, seal))
        else:
            messages += _turn(roles[at], content, at < past)
    check_results(messages)
    return messages


def _said(blocks: Any, seal: Seal) -> Message:
    """Return an assistant's turn."""
    message, said, thinking = Message("assistant"), list[parts.Part](), list[str]()
    for block in blocks if isinstance(blocks, list) else ():
        match parts.type_of(block):
            case "thinking":
                text = block.get("thinking") or seal.open(block.get("signature"))
                thinking += [text] if isinstance(text, str) else []
            case "redacted_thinking":
                thinking.append(parts.line_for(block))
            case "tool_use":
                message.calls.append(parts.call(block, orjson.dumps(block.get("input") or {}).decode()))
            case "text":
                said.append(Text(parts.text_of(block)))
            case "tool_result":
                raise Refusal("a tool_result belongs into the user's message", param="messages")
            case _:
                said.append(parts.unreadable(block, past=True))
    message.thinking, message.content = "\n".join(thinking), parts.flat(said) if said else ""
    return message


def _turn(role: str, blocks: Any, past: bool) -> list[Message]:
    """Return a user's turn: the results of tools are messages of their own, in their place."""
    messages: list[Message] = []
    said: list[parts.Part] = []

    def close() -> None:
        if said:
            messages.append(Message(role, parts.flat(list(said))))  # type: ignore[arg-type]  # the caller compared it
            said.clear()

    for block in blocks if isinstance(blocks, list) else [blocks]:
        if parts.type_of(block) != "tool_result":
            said.append(_part(block, past))
            continue
        close()
        content = parts.contents(block.get("content"), lambda part: _part(part, True))
        if not isinstance(content, str) and all(isinstance(part, Text) for part in content):
            content = "\n".join(part.text for part in content if isinstance(part, Text))
        content = parts.failed(content) if block.get("is_error") is True else parts.flat(content)
        messages.append(Message("tool", content, call_id=str(block.get("tool_use_id") or block.get("id") or "")))
    close()
    return messages


def _part(block: Any, past: bool) -> parts.Part:
    source = block.get("source") if isinstance(block, dict) else None
    match parts.type_of(block):
        case "text":
            return Text(parts.text_of(block))
        case "image":
            if isinstance(source, dict) and source.get("type") == "base64" and set(source) <= {
                "type", "media_type", "data",
            }:  # fmt: skip
                return parts.picture(f"data:{source.get('media_type')};base64,{source.get('data')}")
            return parts.picture(parts.only_source(block, source))
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            return Text(f"{source.get('data')}\n")
        case "search_result":
            return Text(_search_result(block))
        case "tool_reference":
            return Text(str(block.get("tool_name") or block.get("name") or ""))
    return parts.unreadable(block, past)


def _search_result(block: dict[str, Any]) -> str:
    found = [part["text"] for part in block.get("content") or () if isinstance(part, dict) and part.get("text")]
    lines = [f"Title: {block['title']}"] if block.get("title") else []
    lines += [f"Source: {block['source']}"] if isinstance(block.get("source"), str) else []
    return "\n".join([*lines, *(["Content: " + "\n".join(found)] if found else [])])


def _tool(tool: dict[str, Any], place: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise Refusal("the body is not what this endpoint reads (the type of a tool)", param="tools")
    declared = {**tool, "parameters": tool.get("input_schema"), "description": tool.get("description") or ""}
    return parts.function_tool(declared, place)


def _choice(given: dict[str, Any] | None, tools: list[str]) -> ToolChoice:
    match (given or {}).get("type", "auto"):
        case "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "any" if tools:
            return ToolChoice("required")
        case "tool" if tools:
            return named_choice(str((given or {}).get("name")), tools)
        case "any" | "tool":
            raise Refusal("tool_choice forces a tool, and the request has none that the client runs")
    raise Refusal(f"tool_choice.type is {(given or {}).get('type')!r:.40}", param="tool_choice")


class MessagesWriter:
    """Writes Anthropic's messages. A stream has each block's beginning, deltas and end."""

    def __init__(self, server: Answerer, seal: Seal, prompt_tokens: int) -> None:
        self._server, self._seal, self._prompt_tokens = server, seal, prompt_tokens
        self.id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the last block, while it is written
        self._texts: list[str] = []  # of it
        self._end: End | None = None

    def begin(self) -> bytes:
        message: dict[str, Any] = {
            "id": self.id, "type": "message", "role": "assistant", "model": self._server.model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }  # fmt: skip
        return named({"type": "message_start", "message": message}) + named({"type": "ping"})

    def delta(self, delta: Delta) -> bytes:
        events = b"".join(self._piece(piece) for piece in delta.pieces)
        if delta.end is not None:
            self._end = delta.end
            events += self._close()
        return events

    def _piece(self, piece: object) -> bytes:
        match piece:
            case Thought(text):
                return self._text("thinking", "thinking", "thinking_delta", text)
            case Said(text):
                return self._text("text", "text", "text_delta", text)
            case Called(_, name):
                block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
                return self._close() + self._begin(block)
            case Arguments(_, text):
                self._texts.append(text)
                return self._changed({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return self._close()
        raise AssertionError(piece)

    def _text(self, kind: str, name: str, delta: str, text: str) -> bytes:
        events = b""
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._close() + self._begin({"type": kind, name: "", **signature})
        self._texts.append(text)
        return events + self._changed({"type": delta, name: text})

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._blocks.append(dict(block))
        self._open, self._texts = block["type"], []
        return named({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})

    def _changed(self, delta: dict[str, Any]) -> bytes:
        return named({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        block, text, events = self._blocks[-1], "".join(self._texts), b""
        match self._open:
            case "thinking":
                block |= {"thinking": text, "signature": self._seal.seal(text)}
                events = self._changed({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                block["text"] = text
            case "tool_use":
                given = object_in(text)
                block["input"] = f"{block['name']} {text}" if given is None else given
        self._open = None
        return events + named({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def finish(self) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": self._stop()}
        changed = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return named(changed) + named({"type": "message_stop"})

    def whole(self) -> dict[str, Any]:
        content = [block for block in self._blocks if block["type"] != "tool_use" or isinstance(block["input"], dict)]
        broken = [block["input"] for block in self._blocks if block["type"] == "tool_use" and block not in content]
        if broken:  # calls whose input is no object are text: no client reads them otherwise
            said = next((block for block in content if block["type"] == "text"), None)
            text = "\n".join([*([said["text"]] if said else []), *broken])
            if said:
                said["text"] = text
            else:
                after = sum(block["type"] == "thinking" for block in content)
                content.insert(after, {"type": "text", "text": text})
        reason = self._reason()
        if reason == "tool_use" and not any(block["type"] == "tool_use" for block in content):
            reason = "end_turn"
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._server.model, "content": content,
            "stop_reason": reason, "stop_sequence": self._stop(), "usage": self._usage(),
        }  # fmt: skip

    def _reason(self) -> str:
        assert self._end is not None
        return "stop_sequence" if self._end.stop is not None else _REASONS[self._end.reason]

    def _stop(self) -> str | None:
        return self._end.stop if self._end is not None else None

    def _usage(self) -> dict[str, int]:
        assert self._end is not None
        usage = self._end.usage
        cached = {"cache_read_input_tokens": usage.cached} if usage.cached else {}
        return {"input_tokens": usage.prompt - usage.cached, **cached, "output_tokens": usage.answer}

    def failed(self, body: bytes, message: str, code: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % body

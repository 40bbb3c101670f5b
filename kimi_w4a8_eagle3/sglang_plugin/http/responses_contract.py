"""Contract of /v1/responses with its clients: groups of tools, calls that were cut, nothing stored, the token limit.

Codex groups tools in a `namespace`, and resolves a call by its namespace and name. SGLang renders such groups for two
other models only. Here the model sees one function for each member, and the client gets namespace and name back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from sglang.srt.entrypoints.openai import protocol

from ...door.answers import CONTEXT_EXCEEDED, OVERFLOW
from ...gateway.calls import flat_name
from ...gateway.reader import is_json
from ..hooks import Feature, Hook
from .sealed_thinking import sealed, unsealed

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

_PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
_MODULE = "sglang.srt.entrypoints.openai.serving_responses"
_SERVING = f"{_MODULE}.OpenAIServingResponses"
_CALL = "function_call"
_COMPLETED = "response.completed"
_FAILED = "response.failed"
_STOPPED = {"reason": "stop"}
_NOT_STORED = "this server stores no responses: send `store: false` and the whole conversation each time"
FEATURE = Feature(
    "calls on /v1/responses",
    needs=(f"{_PROTOCOL}.Tool", f"{_PROTOCOL}.Function"),
    remove_when=(
        "SGLang serves and forces namespaces for Kimi, reports cut calls as such, keeps max_output_tokens, refuses "
        "what it does not store, and authenticates encrypted_content"
    ),
    hooks=[  # of `encrypted_content`
        Hook(f"{_MODULE}.encode_reasoning_state", "replace", sealed),
        Hook(f"{_MODULE}.decode_reasoning_state", "replace", unsealed),
    ],
)
Names = Mapping[str, tuple[str, dict[str, Any]]]


@FEATURE.after(f"{_SERVING}._response_tools_to_chat_tools")
def declare_members(tools: list[Any], *args: Any) -> None:
    """Show the model the functions of namespaces."""
    shown = {tool.function.name for tool in tools}
    for name, (_, member) in _members(args[-1]).items():
        if name not in shown:
            keys = ("description", "parameters", "strict")
            function = protocol.Function(name=name, **{key: member[key] for key in keys if key in member})
            tools.append(protocol.Tool(type="function", function=function))


class ForcedMember(str):
    """The choice `required`, with the function that stands for the member. SGLang knows names of plain tools only."""

    __slots__ = ("name",)
    name: str


@FEATURE.around(f"{_PROTOCOL}.ResponsesRequest.effective_tool_choice")
def choose_member(original: Callable[..., Any], request: ResponsesRequest) -> Any:
    """Accept a `tool_choice` that names a member, by its namespace or by a name that no other tool has."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return original(request)
    name = choice.get("name") or (choice.get("function") or {}).get("name")
    members = _members(request)
    if namespace := choice.get("namespace"):
        found = [flat_name(str(namespace), str(name))]
    elif any(tool.name == name for tool in request.tools):
        found = []
    else:
        found = [flat for flat, (_, member) in members.items() if name in (flat, member["name"])]
    if len(found) != 1 or found[0] not in members:
        return original(request)
    forced = ForcedMember("required")
    forced.name = found[0]
    return forced


@FEATURE.around(f"{_SERVING}._chat_tool_choice")
def force_member(original: Callable[[Any], Any], choice: Any) -> Any:
    """Force the function that stands for the member."""
    return original({"type": "function", "name": choice.name} if isinstance(choice, ForcedMember) else choice)


@FEATURE.around(f"{_SERVING}.responses_full_generator")
async def finish_whole(
    original: Callable[..., Coroutine[Any, Any, Any]],
    serving: object,
    request: ResponsesRequest,
    *args: Any,
    **named: Any,
) -> Any:
    """Correct the calls of a whole answer."""
    answer = await original(serving, request, *args, **named)
    names = _members(request)
    for item in getattr(answer, "output", ()):
        if item.type == _CALL:
            for key, value in _corrected(item.model_dump(), names).items():
                setattr(item, key, value)
    if getattr(answer, "status", None) == "completed" and _cut_by_stop(request, answer.model_dump()["output"]):
        answer.status, answer.incomplete_details = "incomplete", dict(_STOPPED)
    return answer


@FEATURE.around(f"{_SERVING}.responses_stream_generator_non_harmony")
async def finish_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    serving: object,
    request: ResponsesRequest,
    *args: Any,
    **named: Any,
) -> AsyncGenerator[str, None]:
    """Correct the calls in the events of a stream."""
    names = _members(request)
    async for event in original(serving, request, *args, **named):
        is_corrected = f'"{_CALL}' in event or f".{_CALL}" in event or _FAILED in event
        yield _corrected_event(event, names, request) if is_corrected else event


@FEATURE.around(f"{_SERVING}.create_responses")
async def store_nothing(
    original: Callable[..., Awaitable[object]],
    serving: OpenAIServingResponses,
    request: ResponsesRequest,
    *args: object,
    **named: object,
) -> object:
    """Refuse `store: true` where nothing is stored, in the first turn. SGLang refuses the second one."""
    if not serving.enable_response_store:
        if request.store and "store" in request.model_fields_set:
            return serving.create_error_response(_NOT_STORED, param="store")
        request.store = False
    return await original(serving, request, *args, **named)


@FEATURE.around(f"{_PROTOCOL}.ResponsesRequest.is_include_encrypted_reasoning")
def always_seal(original: Callable[..., bool], request: ResponsesRequest) -> bool:
    """Give `encrypted_content` wherever nothing is stored: the AI SDK asks for it only with OpenAI's models."""
    return not request.store or original(request)


@FEATURE.after(f"{_SERVING}._merge_consecutive_assistant_messages")
def keep_instructions_apart(messages: list[Any], *args: object) -> list[Any]:
    """Keep a system message where it is, as on the other APIs. SGLang 0.5.20 joins all that are dicts at the top."""
    return [protocol.ChatCompletionMessageGenericParam(**one) if one["role"] == "system" else one for one in messages]


@FEATURE.after(f"{_PROTOCOL}.ResponsesRequest.to_sampling_params")
def keep_limit(
    params: dict[str, Any], request: ResponsesRequest, default_max_tokens: int | None = None, *args: Any, **named: Any
) -> None:
    """Let an answer have all tokens that the client allows. SGLang takes two off, so 1 was refused."""
    if request.max_output_tokens is not None:
        room = request.max_output_tokens if default_max_tokens is None else default_max_tokens - 2
        params["max_new_tokens"] = min(request.max_output_tokens, room)


def _members(request: ResponsesRequest) -> Names:
    """Return the functions in the request's namespaces, with their namespace, by the names that the model sees."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    declared = {tool.name for tool in request.tools or ()}
    for tool in request.tools or ():
        for member in (tool.tools or ()) if tool.type == "namespace" and tool.name else ():
            name = flat_name(tool.name, str(member.get("name")))
            if member.get("name") and name not in declared:
                found.setdefault(name, (tool.name, member))
    return found


def _corrected(call: dict[str, Any], names: Names) -> dict[str, Any]:
    if call.get("status") == "completed" and not is_json(call["arguments"]):
        call["status"] = "incomplete"
    if found := names.get(call.get("name", "")):
        call["namespace"], call["name"] = found[0], found[1]["name"]
    return call


def _cut_by_stop(request: ResponsesRequest, output: list[dict[str, Any]]) -> bool:
    """Return True if a stop string of the request cut the last call. A model that writes no JSON may try again."""
    return bool(request.stop and output and output[-1]["type"] == _CALL and output[-1]["status"] == "incomplete")


def _corrected_event(event: str, names: Names, request: ResponsesRequest) -> str:
    head, _, data = event.partition("data: ")
    payload = orjson.loads(data)
    calls = [payload.get("item"), *(payload.get("response") or {}).get("output", ())]
    for call in calls:
        if call and call.get("type") == _CALL:
            _corrected(call, names)
    if found := names.get(payload.get("name") or ""):  # of the event that ends a call's arguments
        payload["name"] = found[1]["name"]
    if payload["type"] == _FAILED and OVERFLOW.search((payload["response"].get("error") or {}).get("message") or ""):
        payload["response"]["error"]["code"] = CONTEXT_EXCEEDED
    if payload["type"] == _COMPLETED and _cut_by_stop(request, payload["response"]["output"]):
        payload["type"] = "response.incomplete"
        payload["response"] |= {"status": "incomplete", "incomplete_details": _STOPPED}
        head = head.replace(_COMPLETED, payload["type"])
    return f"{head}data: {orjson.dumps(payload).decode()}\n\n"

"""What a request body may hold: checked on the parsed JSON, before SGLang builds anything from it.

Two kinds of rules. Fields: of those that SGLang knows, the ones listed here; the rest belongs to operators (sessions,
adapters, disaggregation, pickled logit processors) or to SGLang itself, and a release that adds one does not open it.
Names that SGLang does not know are ignored by it and pass. Values: what was seen to stop or to stall SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..door_settings import DoorSettings
from .door_access import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, MESSAGES, RESPONSES, TOKENIZE


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAMPLING = _names(
    """
    temperature top_p top_k min_p n stop stop_token_ids stop_regex frequency_penalty presence_penalty
    repetition_penalty logit_bias ignore_eos skip_special_tokens no_stop_trim json_schema regex structural_tag
    """
)
_OPENAI = _SAMPLING | _names(
    """
    model stream stream_options user seed max_tokens min_tokens logprobs response_format return_token_ids
    return_spec_tokens_details return_cached_tokens_details cache_salt extra_key
    """
)
# Fields of each endpoint, of those that SGLang knows, which a client may set.
ALLOWED: dict[str, frozenset[str]] = {
    CHAT: _OPENAI
    | _names(
        """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
    thinking separate_reasoning stream_reasoning chat_template_kwargs continue_final_message
    return_prompt_token_ids return_meta_info
    """
    ),
    COMPLETIONS: _OPENAI | _names("prompt best_of echo suffix"),
    GENERATE: _names(
        """
    text input_ids sampling_params stream return_logprob logprob_start_len top_logprobs_num token_ids_logprob
    return_text_in_logprobs return_prompt_token_ids log_metrics cache_salt extra_key image_data modalities
    """
    ),
    RESPONSES: _names(
        """
    input model instructions max_output_tokens metadata parallel_tool_calls previous_response_id reasoning
    service_tier store stream temperature text tool_choice tools top_logprobs top_p truncation user include
    frequency_penalty presence_penalty stop top_k min_p repetition_penalty chat_template_kwargs cache_salt
    extra_key max_tool_calls
    """
    ),
}
ALLOWED_SAMPLING = _SAMPLING | _names(
    "max_new_tokens min_new_tokens sampling_seed spaces_between_special_tokens stream_interval"
)
_TEMPLATE_SWITCHES = _names("thinking enable_thinking preserve_thinking reasoning_effort")

_MAX_DEPTH = 48  # of nested arrays and objects: SGLang, pydantic and xgrammar recurse into them
_MAX_GRAMMAR_BYTES = 65536  # of a schema, a pattern: SGLang compiles it in the scheduler's process
_MAX_LIST = 4096  # stop token ids, logit biases, tools
_MAX_LABEL = 1024
# No tokenizer needs more of this on average; longer text is refused before the tokenizer, which runs in the process
# that serves everybody, spends seconds on it.
_CHARACTERS_PER_TOKEN = 16
_MAX_TOP_LOGPROBS = 128

_TEXT_PARTS = _names(
    """
    text input_text output_text refusal thinking redacted_thinking reasoning tool_use tool_result
    tool_reference summary_text function_call function_call_output message
    """
)
_MEDIA_PARTS = _names("image_url image input_image video_url")
_MEDIA_KEYS = _names("url image_url video_url audio_url file_url image video audio data file file_id")


class Refusal(Exception):
    """A request that is answered at the door with `status`; `param` names the field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param


@dataclass(frozen=True)
class ModelLimits:
    """What the engine takes: tokens of context; whether it fetches media, from domains that the operator listed."""

    context: int
    remote_media: bool = False


@dataclass(frozen=True)
class RequestRules:
    """Checks bodies of the endpoints in `door_access.CHECKED`.

    known: for each endpoint the fields that this SGLang release reads; `sampling_params` those inside of /generate's.
    """

    settings: DoorSettings
    known: Mapping[str, frozenset[str]]
    model: ModelLimits

    def check(self, path: str, headers: Mapping[bytes, bytes], raw: bytes) -> None:
        """Raise Refusal when SGLang must not see this body."""
        if b"x-body-compressed" in headers:
            raise Refusal("compressed bodies are not read here", status=415)
        body = _parse(raw)
        _check_depth(body, _MAX_DEPTH)
        self._check_fields(path, body)
        {
            CHAT: self._check_chat,
            COMPLETIONS: self._check_completion,
            GENERATE: self._check_generate,
            MESSAGES: self._check_messages,
            COUNT_TOKENS: self._check_messages,
            RESPONSES: self._check_responses,
            **dict.fromkeys(TOKENIZE, self._check_tokenize),
            **dict.fromkeys(DETOKENIZE, self._check_detokenize),
        }[path](body)

    def _check_fields(self, path: str, body: Mapping[str, Any]) -> None:
        _refuse_closed(body, self.known.get(path, frozenset()), ALLOWED.get(path))

    def _check_chat(self, body: Mapping[str, Any]) -> None:
        self._check_media(body.get("messages"), "messages")
        self._check_length([body.get("messages"), body.get("tools")], "messages")
        self._check_openai(body, prompts=1)

    def _check_completion(self, body: Mapping[str, Any]) -> None:
        prompt = body.get("prompt")
        self._check_openai(body, self._check_prompts(prompt, "prompt"))

    def _check_generate(self, body: Mapping[str, Any]) -> None:
        prompts = max(self._check_prompts(body.get(name), name) for name in ("text", "input_ids"))
        for image in _leaves(body.get("image_data")):
            self._check_media_source(image, "image_data")
        params = body.get("sampling_params")
        sets = params if isinstance(params, list) else [params]
        _at_most(sets, self.settings.max_sequences, "sampling_params")
        if isinstance(params, list) and (not params or not _many(body.get("text") or body.get("input_ids"))):
            raise Refusal("a list of sampling_params goes with a list of prompts", param="sampling_params")
        for each in sets:
            if isinstance(each, dict):
                _refuse_closed(each, self.known.get("sampling_params", frozenset()), ALLOWED_SAMPLING)
                self._check_sampling(each, prompts)
        _check_logprobs(body.get("top_logprobs_num"), "top_logprobs_num")
        _at_most(body.get("token_ids_logprob"), _MAX_LIST, "token_ids_logprob")

    def _check_messages(self, body: Mapping[str, Any]) -> None:
        self._check_media(body.get("messages"), "messages")
        self._check_media([{"content": body.get("system")}], "system")
        self._check_length([body.get("messages"), body.get("system"), body.get("tools")], "messages")
        _check_tools(body.get("tools"))

    def _check_responses(self, body: Mapping[str, Any]) -> None:
        self._check_media(body.get("input"), "input")
        self._check_length([body.get("input"), body.get("instructions"), body.get("tools")], "input")
        _check_tools(body.get("tools"))
        for tool in body.get("tools") or ():
            if tool.get("type") not in (None, "function"):
                raise Refusal("tools that the server itself calls are not offered", param="tools")
        self._check_openai(body, prompts=1)

    def _check_tokenize(self, body: Mapping[str, Any]) -> None:
        if body.get("stream"):  # unknown names reach SGLang's chat form here, and this one makes it answer 501
            raise Refusal("tokens are not streamed", param="stream")
        self._check_media(body.get("messages"), "messages")
        self._check_length([body.get("messages"), body.get("tools")], "messages")
        self._check_prompts(body.get("prompt"), "prompt")
        _check_template_switches(body)

    def _check_detokenize(self, body: Mapping[str, Any]) -> None:
        tokens = body.get("tokens")
        self._check_prompts(tokens, "tokens")
        for token in _leaves(tokens):
            if not isinstance(token, int) or not 0 <= token < 2**31:
                raise Refusal("tokens are numbers of the vocabulary", param="tokens")

    def _check_openai(self, body: Mapping[str, Any], prompts: int) -> None:
        _check_template_switches(body)
        if not isinstance(body.get("response_format"), dict | None):
            raise Refusal("response_format is an object", param="response_format")
        _check_grammar(body.get("response_format"), "response_format")
        _check_grammar(body.get("tools"), "tools")
        _check_grammar(body.get("text"), "text")
        _check_tools(body.get("tools"))
        for name in ("logprobs", "top_logprobs"):
            _check_logprobs(body.get(name), name)
        for name in ("user", "cache_salt", "extra_key"):
            if isinstance(body.get(name), str) and len(body[name]) > _MAX_LABEL:
                raise Refusal(f"{name} is longer than {_MAX_LABEL} characters", param=name)
        self._check_sampling(body, prompts)

    def _check_sampling(self, params: Mapping[str, Any], prompts: int) -> None:
        n = params.get("n")
        if n is not None and not (_is_integer(n) and n >= 1):
            raise Refusal(f"n must be a whole number of at least 1, got {n!r:.40}", param="n")
        if prompts * (n or 1) > self.settings.max_sequences:
            raise Refusal(
                f"one request may ask for {self.settings.max_sequences} sequences (prompts times n), "
                f"this one asks for {prompts * (n or 1)}",
                param="n",
            )
        for name in ("stop_token_ids", "logit_bias"):
            _at_most(params.get(name), _MAX_LIST, name)
        for name in ("json_schema", "regex", "structural_tag"):
            _check_grammar(params.get(name), name)

    def _check_prompts(self, prompt: Any, name: str) -> int:
        """The number of prompts in a field that holds one prompt or a list of them, as text or as token ids."""
        if prompt is None:
            return 0
        prompts = prompt if _many(prompt) else [prompt]
        _at_most(prompts, self.settings.max_sequences, name)
        for each in prompts:
            self._check_length([each], name)
        return len(prompts)

    def _check_length(self, parts: Iterable[Any], name: str) -> None:
        """A first, cheap check; `request_guard` counts the tokens."""
        limit = self.settings.max_prompt_tokens or self.model.context
        characters = tokens = 0
        for part in parts:
            if isinstance(part, list) and part and isinstance(part[0], int):
                tokens += len(part)
                continue
            characters += sum(len(leaf) for leaf in _leaves(part) if _is_text(leaf))
        if max(tokens, characters // _CHARACTERS_PER_TOKEN) > limit:
            raise Refusal(f"the prompt is longer than {limit} tokens", param=name)

    def _check_media(self, messages: Any, name: str) -> None:
        for part in _parts(messages):
            kind = part.get("type")
            if kind in _TEXT_PARTS or (kind is None and "role" in part):
                continue
            if kind not in _MEDIA_PARTS:
                raise Refusal(f"content of type {kind!r:.40} is not read here", param=name)
            for source in _media_sources(part):
                self._check_media_source(source, name)

    def _check_media_source(self, source: Any, name: str) -> None:
        if isinstance(source, str) and source.startswith("data:"):
            return
        if self.model.remote_media and isinstance(source, str) and source.startswith(("http://", "https://")):
            return  # SGLang holds it, and every redirect, to --allowed-media-domains
        raise Refusal(
            "the server fetches no media, neither from the network nor from files; send a data: URL", param=name
        )


def sglang_fields() -> dict[str, frozenset[str]]:
    """The fields that the installed SGLang reads from each endpoint's body."""
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {
        CHAT: frozenset(protocol.ChatCompletionRequest.model_fields),
        COMPLETIONS: frozenset(protocol.CompletionRequest.model_fields),
        RESPONSES: frozenset(protocol.ResponsesRequest.model_fields),
        GENERATE: frozenset(GenerateReqInput.__dataclass_fields__),
        "sampling_params": frozenset(SamplingParams.__struct_fields__),
    }


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object")
    return body


def _refuse_closed(given: Mapping[str, Any], known: frozenset[str], allowed: frozenset[str] | None) -> None:
    """Fields at null, false, 0 or "" pass: load generators send whole forms of them. An empty list is a value."""
    if allowed is None:
        return
    for name, value in given.items():
        if name in known and name not in allowed and value not in (None, False, 0, ""):
            raise Refusal(f"{name} is not for clients of this server", param=name)


def _check_depth(value: Any, left: int) -> None:
    level = [value]
    while level:
        if left == 0:
            raise Refusal(f"the body nests more than {_MAX_DEPTH} arrays and objects")
        left -= 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict) or (isinstance(inner, list) and inner and not isinstance(inner[0], int))
        ]


def _check_grammar(grammar: Any, name: str) -> None:
    if grammar is None:
        return
    size = len(grammar) if isinstance(grammar, str) else len(orjson.dumps(grammar))
    if size > _MAX_GRAMMAR_BYTES:
        raise Refusal(f"{name} is larger than {_MAX_GRAMMAR_BYTES} bytes", param=name)


def _check_tools(tools: Any) -> None:
    """A list of objects with a type in words: SGLang takes them apart before it looks what they are."""
    _at_most(tools, _MAX_LIST, "tools")
    if tools is not None and not (
        isinstance(tools, list)
        and all(isinstance(tool, dict) and isinstance(tool.get("type"), str | None) for tool in tools)
    ):
        raise Refusal("tools is a list of objects, each with a type", param="tools")


def _check_template_switches(body: Mapping[str, Any]) -> None:
    """SGLang hands these on as keyword arguments beside its own."""
    given = body.get("chat_template_kwargs")
    for name in given if isinstance(given, dict) else ():
        if name not in _TEMPLATE_SWITCHES:
            raise Refusal(
                f"chat_template_kwargs may hold {', '.join(sorted(_TEMPLATE_SWITCHES))}, not {name!r:.60}",
                param="chat_template_kwargs",
            )


def _check_logprobs(value: Any, name: str) -> None:
    for each in value if isinstance(value, list) else [value]:
        if _is_integer(each) and not 0 <= each <= _MAX_TOP_LOGPROBS:
            raise Refusal(f"{name} must be between 0 and {_MAX_TOP_LOGPROBS}", param=name)


def _at_most(values: Any, limit: int, name: str) -> None:
    if isinstance(values, list | dict) and len(values) > limit:
        raise Refusal(f"{name} has {len(values)} entries; at most {limit} are read", param=name)


def _many(prompt: Any) -> bool:
    """True for a list of prompts, false for one prompt as text or as token ids."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("data:")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _leaves(value: Any) -> Iterator[Any]:
    """All values that are no arrays, objects or null, keys of objects left out; without recursion."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
        elif each is not None:
            yield each


def _parts(messages: Any) -> Iterator[dict[str, Any]]:
    """The parts of all messages' contents, and of the contents inside of tool results."""
    waiting = list(messages) if isinstance(messages, list) else []
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if "type" in each:
            yield each
        for name in ("content", "output"):
            if isinstance(each.get(name), list):
                waiting.extend(each[name])
            elif isinstance(each.get(name), dict):
                waiting.append(each[name])


def _media_sources(part: Mapping[str, Any]) -> Iterator[Any]:
    """Where a part's media come from: {"image_url": {"url": ...}}, {"image_url": ...}, {"source": {"url": ...}}."""
    waiting: list[Mapping[str, Any]] = [part]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            elif name in _MEDIA_KEYS:
                yield value

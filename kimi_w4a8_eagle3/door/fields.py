"""Fields of each endpoint's body that reach the engine: a list of what clients need.

All other fields are refused by name. They belong to operators (sessions, adapters, disaggregation, pickled logit
processors) or to SGLang itself. A release that adds a field does not open it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .access import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, MESSAGES, RESPONSES, TOKENIZE
from .answers import Refusal


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Fields:
    """open: fields that reach the engine. dropped: fields of OpenAI's and Anthropic's clients that change no answer."""

    open: frozenset[str]
    dropped: frozenset[str] = frozenset()

    def kept(self, given: Mapping[str, Any], known: frozenset[str], where: str) -> dict[str, Any]:
        """Return the fields of `given` that reach the engine; raise Refusal at a field that is not for clients.

        null always means not sent. A closed field that SGLang has may also be false, 0 or "", because load generators
        send all fields. Neither reaches the engine.
        """
        kept = {}
        for name, value in given.items():
            if name in self.open and value is not None:
                kept[name] = value
            elif value is None or name in self.open or name in self.dropped:
                continue
            elif name not in known:
                raise Refusal(f"{where} has no field {name!r:.60}", param=name[:60])
            elif value not in (False, 0, ""):
                raise Refusal(f"{name} is not for clients of this server", param=name)
        return kept


_SAMPLING = names(
    """
    temperature top_p top_k min_p n stop stop_token_ids frequency_penalty presence_penalty repetition_penalty
    logit_bias ignore_eos skip_special_tokens no_stop_trim regex
    """
)
_OPENAI = _SAMPLING | names(
    """
    model stream stream_options user seed max_tokens min_tokens logprobs response_format return_token_ids
    return_spec_tokens_details return_cached_tokens_details cache_salt extra_key
    """
)
_OPENAI_DROPPED = names(
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity"
)
_MESSAGES = names(
    "model messages system tools tool_choice thinking output_config betas"  # the fields that count as the prompt
)
ENDPOINTS: dict[str, Fields] = {
    CHAT: Fields(
        _OPENAI
        | names(
            """
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning reasoning_effort
    thinking separate_reasoning stream_reasoning chat_template_kwargs continue_final_message
    return_prompt_token_ids return_meta_info
    """
        ),
        _OPENAI_DROPPED,
    ),
    COMPLETIONS: Fields(_OPENAI | names("prompt best_of echo suffix json_schema"), _OPENAI_DROPPED),
    RESPONSES: Fields(
        names(
            """
    input model instructions max_output_tokens metadata parallel_tool_calls previous_response_id reasoning
    service_tier store stream temperature text tool_choice tools top_logprobs top_p truncation user include
    frequency_penalty presence_penalty stop top_k min_p repetition_penalty chat_template_kwargs cache_salt
    extra_key max_tool_calls
    """
        ),
        names("safety_identifier prompt_cache_key prompt_cache_retention stream_options"),
    ),
    MESSAGES: Fields(
        _MESSAGES | names("max_tokens metadata stop_sequences stream temperature top_k top_p"),
        names("service_tier context_management inference_geo cache_control"),
    ),
    COUNT_TOKENS: Fields(_MESSAGES, names("context_management cache_control")),
    GENERATE: Fields(
        names(
            """
    text input_ids sampling_params stream return_logprob logprob_start_len top_logprobs_num token_ids_logprob
    return_text_in_logprobs return_prompt_token_ids log_metrics cache_salt extra_key image_data modalities
    """
        ),
        names("model"),  # sglang-router reads it and passes it on
    ),
    **dict.fromkeys(
        TOKENIZE,
        Fields(
            names(
                """
    model prompt messages tools tool_choice reasoning_effort continue_final_message chat_template_kwargs
    add_special_tokens add_generation_prompt
    """
            )
        ),
    ),
    **dict.fromkeys(DETOKENIZE, Fields(names("model tokens skip_special_tokens"))),
}
# Fields of /generate's sampling_params.
SAMPLING = Fields(
    _SAMPLING
    | names(
        """
    max_new_tokens min_new_tokens sampling_seed spaces_between_special_tokens stream_interval json_schema structural_tag
    """
    )
)
_WITH_STOP_REGEX = (CHAT, COMPLETIONS)


def endpoints(stop_regex: bool) -> dict[str, Fields]:
    """Return the fields of every checked endpoint, with `stop_regex` if the operator opened it."""
    opened = {path: _and_stop_regex(ENDPOINTS[path]) for path in _WITH_STOP_REGEX} if stop_regex else {}
    return {**ENDPOINTS, **opened}


def sampling(stop_regex: bool) -> Fields:
    """Return the fields of /generate's sampling_params."""
    return _and_stop_regex(SAMPLING) if stop_regex else SAMPLING


def _and_stop_regex(fields: Fields) -> Fields:
    return replace(fields, open=fields.open | {"stop_regex"})

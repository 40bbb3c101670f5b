"""The built-in model's chat format. The markers carry the names that Kimi uses."""

IM_END, IM_USER, IM_ASSISTANT, IM_MIDDLE = "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"
THINK_BEGIN, THINK_END = "<think>", "</think>"
CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def chat_text(question: str) -> str:
    """Return the chat template's text of one user turn, up to where the assistant begins to write."""
    return f"{IM_USER}user{IM_MIDDLE}{question}{IM_END}{IM_ASSISTANT}assistant{IM_MIDDLE}{THINK_BEGIN}"

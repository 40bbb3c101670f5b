"""A grammar that waits for the end of thinking: until then the model can neither end its answer nor call a tool.

SGLang holds an answer to its grammar only after thinking. A model that ended while it thought gave no call although
`tool_choice` forced one, and a call inside thinking followed no schema. SGLang has a filter for this time, which
`--enable-strict-thinking` applies to every request. Its list for Kimi has names that are no tokens of Kimi's, and would
forbid the ordinary tokens that spell them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...gateway.reader import CALL_MARKERS
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend

_BACKEND = "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarBackend"
_ENDS = ("<|im_end|>", "[EOS]", "[EOT]")
FEATURE = Feature(
    "answers that cannot end while they think",
    remove_when="SGLang keeps a request with a grammar from ending, or calling, inside its thinking",
)


@FEATURE.after(f"{_BACKEND}.__init__")
def keep_thinking(
    _: None, backend: ReasonerGrammarBackend, grammars: Any, parser: Any, tokenizer: Any, *args: Any, **named: Any
) -> None:
    """Filter the ends of an answer and the markers of calls out of Kimi's thinking, in requests with a grammar."""
    is_kimi = parser.detector.tool_start_token in CALL_MARKERS
    if backend.enable_token_filter or not grammars.is_support_token_filter or not is_kimi:
        return
    encoded = [tokenizer.encode(token, add_special_tokens=False) for token in (*_ENDS, *CALL_MARKERS)]
    backend.think_excluded_token_ids = [ids[0] for ids in encoded if len(ids) == 1]
    backend._token_filter_fn = grammars.set_token_filter
    backend.enable_token_filter = True

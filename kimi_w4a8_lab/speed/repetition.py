"""Repetition within a text. Repeated text is easy to draft, so it flatters speculation.

The measure is the share of word n-grams that occurred earlier in the same text. Prompts of the generator's `random`
dataset come out near 1, natural prose near 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

N = 5
WARN_ABOVE = 0.3

# A word, one character of a script without spaces, or one other character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]")


@dataclass(frozen=True)
class TextRepetition:
    """Shares from 0 to 1, averaged over requests.

    prompt: n-grams seen earlier in the prompt. output: n-grams seen earlier in the prompt or the output.
    """

    prompt: float
    output: float

    @property
    def warning(self) -> str | None:
        """One sentence if the text is easier to draft than text written by people, else None."""
        if max(self.prompt, self.output) <= WARN_ABOVE:
            return None
        return (
            f"the text repeats itself: {self.prompt:.0%} of the prompts' {N}-word sequences occurred before in the "
            f"same prompt, {self.output:.0%} of the outputs' in prompt or output; "
            "its accept length does not apply to other text"
        )


def measure(prompts: Sequence[str], outputs: Sequence[str]) -> TextRepetition:
    pairs = list(zip(prompts, outputs, strict=False))
    return TextRepetition(
        prompt=fmean([repeated_share(prompt) for prompt, _ in pairs] or [0.0]),
        output=fmean([repeated_share(output, after=prompt) for prompt, output in pairs] or [0.0]),
    )


def repeated_share(text: str, after: str = "") -> float:
    """Return the share of n-grams of `text` that occurred earlier in `text` or `after`; 0 for fewer than n words."""
    seen = set(_ngrams(after))
    found = total = 0
    for ngram in _ngrams(text):
        found += ngram in seen
        total += 1
        seen.add(ngram)
    return found / total if total else 0.0


def _ngrams(text: str) -> list[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    return list(zip(*(words[i:] for i in range(N)), strict=False))

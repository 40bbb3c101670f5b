"""Draw the diagrams of the docs: the way of a token through a W4A8 layer, and of a request through the package.

python -m proof.diagrams
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kimi_w4a8_eagle3"
IMAGES = PACKAGE.parent / "docs" / "images"
# In pixels: height of a line, padding of a box, width of a character, length of an arrow.
_LINE, _PAD, _CHAR, _ARROW = 17, 10, 7.2, 28
_STYLE = """<style>
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1c1c1f }
.title { font-weight: bold }
.label { fill: #5c5c66 }
rect { fill: #f4f6fa; stroke: #9aa4b5 }
rect.ours { fill: #e3eefb; stroke: #3f7fc4 }
path { fill: none; stroke: #5c5c66 }
marker path { fill: #5c5c66; stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6e6ea } .label { fill: #a9a9b4 }
rect { fill: #24262c; stroke: #5d6675 } rect.ours { fill: #1b2f47; stroke: #3f7fc4 }
path { stroke: #a9a9b4 } marker path { fill: #a9a9b4 } }
</style>"""
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8Z"/></marker></defs>'
)


@dataclass(frozen=True)
class DiagramBox:
    """A box: its title, lines of text, what flows to the next box, and whether this package's code does it."""

    title: str
    text: tuple[str, ...] = ()
    flows: str = ""
    ours: bool = True


LAYER = (
    DiagramBox("Hidden state", ("from attention, on every GPU",), "bfloat16 [T, 7168]", ours=False),
    DiagramBox(
        "Quantize the tokens",
        ("scale = max|x| / 127 per token", "a8 = round(x / scale)"),
        "int8 [T, 7168], float32 [T]",
    ),
    DiagramBox("Route", ("8 of 384 experts a token", "sort the (token, expert) pairs by expert"), "slots by expert"),
    DiagramBox(
        "Stage 1, per expert",
        (
            "INT4 weights -> INT8 in registers",
            "int8 x int8 matrix instructions, int32 sums",
            "times both scales, SiLU(gate) * up",
        ),
        "float32 [T * 8, 2048 / TP]",
    ),
    DiagramBox("Quantize again", ("one scale per (token, expert)",), "int8 [T * 8, 2048 / TP]"),
    DiagramBox(
        "Stage 2, per expert",
        ("INT4 weights -> INT8 in registers", "int32 sums, times scales and router weight"),
        "rows [T * 8, 7168]",
    ),
    DiagramBox("Sum of a token's 8 rows", ("always in the same order, no atomics",), "bfloat16 [T, 7168]"),
    DiagramBox("All-reduce", ("the GPUs add their shares",), ours=False),
)
REQUEST = (
    DiagramBox("Client", ("OpenAI chat, responses, messages",), "HTTP", ours=False),
    DiagramBox("sglang-router", ("picks the engine that has the prefix",), "HTTP", ours=False),
    DiagramBox(
        "Door: door/", ("key, endpoint, size, fields", "a worker tries pictures and grammars"), "checked request"
    ),
    DiagramBox("SGLang's tokenizer and scheduler", ("template, tokens, prefix cache, batch",), "batch", ours=False),
    DiagramBox("Guards: sglang_plugin/", ("bad tokens and failing requests end alone",), "batch"),
    DiagramBox("EAGLE3 draft", ("proposes 3 tokens",), "4 tokens a request", ours=False),
    DiagramBox("Target: moe/", ("attention by AITER, experts by the W4A8 kernels",), "logits of 4 positions"),
    DiagramBox(
        "Sampling: sampling/",
        ("draws the target's token at each position", "keeps the draft's while they agree"),
        "1 to 4 tokens",
    ),
    DiagramBox("Reader: chat/", ("separates thinking, text and tool calls",), "stream to the client"),
)


def drawn(steps: Sequence[DiagramBox], alt: str) -> str:
    """Return the boxes under each other as SVG, with arrows that say what flows; it follows light and dark mode."""
    width = round(max(len(line) for step in steps for line in (step.title, *step.text)) * _CHAR) + 2 * _PAD
    parts, y = [_STYLE, _HEAD], 4
    for step in steps:
        height = _LINE * (1 + len(step.text)) + _PAD
        kind = ' class="ours"' if step.ours else ""
        parts.append(f'<rect{kind} x="4" y="{y}" width="{width}" height="{height}" rx="5"/>')
        for n, line in enumerate((step.title, *step.text)):
            kind = ' class="title"' if n == 0 else ""
            parts.append(f'<text{kind} x="{4 + _PAD}" y="{y + _LINE * (n + 1)}">{escape(line)}</text>')
        y += height
        if step is not steps[-1]:
            middle = 4 + width // 3
            parts.append(f'<path marker-end="url(#head)" d="M{middle} {y}V{y + _ARROW}"/>')
            parts.append(f'<text class="label" x="{middle + 12}" y="{y + 18}">{escape(step.flows)}</text>')
            y += _ARROW
    size = f'width="{width + 8}" height="{y + 4}" viewBox="0 0 {width + 8} {y + 4}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(alt)}">\n{body}\n</svg>\n'


DIAGRAMS = {
    "moe-layer.svg": (LAYER, "the way of a token through a W4A8 layer"),
    "request.svg": (REQUEST, "the way of a request through the package"),
}


def main() -> None:
    """Write the pictures."""
    for name, (steps, alt) in DIAGRAMS.items():
        (IMAGES / name).write_text(drawn(steps, alt))
        print(IMAGES / name)


if __name__ == "__main__":
    main()

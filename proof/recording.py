"""Record the terminal of `make demo` as a picture that plays: every line appears at the moment it was printed.

python -m proof.recording
"""

from __future__ import annotations

import io
import re
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from .demo import demonstrate

PATH = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
WIDTH = 86
LONGEST_WAIT_S = 1.5  # a reader need not wait for a server to start
_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # rich names a font on another host


class Clock(io.StringIO):
    """A file that notes when each of its lines was finished, in seconds since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.times = time.monotonic(), list[float]()

    def write(self, text: str) -> int:
        self.times += [time.monotonic() - self.began] * text.count("\n")
        return super().write(text)


def played(svg: str, times: list[float]) -> str:
    """Return a terminal's picture that shows its end, as in print, and then line n at `times[n]`, waits shortened."""
    waits = [min(later - earlier, LONGEST_WAIT_S) for earlier, later in pairwise([0.0, *times])]
    shown = [sum(waits[: n + 1]) for n in range(len(waits))]
    rules = "".join(f'[clip-path$="-line-{n})"] {{ animation: line {at:.2f}s 2s }}\n' for n, at in enumerate(shown))
    motion = f"@keyframes line {{ from, to {{ opacity: 0 }} }}\n{rules}"
    return _FONT.sub("", svg).replace(
        "</style>", f"@media screen and (prefers-reduced-motion: no-preference) {{\n{motion}}}\n</style>", 1
    )


def main() -> None:
    """Run the demo and write the picture."""
    clock = Clock()
    console = Console(file=clock, record=True, width=WIDTH)
    demonstrate(console=console)
    PATH.write_text(played(console.export_svg(title="make demo", unique_id="demo"), clock.times))
    print(f"{PATH}: {len(clock.times)} lines in {clock.times[-1]:.0f} s")


if __name__ == "__main__":
    main()

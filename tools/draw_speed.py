"""Draws the README's speed chart from results/speed.json: `python -m tools.draw_speed`.

With the argument `-`, the SVG goes to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "bench" / "results" / "speed.json"
PICTURE = ROOT / "docs" / "images" / "speed.svg"

WAYS = {  # names in the recorded run, by their labels in the chart
    "transformers, eager": "transformers eager",
    "transformers, compiled": "transformers static compiled",
    "compilespec, plain": "compilespec none",
    "compilespec, EAGLE-3, K=1": "compilespec eagle3 K=1",
    "compilespec, EAGLE-3, K=3": "compilespec eagle3 K=3",
}
WIDTH, LABELS, BAR, GAP, HEAD = 760, 205, 18, 6, 26  # pixels; HEAD is a panel's title
STYLE = (  # colours that are legible on white and on black
    "text { font: 13px system-ui, sans-serif; fill: #6e7781 } .title { font-weight: 600 } "
    ".other { fill: #8c959f } .ours { fill: #2f81f7 }"
)


def draw(results: Mapping[str, Any]) -> str:
    """The SVG: a panel of bars for each batch size, showing median tokens per second."""
    panel = HEAD + len(WAYS) * (BAR + GAP) + 14
    parts = [
        line
        for index, batch in enumerate(("1", "8"))
        for line in _panel(results["speeds"][batch], batch, top=index * panel + 4)
    ]
    height = 2 * panel
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" '
            'aria-label="Tokens per second of the demo pair by way of decoding">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _panel(speeds: Mapping[str, Any], batch: str, *, top: int) -> Iterator[str]:
    medians = {title: speeds[way]["tokens_per_s"]["p50"] for title, way in WAYS.items()}
    base, largest = next(iter(medians.values())), max(medians.values())
    room = WIDTH - LABELS - 110
    yield f'<text class="title" x="0" y="{top + 14}">batch {batch}: tokens per second</text>'
    for index, (title, median) in enumerate(medians.items()):
        y = top + HEAD + index * (BAR + GAP)
        kind = "ours" if title.startswith("compilespec") else "other"
        width = room * median / largest
        yield f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{title}</text>'
        yield (
            f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        )
        words = f"{median:.0f} ({median / base:.1f}x)"
        yield f'<text x="{LABELS + width + 6:.1f}" y="{y + 13}">{words}</text>'


def main() -> None:
    picture = draw(json.loads(RESULTS.read_text(encoding="utf-8")))
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(picture)
        return
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()

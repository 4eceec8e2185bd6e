"""Draws the charts of speeds from results/speed.json and results/real.json: `python -m
tools.draw_speed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "bench" / "results"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars of a recorded run: names in it, by their labels."""

    name: str
    what: str
    ways: Mapping[str, str]

    @property
    def results(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def picture(self) -> Path:
        return ROOT / "docs" / "images" / f"{self.name}.svg"


CHARTS = (
    Chart(
        name="speed",
        what="the demo pair",
        ways={
            "transformers, eager": "transformers eager",
            "transformers, compiled": "transformers static compiled",
            "compilespec, plain": "compilespec none",
            "compilespec, EAGLE-3, K=1": "compilespec eagle3 K=1",
            "compilespec, EAGLE-3, K=3": "compilespec eagle3 K=3",
        },
    ),
    Chart(
        name="real",
        what="SmolLM2-135M-Instruct",
        ways={
            "transformers, eager": "transformers eager",
            "vLLM": "vLLM",
            "llama.cpp": "llama.cpp",
            "compilespec, plain": "compilespec none",
            "compilespec, n-grams, K=4": "compilespec ngram K=4",
            "compilespec, EAGLE-3, K=3": "compilespec eagle3 K=3",
            "the same, its head in int8": "compilespec eagle3 K=3, draft in int8_dynamic",
            "OpenVINO, 8 bits": "OpenVINO Q8_0",
            "llama.cpp, 8 bits": "llama.cpp Q8_0",
            "compilespec, 8 bits": "compilespec none int8",
            "compilespec, 8 bits, EAGLE-3": "compilespec eagle3 K=3 int8, draft in int8_dynamic",
        },
    ),
)
WIDTH, LABELS, BAR, GAP, HEAD = 760, 205, 18, 6, 26  # pixels; HEAD is a panel's title
STYLE = (  # colours that are legible on white and on black
    "text { font: 13px system-ui, sans-serif; fill: #6e7781 } .title { font-weight: 600 } "
    ".other { fill: #8c959f } .ours { fill: #2f81f7 }"
)


def draw(results: Mapping[str, Any], chart: Chart) -> str:
    """The SVG: a panel of bars for each batch size, showing median tokens per second."""
    parts: list[str] = []
    top = 4
    for batch in ("1", "8"):
        medians = {
            label: results["speeds"][batch][way]["tokens_per_s"]["p50"]
            for label, way in chart.ways.items()
            if way in results["speeds"][batch]
        }
        parts += _panel(medians, batch, top=top)
        top += HEAD + len(medians) * (BAR + GAP) + 14
    height = top - 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" '
            f'aria-label="Tokens per second of {chart.what} by way of decoding">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _panel(medians: Mapping[str, float], batch: str, *, top: int) -> Iterator[str]:
    base, largest = next(iter(medians.values())), max(medians.values())
    room = WIDTH - LABELS - 110
    yield f'<text class="title" x="0" y="{top + 14}">batch {batch}: tokens per second</text>'
    for index, (title, median) in enumerate(medians.items()):
        y = top + HEAD + index * (BAR + GAP)
        kind = "ours" if title.startswith(("compilespec", "the same")) else "other"
        width = room * median / largest
        yield f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{title}</text>'
        yield (
            f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        )
        words = f"{median:.0f} ({median / base:.1f}x)"
        yield f'<text x="{LABELS + width + 6:.1f}" y="{y + 13}">{words}</text>'


def main() -> None:
    for chart in CHARTS:
        chart.picture.parent.mkdir(parents=True, exist_ok=True)
        recorded = json.loads(chart.results.read_text(encoding="utf-8"))
        chart.picture.write_text(draw(recorded, chart), encoding="utf-8")


if __name__ == "__main__":
    main()

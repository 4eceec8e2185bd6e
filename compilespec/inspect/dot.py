"""A stage as Graphviz text: nodes coloured by the pass that made them, edges data."""

from __future__ import annotations

import json
from collections.abc import Collection

from compilespec.inspect.graphs import GraphStage
from compilespec.inspect.table import Row

_COLORS = (
    "#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3", "#ede9fe", "#cffafe", "#ffedd5", "#e2e8f0",
)  # fmt: skip


def render_dot(stage: GraphStage, rows: Collection[Row], title: str) -> str:
    """The nodes of `rows` and the edges among them."""
    makers = list(dict.fromkeys(row.made_by for row in rows))
    shown = {row.name for row in rows}
    lines = [
        "digraph {",
        f"  label={json.dumps(title)}; labelloc=t;",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10];',
    ]
    for row in rows:
        label = "\n".join(part for part in (row.name, row.target, row.value, row.place) if part)
        color = _COLORS[makers.index(row.made_by) % len(_COLORS)]
        lines.append(
            f"  {json.dumps(row.name)} [label={json.dumps(label)}, fillcolor={json.dumps(color)}, "
            f"tooltip={json.dumps(f'{row.made_by} {row.source}'.strip())}];"
        )
    for node in stage.graph.nodes:
        for operand in node.all_input_nodes:
            if node.name in shown and operand.name in shown:
                lines.append(f"  {json.dumps(operand.name)} -> {json.dumps(node.name)};")
    return "\n".join([*lines, "}"]) + "\n"

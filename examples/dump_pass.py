"""What one pass did to the decode step: the nodes that it made.  Nothing is compiled.

python examples/dump_pass.py [MODEL [SPEC [PASS]]]
"""

import sys

import compilespec


def main(model: str = "demo", spec: str = "eagle3", name: str = "shift_hidden_states") -> None:
    program = compilespec.trace(model, spec=spec, max_seq_len=256)
    print(program)
    decode = program.graphs["decode"]
    for record in decode.records:
        print(f"{record.name:24}{record.matches:5} places{record.nodes_after:7} nodes")
    (record,) = (record for record in decode.records if record.name == name)
    known = {node.name for node in record.before.nodes}
    for node in record.after.nodes:
        if node.name not in known:
            print(f"+ {node.format_node()}")


if __name__ == "__main__":
    main(*sys.argv[1:])

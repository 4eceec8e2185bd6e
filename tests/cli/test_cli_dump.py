"""`compilespec dump` on the demo: every format, stage and report, and what it refuses."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compilespec
from compilespec.cli import dump, main
from tests.support.browser import open_browser
from tests.support.documents import quotes_in, sessions, without_times

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
TIME_LIMIT_S = 120

Dump = Callable[..., str]


@pytest.fixture(scope="module")
def traced_once() -> Any:
    """The command traces a model only once."""
    real, traced = dump._trace, {}

    def trace_once(args: Any) -> Any:
        if args.model not in traced or args.draft:
            traced[args.model] = real(args)
        return traced[args.model]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump, "_trace", trace_once)
        yield


@pytest.fixture
def run(traced_once: None, capsys: pytest.CaptureFixture[str]) -> Dump:
    """Runs the command; gives what it printed."""

    def call(*arguments: str, code: int = 0) -> str:
        assert main(["dump", *arguments]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return call


# --- tables ---


def test_list_gives_every_pass_that_ran(run: Dump) -> None:
    passes = json.loads(run("--list", "--json"))["passes"]
    by_name = {entry["name"]: entry for entry in passes}
    assert by_name["insert_paged_attention"]["matches"] == 8  # the demo's layers
    assert by_name["insert_paged_attention"]["numerics"] == "rounding"
    for one, other in itertools.pairwise(passes):
        assert one["nodes_after"] == other["nodes_before"]
    assert "narrow_logits" not in by_name
    assert "narrow_logits" in run("--list", "--phase", "prefill")
    text = run("--list")
    assert text.splitlines()[1].split()[:3] == ["pass", "level", "matches"]
    assert len(text.splitlines()) == len(passes) + 2


def test_shapes_of_spliced_nodes_agree_with_the_retraced_ones(run: Dump) -> None:
    stages = json.loads(run("--all", "--json"))["stages"]
    assert [stage["name"] for stage in stages][:2] == ["start", "check_markers"]
    rows = {stage["name"]: {row["name"]: row for row in stage["rows"]} for stage in stages}
    spliced, aten = rows["commit_state"], rows["to_aten"]
    retraced = [row["shape"] for row in aten.values() if row["target"] == "aten.argmax.default"]
    assert retraced[0] == ["B", 4]
    assert retraced == [
        row["shape"] for row in spliced.values() if row["target"] in (".argmax", "torch.argmax")
    ]
    for table in rows.values():
        unknown = [
            row["name"]
            for row in table.values()
            if row["op"] == "call" and row["shape"] is None and not row["dtype"]
        ]
        # of torch's own, which gives nothing
        assert all(name.startswith("_log_api_usage_once") for name in unknown)


def test_rows_say_where_a_node_comes_from(run: Dump) -> None:
    rows = json.loads(run("--where", "*layers.3.mlp.down_proj", "--after", "start", "--json"))
    (row,) = [row for row in rows["stages"][0]["rows"] if row["op"] == "call"]
    assert row["target"] == "torch.nn.functional.linear"
    assert row["shape"] == ["B", 4, 256]
    assert row["made_by"] == "trace"
    assert "modeling_llama.py" in row["source"]
    assert "down_proj" in row["source"]


def test_weights_and_arguments_come_from_the_trace(run: Dump) -> None:
    rows = json.loads(run("--after", "check_markers", "--json"))["stages"][0]["rows"]
    assert {row["made_by"] for row in rows} == {"trace"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("emitted_BS", {"output"}),
        ("row_?", {"row_B"}),
        (r"/^(row_B|seq_len_R)$/", {"row_B", "seq_len_R"}),
    ],
)
def test_where_takes_parts_globs_and_expressions(
    run: Dump, pattern: str, expected: set[str]
) -> None:
    rows = json.loads(run("--where", pattern, "--json"))["stages"][0]["rows"]
    assert {row["name"] for row in rows} >= expected
    assert len(rows) <= len(expected) + 1


def test_diff_shows_what_one_pass_changed(run: Dump) -> None:
    changes = json.loads(run("--diff", "splice_acceptance", "--json"))["changes"]
    assert [c["sign"] for c in changes if c["new"] and c["new"]["op"] == "output"] == ["~"]
    added = [change["new"] for change in changes if change["sign"] == "+"]
    assert {row["made_by"] for row in added} == {"splice_acceptance"}
    records = json.loads(run("--list", "--json"))["passes"]
    record = next(r for r in records if r["name"] == "splice_acceptance")
    assert len(added) == record["nodes_after"] - record["nodes_before"]
    assert run("--diff", "check_markers").count("\n") == 2  # a title and no row


def test_ops_counts_operators(run: Dump) -> None:
    counts = json.loads(run("--ops", "--json"))["operators"]
    assert counts["start"]["compilespec.attention"] == 8
    assert counts["insert_paged_attention"]["compilespec.paged_attention.default"] == 8
    assert "compilespec.attention" not in counts["insert_paged_attention"]
    assert run("--ops").splitlines()[1].split()[0] == "operator"


@pytest.mark.parametrize("phase", ["target", "draft", "draft.forward"])
def test_captured_graphs_are_shown_before_any_pass(run: Dump, phase: str) -> None:
    stages = json.loads(run("--phase", phase, "--json"))["stages"]
    names = [stage["name"] for stage in stages]
    assert names == {"draft": ["draft.combine", "draft.forward", "draft.propose"]}.get(
        phase, [phase]
    )
    shapes = [row["shape"] for stage in stages for row in stage["rows"] if row["shape"]]
    assert ["B", "T"] in [shape[:2] for shape in shapes]


# --- other formats ---


@pytest.mark.parametrize(
    "stage",
    [("--after", "commit_state"), (), ("--phase", "prefill"), ("--phase", "target")],
    ids=str,
)
def test_python_is_a_module_that_runs(run: Dump, tmp_path: Path, stage: tuple[str, ...]) -> None:
    file = tmp_path / "graph.py"
    assert run(*stage, "--format", "python", "-o", str(file)) == ""
    module: dict[str, Any] = {"__name__": "graph"}
    exec(compile(file.read_text(), str(file), "exec"), module)
    inputs = module["example_inputs"]()
    with torch.no_grad():
        results = module["Graph"]()(*[_copied(value) for value in inputs.values()])
    program = dump._trace(dump_arguments())
    name = stage[1] if stage and stage[0] == "--phase" else "decode"
    if name == "target":
        assert results[0].shape == (2, 8, 2048)
        return
    graph = (
        program.graphs[name].spliced if "--after" in stage else program.graphs[name].graph_module
    )
    with torch.no_grad():
        expected = graph(*[_copied(value) for value in inputs.values()])
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


def dump_arguments() -> Any:
    from compilespec.cli import build_parser
    from compilespec.cli.flags import read_arguments

    return read_arguments(build_parser(), ["dump"])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_dot_has_every_node_and_edge(run: Dump) -> None:
    text = run("--after", "read_state", "--format", "dot", "--where", "*rotary_emb*")
    rows = json.loads(run("--after", "read_state", "--where", "*rotary_emb*", "--json"))
    names = [row["name"] for row in rows["stages"][0]["rows"]]
    assert all(f'"{name}" [label=' in text for name in names)
    assert " -> " in text
    assert text.startswith("digraph {")
    assert text.endswith("}\n")


# --- the page, in a real browser ---


def test_html_page_works_in_chromium(run: Dump, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    run("--format", "html", "--diff", "splice_acceptance", "-o", str(file))
    records = json.loads(run("--list", "--json"))["passes"]
    with open_browser(tmp_path) as browser:
        browser.open(file)
        links = browser.run(
            "return [...document.querySelectorAll('nav a b')].map(b => b.innerText)"
        )
        assert links == ["start", *(record["name"] for record in records)]
        assert browser.run("return document.querySelector('nav a.shown b').innerText") == (
            "splice_acceptance"
        )
        added = "return document.querySelectorAll('td.new.add').length / 3"
        (record,) = (one for one in records if one["name"] == "splice_acceptance")
        num_added = record["nodes_after"] - record["nodes_before"]
        assert browser.run(added) == num_added  # its own nodes are shown without a click

        groups = "return document.querySelectorAll('tr.group').length"
        rows = "return document.querySelectorAll('tr.row').length"
        browser.run("document.getElementById('close').click()")
        assert browser.run(rows) == 0
        num_groups = browser.run(groups)
        browser.run("[...document.querySelectorAll('tr.group')].find("
                    "row => row.innerText.includes('model.layers.3')).click()")  # fmt: skip
        assert browser.run(rows) > 20
        browser.run("document.getElementById('open').click()")
        assert browser.run(rows) > 500

        browser.run("const box = document.getElementById('search'); box.value = 'layers.3.mlp';"
                    "box.dispatchEvent(new Event('input'))")  # fmt: skip
        assert browser.run(groups) < num_groups
        texts = browser.run(
            "return [...document.querySelectorAll('tr.group')].map(r => r.innerText)"
        )
        assert all("layers.3" in text or "weights" in text for text in texts)
        browser.run("document.querySelector('tr.row').click()")
        assert "name" in browser.run("return document.getElementById('detail').innerText")

        browser.run("const box = document.getElementById('search'); box.value = '';"
                    "box.dispatchEvent(new Event('input'));"
                    f"for (const [id, value] of [['left', 0], ['right', {len(records)}]]) {{"
                    "const list = document.getElementById(id); list.value = value;"
                    "list.dispatchEvent(new Event('change')); }")  # fmt: skip
        heads = browser.run("return document.getElementById('stages').innerText")
        assert heads.startswith("start")
        assert "check_mutations" in heads
        assert browser.run("return performance.getEntriesByType('resource').length") == 0
        assert browser.console() == []


@pytest.mark.parametrize("width", [1400, 800, 380])
def test_html_page_fits_the_window(run: Dump, tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    run("--format", "html", "--diff", "splice_acceptance", "-o", str(file))
    with open_browser(tmp_path) as browser:
        browser.resize(width, 800)
        browser.open(file)
        clipped = (
            "return [...document.querySelectorAll(arguments[0])].filter(one => one.offsetParent &&"
            " one.scrollWidth > one.clientWidth).map(one => one.innerText)"
        )
        for parts in ("html, header, main, #bar, #scroll", "th", "nav a, button"):
            assert browser.run(clipped.replace("arguments[0]", json.dumps(parts))) == []
        names = "[...document.querySelectorAll('td.name.new.add')].map(one => one.offsetWidth)"
        assert browser.run(f"return {names}.length") == 46
        assert browser.run(f"return Math.min(...{names})") > 90  # pixels; 0 where not shown
        if width == 380:
            browser.run("document.getElementById('passes').click()")
            browser.run("document.querySelectorAll('nav a')[2].click()")
            stages = browser.run("return document.getElementById('stages').innerText")
            assert "check_markers" in stages
            assert "tap_hidden_states" in stages


# --- reports ---


def test_bounds_and_cost_are_printed_and_json(run: Dump) -> None:
    printed = " ".join((run("--bounds") + run("--cost")).split())
    quotes = [
        quote
        for quote in quotes_in("docs/inspect.md", "`--bounds` lists")
        if " " in quote and not quote.startswith("--")
    ]
    assert len(quotes) == 3
    for quote in quotes:
        assert quote in printed
    assert json.loads(run("--bounds", "--json"))["counts"].get("open", 0) == 0
    cost = json.loads(run("--cost", "--json", "--bandwidth", "10", "--flops", "1"))
    assert cost["device"] == {"name": "given", "bytes_per_s": 1e10, "flops_per_s": 1e12}
    assert cost["phases"]["decode"]["total"]["amounts"]["flops"] > 1e6


def test_verify_runs_the_passes_that_are_named(run: Dump) -> None:
    checked = json.loads(
        run("--verify", "--after", "splice_acceptance", "--phase", "decode", "--json")
    )
    assert checked["ok"]
    assert {check["pass_name"] for check in checked["checks"]} == {"splice_acceptance"}


def test_a_failed_check_is_exit_code_1(run: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    from compilespec.inspect import verify, verify_report

    failing = verify_report.VerifyReport(method="eagle3", dtype=torch.float32, checks=())
    monkeypatch.setattr(verify, "verify", lambda *args, **options: failing)
    assert run("--verify", code=dump.FAILED) == ""


# --- what the documents show ---


def test_documents_show_what_the_commands_print(run: Dump) -> None:
    shown = list(sessions("docs/inspect.md"))
    assert len(shown) == 3
    for command, output in shown:
        program, subcommand, *arguments = command.split()
        assert (program, subcommand) == ("compilespec", "dump")
        assert without_times(run(*arguments)) == without_times(output)


# --- what it refuses ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--after", "splice_draftloop"),
            "did you mean splice_draft_loop? passes of decode: check_",
        ),
        (("--diff", "narrow_logits"), "narrow_logits did not run in phase decode"),
        (("--before", "start"), "unknown pass 'start'"),
        (("--phase", "verify"), "--phase must be prefill, decode"),
        (("--phase", "target", "--list"), "is captured before any pass"),
        (
            ("--phase", "decode.2"),
            "it has prefill, decode, decode.0, replay (--num-draft",
        ),
        (("--phase", "draft.forwards"), "there are draft.combine, draft.forward, draft.propose"),
        (("--where", "/(/"), "--where /(/:"),
        (("--all", "--format", "dot"), "prints one graph"),
        (("--list", "--format", "html"), "prints graphs"),
        (("--cost", "--flops", "3"), "--bandwidth and --flops go together"),
        (("--meta", "--draft", "x"), "leave out --draft and --device"),
        (("-o", "/nowhere/x"), "--output /nowhere/x"),
        (("--draft-tree", "0,0.0,1.0"), "has (1, 0) without the node before it"),
        (("--draft-tree", "top_k=2,dept=3"), "or top_k=4,depth=5,num_nodes=16; got"),
        (("--draft-tree", "top_k=2,top_k=3,depth=2,num_nodes=4"), "num_nodes=16; got 'top_k=2,"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Dump, arguments: tuple[str, ...], said: str
) -> None:
    progress, *more = run(*arguments, code=2).split("compilespec: error:")
    assert all(line.startswith("compilespec: ") for line in progress.splitlines())
    assert len(more) == 1
    assert said in more[0]
    assert len(more[0].splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import types; from compilespec.cli.dump import _output\n"
        "with _output(types.SimpleNamespace(output=None)) as out:\n"
        "    out.writelines(['line\\n'] * 10**6)\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_is_exit_code_130(run: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dump, "_trace", interrupted)
    assert "interrupted" in run("--list", code=130)


# --- without weights ---


def _dump_meta(
    directory: Path, capsys: pytest.CaptureFixture[str], spec: str = "eagle3", *more: str
) -> Any:
    options = ["--model", str(directory), "--spec", spec, "--meta", "--json", *more]
    assert main(["dump", *options, "--ops"]) == 0
    return json.loads(capsys.readouterr().out)["operators"]


def test_meta_needs_only_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 4}))
    operators = _dump_meta(tmp_path, capsys)
    # four layers of the target, and the head's own in each of three draft passes
    assert operators["check_mutations"]["compilespec.paged_attention.default"] == 4 + 3


def test_a_tree_is_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 4}))
    tree = ("--draft-tree", "top_k=2,depth=2,num_nodes=4")
    operators = _dump_meta(tmp_path, capsys, "eagle3", *tree)
    # a draft pass for each depth, and one for the keys of what was accepted
    assert operators["check_mutations"]["compilespec.paged_attention.default"] == 4 + 2
    assert operators["keep_path"]["compilespec.write_cache.default"] > 0


@pytest.mark.parametrize(("spec", "num_calls"), [("peagle", 1), ("dflash", 2), ("dspark", 2)])
def test_meta_drafts_in_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, num_calls: int
) -> None:
    """A call of attention for each layer of the drafter."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 4}))
    operators = _dump_meta(tmp_path, capsys, spec)
    assert operators["check_mutations"]["compilespec.paged_attention.default"] == 4 + num_calls


def test_meta_dumps_a_70b_model_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    started = time.process_time()  # one thread's: others on the machine do not count
    operators = _dump_meta(tmp_path, capsys)
    assert operators["check_mutations"]["compilespec.paged_attention.default"] == 80 + 3
    assert time.process_time() - started < TIME_LIMIT_S


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from compilespec.cli import build_parser; build_parser()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert compilespec.__version__

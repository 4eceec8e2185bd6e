"""Bad input of every kind: one line that names the cure, and nobody else is harmed."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams, errors
from compilespec.cli import main
from compilespec.methods.checkpoint import read_tensors
from compilespec.methods.eagle3 import random_head, save_head
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.models import VOCAB, PlainModel

VOCAB_SIZE, MAX_SEQ_LEN, LIMIT = 40, 32, 256
_DIRECTORY = tempfile.TemporaryDirectory(prefix="compilespec-bad-input-")
TARGET, DRAFT = Path(_DIRECTORY.name) / "target", Path(_DIRECTORY.name) / "draft"


@pytest.fixture(scope="module", autouse=True)
def checkpoints():
    """A whole target and a whole draft, as directories."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LIMIT,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(TARGET)
    info = describe_target(trace_target(model), load_target(model))
    save_head(random_head(info), DRAFT)
    yield
    _DIRECTORY.cleanup()


def refused(kind: type[errors.SpecError], *fragments: str, run: Any) -> str:
    """Run and expect an error of this kind, on one line, that holds the fragments."""
    with pytest.raises(kind) as caught:
        run()
    message = str(caught.value)
    assert isinstance(caught.value, errors.SpecError)
    assert message
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message
    return message


@pytest.mark.parametrize("call", [compilespec.compile, compilespec.trace])
def test_progress_must_be_callable(call: Any) -> None:
    refused(errors.InvalidOption, "progress", "True", run=lambda: call("nowhere", progress=True))


def compile_target(spec: Any = "none", model: Any = TARGET, **options: Any) -> compilespec.Engine:
    return compilespec.compile(model, spec, **{"backend": "eager", **options})


# --- requests ---


@pytest.fixture(scope="module")
def engine():
    with compile_target(max_seq_len=MAX_SEQ_LEN, max_batch_size=3) as engine:
        yield engine


BAD_PROMPTS = {
    "empty": ([], ("the prompt is empty", "give the id that begins a text")),
    "too_long": ([5] * MAX_SEQ_LEN, (f"{MAX_SEQ_LEN} tokens", "at most 31", "shorten it")),
    "id_too_big": ([5, VOCAB_SIZE], ("token 1 is 40", "from 0 to 39", "check that the tokenizer")),
    "id_negative": ([-1, 5], ("token 0 is -1", "from 0 to 39")),
    "id_not_integer": ([5, 1.5], ("token 1 is 1.5", "integer")),
    "text_without_tokenizer": ("hello", ("no tokenizer", "give token ids")),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused(engine, name):
    prompt, fragments = BAD_PROMPTS[name]
    refused(errors.InvalidRequest, *fragments, run=lambda: engine.submit(prompt))
    assert not engine.has_work
    (output,) = engine.generate([prompt])
    assert output.finish_reason == "error"
    assert output.token_ids == []
    assert all(fragment in str(output.error) for fragment in fragments)


def test_the_others_of_a_batch_finish(engine):
    good = [[3, 4, 5], [6], list(range(20))]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in good]
    mixed = [BAD_PROMPTS["empty"][0], good[0], BAD_PROMPTS["too_long"][0], good[1],
             BAD_PROMPTS["id_negative"][0], good[2], BAD_PROMPTS["id_too_big"][0]]  # fmt: skip
    outputs = engine.generate(mixed, params)
    assert [o.finish_reason for o in outputs] == ["error", "length"] * 3 + ["error"]
    assert [o.token_ids for o in outputs[1::2]] == alone
    deltas = list(engine.stream(mixed, params))
    assert {d.index for d in deltas if d.finish_reason == "length"} == {1, 3, 5}
    assert {d.index for d in deltas if d.finish_reason == "error"} == {0, 2, 4, 6}
    assert not engine.has_work


def test_parameters_that_were_not_compiled_in_are_refused(engine):
    refused(
        errors.InvalidRequest, "prompt_logprobs", "compiled with prompt_logprobs=True",
        run=lambda: engine.generate([[3]], SamplingParams(prompt_logprobs=0)),
    )  # fmt: skip
    refused(
        errors.InvalidRequest, "logits_processor", "compiled with host_processors=True",
        run=lambda: engine.generate([[3]], SamplingParams(logits_processor=max)),
    )  # fmt: skip
    refused(errors.InvalidRequest, run=lambda: SamplingParams(max_new_tokens=0))


# --- keywords ---

IMPOSSIBLE = {
    "max_batch_size=0": {"max_batch_size": 0},
    "max_batch_size=True": {"max_batch_size": True},
    "max_batch_size=2.0": {"max_batch_size": 2.0},
    "max_seq_len=-3": {"max_seq_len": -3},
    "max_seq_len=1": {"max_seq_len": 1},
    "max_prefill_tokens=0": {"max_prefill_tokens": 0},
    "kv_cache_tokens=0": {"kv_cache_tokens": 0},
    "num_draft_tokens=0": {"num_draft_tokens": 0},
    "num_draft_tokens=65": {"num_draft_tokens": 65},
    "num_draft_tokens=(0, 1000)": {"num_draft_tokens": (0, 1000)},
    "buckets": {"buckets": (1, 4)},  # do not end at the maximum of 8
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_sizes_and_choices_are_refused(name):
    (key,) = IMPOSSIBLE[name]
    message = refused(
        errors.InvalidOption, f"{key} must be", run=lambda: compile_target(**IMPOSSIBLE[name])
    )
    assert "got " in message


def test_keywords_that_contradict_are_refused():
    refused(
        errors.InvalidOption,
        "needs a drafting method",
        run=lambda: compile_target(num_draft_tokens=2),
    )
    refused(
        errors.InvalidOption, "limit of 256 positions; got 257",
        run=lambda: compile_target(max_seq_len=257),
    )  # fmt: skip
    for count in (32, (0, 32)):
        refused(
            errors.InvalidOption, "num_draft_tokens must be below max_seq_len=32", "got 32",
            run=lambda count=count: compile_target(
                spec="ngram", num_draft_tokens=count, max_seq_len=32
            ),
        )  # fmt: skip
    refused(
        errors.InvalidOption, "kv_cache_tokens must hold one request of max_seq_len=256",
        run=lambda: compile_target(kv_cache_tokens=255 - 15),
    )  # fmt: skip


# --- directories ---


def copy_of(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


def drop_tensor(directory: Path, name: str) -> Path:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_directory_that_is_no_checkpoint(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        refused(
            errors.ModelNotFound,
            str(path),
            "expected a directory in Hugging Face layout",
            run=lambda path=path: compile_target(model=path),
        )
    (tmp_path / "config.json").write_text("{")
    refused(errors.ModelNotFound, str(tmp_path), run=lambda: compile_target(model=tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "a_model_nobody_knows"}')
    refused(errors.ModelNotFound, str(tmp_path), run=lambda: compile_target(model=tmp_path))


def test_a_target_with_a_missing_tensor(tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"
    directory = drop_tensor(copy_of(TARGET, tmp_path / "target"), name)
    refused(
        errors.CheckpointError, str(directory), name, "again",
        run=lambda: compile_target(model=directory),
    )  # fmt: skip


def test_a_target_with_a_misshapen_tensor(tmp_path):
    directory = copy_of(TARGET, tmp_path / "target")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(33)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    refused(
        errors.CheckpointError, str(directory), "model.norm.weight of shape (32,)", "(33,)",
        run=lambda: compile_target(model=directory),
    )  # fmt: skip


def changed_tensors(directory: Path, **tensors: Tensor) -> Path:
    """The checkpoint with these tensors, `__` in a name standing for a dot."""
    path = directory / "model.safetensors"
    given = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(path), **given}, path, metadata={"format": "pt"})
    return directory


def test_a_target_with_more_layers_than_its_config_says(tmp_path):
    directory = copy_of(TARGET, tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(
        errors.CheckpointError, str(directory), "no place", "model.layers.1.input_layernorm.weight",
        "and 10 more", "config.json", run=lambda: load_target(directory),
    )  # fmt: skip


def test_what_a_target_may_hold_beside_its_own_tensors(tmp_path):
    """Buffers that nothing reads, and drafters; nothing else."""
    directory = changed_tensors(
        copy_of(TARGET, tmp_path / "target"), mtp__fc__weight=torch.ones(2),
        model__mtp_layers__0__input_layernorm__weight=torch.ones(2),
        model__layers__3__enorm__weight=torch.ones(2),
        model__layers__3__mlp__up_proj__weight=torch.ones(2),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(2),
    )  # fmt: skip
    assert load_target(directory).model.config.num_hidden_layers == 3
    changed_tensors(directory, adapter__weight=torch.ones(2))
    refused(
        errors.CheckpointError, "no place", "adapter.weight", run=lambda: load_target(directory)
    )


def test_a_target_with_integers_for_floats(tmp_path):
    directory = changed_tensors(
        copy_of(TARGET, tmp_path / "target"),
        model__norm__weight=torch.ones(32, dtype=torch.int64),
    )
    refused(
        errors.CheckpointError, str(directory), "integers", "model.norm.weight (i64)",
        run=lambda: load_target(directory),
    )  # fmt: skip


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(directory: Path, content: Any) -> None:
    (directory / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (directory / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, directory / "pytorch_model.bin")


DAMAGES = {
    "truncated": cut,
    "empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "bomb": lambda path: pickled(path, {"x": Bomb(path / "executed")}),
    "junk": lambda path: pickled(path, b"hello"),
    "cut_pickle": lambda path: pickled(path, b"\x80"),
    "ids_as_names": lambda path: pickled(path, {1: torch.ones(2)}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_weights_are_refused_and_never_executed(tmp_path, name):
    target, draft = copy_of(TARGET, tmp_path / "target"), copy_of(DRAFT, tmp_path / "draft")
    for directory in (target, draft):
        DAMAGES[name](directory)
    message = refused(errors.SpecError, str(target), run=lambda: load_target(target))
    assert "weights_only" not in message  # no advice to execute it
    refused(errors.CheckpointError, str(draft), run=lambda: read_tensors(draft))
    assert not list(tmp_path.rglob("executed"))


def test_a_draft_with_integers_for_floats(tmp_path):
    directory = changed_tensors(
        copy_of(DRAFT, tmp_path / "draft"), norm__weight=torch.ones(32, dtype=torch.int64)
    )
    refused(
        errors.CheckpointError, "norm.weight (expected floats, got torch.int64)",
        run=lambda: compile_target("eagle3", draft=directory),
    )  # fmt: skip


def test_a_draft_with_a_missing_tensor(tmp_path):
    directory = drop_tensor(copy_of(DRAFT, tmp_path / "draft"), "midlayer.self_attn.q_proj.weight")
    refused(
        errors.CheckpointError, str(directory), "self_attn.q_proj.weight",
        run=lambda: compile_target("eagle3", draft=directory),
    )  # fmt: skip


def test_no_draft_lists_what_was_searched(tmp_path):
    refused(
        errors.DraftNotFound, str(TARGET / "eagle3"), "give draft=",
        run=lambda: compile_target("eagle3"),
    )  # fmt: skip
    refused(
        errors.DraftNotFound, str(tmp_path), "config.json",
        run=lambda: compile_target("eagle3", draft=tmp_path),
    )  # fmt: skip
    refused(
        errors.DraftNotFound, "the target is a module", "give draft=",
        run=lambda: compile_target("eagle3", model=PlainModel(num_layers=1)),
    )  # fmt: skip


def test_a_draft_of_another_hidden_size(tmp_path):
    target = load_target(PlainModel(width=24, num_layers=3))
    info = describe_target(trace_target(target.model), target)
    directory = save_head(random_head(info), tmp_path / "draft")
    message = refused(
        errors.DraftMismatch, "24", "32", run=lambda: compile_target("eagle3", draft=directory)
    )
    assert "hidden" in message or "vocab" in message


# --- models ---


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = PlainModel(num_layers=1)
        self.gate = Gate()

    def forward(self, ids: Tensor) -> Tensor:
        return self.gate(self.inner(ids))


class Gate(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        if logits.max().item() > 1e9:  # the break
            return logits * 0
        return logits


class NoPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        plain = PlainModel(num_layers=1)
        self.tokens, self.block, self.head = plain.tokens, plain.blocks[0], plain.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(ids)))


def test_models_that_cannot_be_traced():
    source = Path(__file__).read_text().splitlines()
    line = next(index for index, text in enumerate(source, 1) if text.endswith("# the break"))
    message = refused(
        errors.TraceError, "gate (Gate)", f"test_bad_input.py:{line}", "rewrite that line",
        run=lambda: compile_target(model=Breaking()),
    )  # fmt: skip
    assert "item" in message
    refused(
        errors.NoPositionInput, "NoPositions", "add a position_ids argument",
        run=lambda: compile_target(model=NoPositions()),
    )  # fmt: skip
    refused(errors.InvalidOption, "no parameters", run=lambda: compile_target(model=nn.Identity()))


def test_a_loop_over_tokens_is_refused(caplog):
    model = transformers.RwkvForCausalLM(
        transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    )
    refused(
        errors.TraceError, "modeling_rwkv.py:", "one number of tokens alone",
        run=lambda: compile_target(model=model),
    )  # fmt: skip
    assert not [record for record in caplog.records if record.name.startswith("torch")]


def test_recurrent_layers_that_nothing_stands_for_are_refused():
    config = transformers.MiniMaxConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2,
        num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MiniMaxForCausalLM(config)
    refused(
        errors.UnsupportedState, "MiniMaxForCausalLM", "linear_attention", "rewound",
        run=lambda: compile_target(model=model.to_empty(device="cpu")),
    )  # fmt: skip


# --- the command line ---


def cli_refuses(capsys, *arguments: str) -> str:
    capsys.readouterr()
    prompt = () if "--prompt" in arguments else ("--prompt", "x")
    assert main(["generate", "--backend", "eager", *prompt, *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [text for text in err.splitlines() if text.startswith("compilespec: error: ")]
    assert out.strip() == ""
    assert len(lines) == 1
    assert err.rstrip().splitlines()[-1] == lines[0]
    assert "Traceback" not in err
    return lines[0]


def test_the_command_line_prints_one_line_and_exits_with_2(capsys, tmp_path):
    target = ("--model", str(TARGET))
    assert str(TARGET / "eagle3") in cli_refuses(capsys, *target, "--spec", "eagle3")
    assert "--max-seq-len must be" in cli_refuses(capsys, *target, "--max-seq-len", "1000")
    name = "midlayer.hidden_norm.weight"
    draft = drop_tensor(copy_of(DRAFT, tmp_path / "draft"), name)
    line = cli_refuses(capsys, *target, "--spec", "eagle3", "--draft", str(draft))
    assert "hidden_norm" in line
    (draft / "config.json").write_text(json.dumps({"architectures": ["Nothing"]}))
    cli_refuses(capsys, *target, "--spec", "eagle3", "--draft", str(draft))
    damaged = copy_of(TARGET, tmp_path / "damaged")
    cut(damaged)
    assert str(damaged) in cli_refuses(capsys, "--model", str(damaged))


@pytest.mark.parametrize("text", ["", "x"], ids=["empty", "no_tokenizer"])
def test_the_command_line_refuses_a_prompt(engine, capsys, monkeypatch, text):
    monkeypatch.setattr(compilespec, "compile", lambda *args, **options: engine)
    monkeypatch.setattr(type(engine), "close", lambda self: None)  # other tests use it
    cli_refuses(capsys, "--model", str(TARGET), "--prompt", text)

"""Models by path and by name: a hub cache laid out by hand, and a tiny GGUF file."""

from __future__ import annotations

import codecs
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

import compilespec
from compilespec.errors import (
    CheckpointError,
    DraftNotFound,
    InvalidOption,
    MissingDependency,
    ModelNotFound,
    TraceError,
)
from compilespec.methods.find import read_draft
from compilespec.methods.registry import get_method
from compilespec.pipeline import entry
from compilespec.tracing import gguf_copies, gguf_file
from compilespec.tracing.checkpoint_files import read_config, read_tensors, tensor_names
from compilespec.tracing.hub import is_hub_name
from compilespec.tracing.load import find_tokenizer, load_target
from compilespec.tracing.placement import read_dtype
from compilespec.tracing.places import find_model
from tests.support.gguf_files import TEMPLATE, tiny_llama, write_gguf

ORACLES = Path(__file__).parent.parent / "data" / "oracles"
TARGET, DRAFT = ORACLES / "c_target", ORACLES / "c_eagle3_d2t_chain" / "draft"
COMMIT, OLDER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
FFN_Q8 = {"ffn": "Q8_0"}  # types of the matrices of a file


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def cached(hub: Path, name: str, source: Path, revisions: dict[str, str]) -> Path:
    """Lay out a model in the cache as a download leaves it; returns its newest snapshot."""
    folder = hub / f"models--{name.replace('/', '--')}"
    for revision, commit in revisions.items():
        ref = folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        if not (folder / "snapshots" / commit).exists():
            shutil.copytree(source, folder / "snapshots" / commit)
    return folder / "snapshots" / revisions["main"]


def test_the_form_of_a_name():
    for name in ("org/name", "a-b/C.d_1", "org/name@main", "org/name@refs/pr/3", f"o/n@{COMMIT}"):
        assert is_hub_name(name), name
    for name in (
        "demo",
        "gpt2",
        "./dir/x",
        "/abs/dir",
        "a/b/c",
        "~/models",
        "org/",
        7,
        Path("o/n"),
    ):
        assert not is_hub_name(name), name


def test_a_cached_model_and_its_revisions(hub):
    main = cached(hub, "org/tiny", TARGET, {"main": COMMIT, "v1.0": OLDER})
    place = find_model("org/tiny")
    assert (place.name, place.directory) == ("org/tiny", main)
    older = main.parent / OLDER
    assert find_model("org/tiny@v1.0").directory == older
    assert find_model(f"org/tiny@{OLDER}").directory == older
    target = load_target("org/tiny")
    assert target.name == "org/tiny (LlamaForCausalLM)"
    assert target.directory == main


def test_a_gguf_file_of_a_repository_by_the_end_of_its_name(hub, tmp_path):
    source = tmp_path / "files"
    source.mkdir()
    for name in (
        "Tiny-1B-Q4_K_M.gguf",
        "Tiny-1B-Q4_K_S.gguf",
        "Tiny-1B-BF16.gguf",
        "tiny-f16.gguf",
    ):
        (source / name).touch()
    folder = cached(hub, "org/tiny-GGUF", source, {"main": COMMIT})
    for ending, name in (
        ("Q4_K_M", "Tiny-1B-Q4_K_M.gguf"), ("q4_k_s", "Tiny-1B-Q4_K_S.gguf"),
        ("F16", "tiny-f16.gguf"), ("Tiny-1B-BF16.gguf", "Tiny-1B-BF16.gguf"),
    ):  # fmt: skip
        place = find_model(f"org/tiny-GGUF:{ending}")
        assert place.path == folder / name
    with pytest.raises(ModelNotFound, match=r"name ends with Q8_0; .*are: Tiny-1B-BF16.gguf, Tiny"):
        find_model("org/tiny-GGUF:Q8_0")
    with pytest.raises(ModelNotFound, match=r"hf download org/none --include '\*Q8_0.gguf'$"):
        find_model("org/none:Q8_0")
    with pytest.raises(
        ModelNotFound, match=r"holds no config.json .*such as org/tiny-GGUF:Q4_K_M$"
    ):
        find_model("org/tiny-GGUF")


def test_target_and_drafter_by_name_decode_as_from_directories(hub):
    cached(hub, "org/tiny", TARGET, {"main": COMMIT})
    cached(hub, "org/tiny-eagle3", DRAFT, {"main": COMMIT})
    keywords: dict[str, Any] = {"backend": "eager", "max_batch_size": 1, "max_seq_len": 64}
    outputs = []
    for model, draft in (("org/tiny", "org/tiny-eagle3"), (TARGET, DRAFT)):
        with compilespec.compile(model, "eagle3", draft=draft, **keywords) as engine:
            (output,) = engine.generate([5, 3, 8, 1, 2])
            outputs.append((output.token_ids, output.emitted_per_step))
            named = "org/tiny" if model == "org/tiny" else "c_target"
            assert engine.plan()["model"] == f"{named} (LlamaForCausalLM)"
    assert outputs[0] == outputs[1]


def test_what_is_on_disk_comes_before_the_hub(hub, tmp_path, monkeypatch):
    cached(hub, "org/tiny", TARGET, {"main": COMMIT})
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TARGET, tmp_path / "org" / "tiny")
    assert find_model("org/tiny").directory == Path("org/tiny")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("org/none", "hf download org/none$"),
        ("org/none@v2", "hf download org/none --revision v2$"),
    ],
)
def test_a_name_that_is_not_cached_says_what_to_download(hub, name, command):
    with pytest.raises(ModelNotFound, match=command) as caught:
        find_model(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: no such directory, not (completely) downloaded, and the")
    assert "\n" not in message
    with pytest.raises(
        DraftNotFound, match=f"^draft {name}: no such .*; a checkpoint of method 'eagle3'"
    ):
        read_draft(name, get_method("eagle3").capabilities)


def test_a_repository_of_gguf_files_alone(hub, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "README.md").write_text("x")
    cached(hub, "org/x-GGUF", tmp_path / "files", {"main": COMMIT})
    with pytest.raises(ModelNotFound, match=r"such as org/x-GGUF:Q4_K_M$"):
        find_model("org/x-GGUF")


def test_what_the_hub_answers_is_told(hub, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    answers: list[Exception] = []

    def download(*args: Any, **keywords: Any) -> str:
        raise answers.pop()

    class Response:
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None
        status_code = 401

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for answer, message in (
        (errors.GatedRepoError("x", response=Response()), "is gated: .*hf auth login$"),
        (errors.RepositoryNotFoundError("x", response=Response()), "no such model or revision"),
        (errors.RevisionNotFoundError("x", response=Response()), "no such model or revision"),
        (OSError("No space left\non device"), "OSError: No space left; try hf download org/x$"),
    ):
        answers.append(answer)
        with pytest.raises(ModelNotFound, match=message):
            find_model("org/x")


def test_paths_that_hold_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    for path, message in (
        (tmp_path, "holds no config.json and no GGUF file; expected a directory"),
        (tmp_path / "weights.bin", "is a file, and no GGUF file"),
        (str(tmp_path / "nowhere"), r"nowhere does not exist; expected a directory"),
        (tmp_path / "weihgts.bin", r"does not exist; did you mean weights\.bin\?; expected"),
        (tmp_path / "no" / "x.gguf", r"x\.gguf does not exist, nor does .*no; expected"),
    ):
        with pytest.raises(ModelNotFound, match=message):
            find_model(path)


# --- files that transformers does not read, or passes over ---

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def checkpoint(folder: Path, **config: Any) -> Path:
    shutil.copytree(TARGET, folder)
    known = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        known.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json",
     "tokenizer.model", "chat_template.jinja", "model.safetensors.index.json"],
)  # fmt: skip
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    folder = checkpoint(tmp_path / "model")
    (folder / name).write_bytes(POINTER)
    drafters = {"config.json": read_config, "model.safetensors": read_tensors}
    for read in {load_target, drafters.get(name, load_target)}:
        with pytest.raises(
            CheckpointError, match=r"is a pointer of Git LFS.*git lfs pull"
        ) as caught:
            read(folder)
        assert str(folder / name) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_gguf_pointer_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"x\.gguf is a pointer of Git LFS"):
        load_target(tmp_path / "x.gguf")


def same_weights(folder: Path) -> Any:
    target, expected = load_target(folder), load_target(TARGET)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(target.model.state_dict()[name], tensor, rtol=0, atol=0)
    assert target.model.config._name_or_path == str(folder)
    return target


def test_a_byte_order_mark_is_read_past(tmp_path):
    """In every file: transformers passes over such a generation_config.json without a word."""
    folder = checkpoint(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    assert same_weights(folder).eos_token_ids == (7, 9)
    assert read_config(folder)["model_type"] == "llama"


def test_an_index_without_metadata_is_read(tmp_path):
    folder = checkpoint(tmp_path / "model")
    shard = "model-00001-of-00001.safetensors"
    names = tensor_names(folder)
    (folder / "model.safetensors").rename(folder / shard)
    index = {"weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same_weights(folder)


@pytest.mark.parametrize(
    "config",
    [{"dtype": "auto"}, {"torch_dtype": "auto"}, {"dtype": "torch.float32"},
     {"torch_dtype": "torch.float32"}, {"pad_token_id": 99_999}],
    ids=str,
)  # fmt: skip
def test_what_a_config_may_say(tmp_path, config):
    assert same_weights(checkpoint(tmp_path / "model", **config)).dtype == torch.float32


def test_a_dtype_that_torch_does_not_have_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"config\.json: dtype is 'float33': expected a dtype"
    ):
        load_target(checkpoint(tmp_path / "model", dtype="float33"))


def test_dtypes_by_the_names_that_others_use():
    assert read_dtype("auto") is None
    assert read_dtype("torch.bfloat16") == read_dtype(torch.bfloat16) == torch.bfloat16
    for wrong in ("torch.int8", "torch.auto2", 7):
        with pytest.raises(InvalidOption, match="dtype must be one of"):
            read_dtype(wrong)


def test_what_is_no_model_is_told_in_one_line():
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    for model, message in (
        (tokenizer, "got a .*; give a tokenizer as tokenizer=$"),
        (torch.nn.Linear(4, 4), "^model is a Linear, which takes no token ids: expected a causal"),
        (torch.nn.Sequential(torch.nn.Linear(4, 4)), "^model is a Sequential, which takes no"),
    ):
        with pytest.raises(InvalidOption, match=message) as caught:
            load_target(model)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250


def test_an_operator_that_refuses_is_the_cause(caplog, capfd):
    class Floats(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, input_ids: Any, position_ids: Any) -> Any:
            return self.inner(input_ids + position_ids)

    said = r"inner \(Linear\), linear\.py:\d+ raises RuntimeError: .*reduction dim"
    with pytest.raises(TraceError, match=said):
        compilespec.compile(Floats(), backend="eager", max_seq_len=16)
    assert not caplog.records
    assert not capfd.readouterr().err


def test_a_checkpoint_without_mtp_modules_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "load_target", None)
    for method in ("mtp", "mtp_eagle", "mtp_multi"):
        with pytest.raises(DraftNotFound, match=r"holds no MTP modules.*give draft=") as caught:
            compilespec.compile(TARGET, method)
        assert method in str(caught.value)


# --- GGUF ---


def test_a_gguf_file_is_found_by_itself_and_by_its_directory(tmp_path):
    (tmp_path / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "tiny.Q4_1.gguf"):
        place = find_model(path)
        assert dataclasses.astuple(place) == ("tiny.Q4_1", tmp_path, "tiny.Q4_1.gguf")
        assert read_draft(path, get_method("draft_model").capabilities) == place.path
        with pytest.raises(DraftNotFound, match="is a GGUF file; expected a checkpoint directory"):
            read_draft(path, get_method("eagle3").capabilities)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"several GGUF files \(other.gguf, tiny.Q4_1.gguf\)"):
        find_model(tmp_path)


def test_gguf_without_its_libraries_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"gguf and accelerate.*'compilespec\[gguf\]'$"):
        load_target(tmp_path)


@pytest.fixture
def copies(tmp_path, monkeypatch) -> Path:
    """An empty cache of converted GGUF files."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(gguf_copies, "cache_directory", lambda: tmp_path / "cache")
    return gguf_copies.directory()


def test_a_damaged_gguf_file(copies, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), path, FFN_Q8)
    whole = path.read_bytes()
    for content, said in (
        (b"GGUF and no more", "cannot be loaded as a causal language model|is cut short"),
        (b"PK" + whole[2:], r"is no GGUF file: it begins with b'PKUF'"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "is a big-endian GGUF file"),
        (whole[: len(whole) // 2], r"is cut short or damaged \(.*\): copy or download it again"),
        (whole[:-100], "is cut short or damaged"),
        (whole[:3000], "is cut short or damaged"),
    ):
        path.write_bytes(content)
        for keeps in (True, False):
            with pytest.raises(ModelNotFound, match=said) as caught:
                load_target(tmp_path, keeps_blocks=keeps)
            assert "\n" not in str(caught.value)


def parts_of(target: Any) -> dict[str, Any]:
    """What a target is made of, but for its weights and the folder that its tokenizer names."""
    tokenizer = target.tokenizer
    own = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    return {
        **{name: part for name, part in own.items() if name not in ("model", "tokenizer")},
        "config": target.model.config.to_dict(),
        "generation": target.model.generation_config.to_dict(),
        "name": target.model.name_or_path,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
    }


FROM_CACHE = ["weights, from the cache", "tokenizer, from the cache"]


def test_a_gguf_file_is_parsed_once_and_converted_once(copies, tmp_path, monkeypatch):
    gguf: Any = pytest.importorskip("gguf")
    path, readers, told = tmp_path / "tiny.gguf", [], []
    write_gguf(tiny_llama(), path, FFN_Q8)
    build = gguf.gguf_reader.GGUFReader._build_fields
    monkeypatch.setattr(
        gguf.gguf_reader.GGUFReader, "_build_fields",
        lambda self, *args: readers.append(self) or build(self, *args),
    )  # fmt: skip
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    cold = load_target(path, tell=told.append)
    assert len(readers) == 1
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert told == ["header", "tensor 1 of 21", "tensor 21 of 21", "tokenizer",
                    "keeping what was converted", *FROM_CACHE]  # fmt: skip
    warm = load_target(path, tell=told.append)
    assert len(readers) == 1
    assert told[7:] == FROM_CACHE
    assert find_tokenizer(path).get_vocab() == cold.tokenizer.get_vocab()
    assert len(readers) == 1
    assert parts_of(warm) == parts_of(cold)
    for name, tensor in cold.model.state_dict().items():
        torch.testing.assert_close(warm.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_damaged_copy_is_made_again(copies, tmp_path, caplog):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), path)
    expected = {name: one.clone() for name, one in load_target(path).model.state_dict().items()}
    (folder,) = copies.iterdir()
    for name in ("model.safetensors", "tokenizer.json", "copy.json", "config.json"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 16
        for damaged in (content, content[:20], None):
            caplog.clear()
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            weight = load_target(path).model.state_dict()["lm_head.weight"]
            torch.testing.assert_close(weight, expected["lm_head.weight"], rtol=0, atol=0)
            assert "converting again" in caplog.text
            assert [one.name for one in copies.iterdir()] == [folder.name]


def test_few_copies_are_kept_and_none_of_what_is_gone(copies, tmp_path, monkeypatch, caplog):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), path)
    load_target(path)
    (first,) = copies.iterdir()
    write_gguf(tiny_llama(), path)  # other weights, at the same path and size
    load_target(path)
    (second,) = copies.iterdir()
    assert second != first
    monkeypatch.setattr(gguf_copies, "MAX_KEPT", 2)
    for name in ("b", "c"):
        shutil.copy(path, tmp_path / f"{name}.gguf")
        load_target(tmp_path / f"{name}.gguf")
    assert len([*copies.iterdir()]) == 2
    assert not second.exists()
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "c.gguf").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1))
    load_target(path)
    assert not [*copies.iterdir()]
    assert "is not kept: it takes" in caplog.text


def test_without_a_cache_that_can_be_written_a_gguf_file_is_read(copies, tmp_path, caplog):
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_llama(), path)
    copies.parent.write_text("a file where the folder should be")
    for _ in range(2):
        assert load_target(path).model.dtype == torch.float32
    assert "was not kept" in caplog.text


def test_a_gguf_file_gives_model_tokenizer_and_template(copies, tmp_path, capfd):
    model = tiny_llama()
    write_gguf(model, tmp_path / "tiny.gguf")
    target = load_target(tmp_path)
    assert (target.directory, target.model.name_or_path) == (tmp_path, str(tmp_path))
    assert target.name == "tiny (LlamaForCausalLM)"
    assert target.model.dtype == torch.float32
    assert target.max_seq_len == 128
    assert target.eos_token_ids == (257,)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(target.model.state_dict()[name], tensor, rtol=0, atol=0)
    assert target.tokenizer.encode("hé", add_special_tokens=False) == list("hé".encode())
    assert target.tokenizer.chat_template == TEMPLATE
    assert "de-quantizing" not in capfd.readouterr().err


def test_a_quantized_gguf_file_is_dequantised_and_served(copies, tmp_path):
    model = tiny_llama()
    path = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(model, path, FFN_Q8)
    assert load_target(path).model.dtype == torch.bfloat16
    with compilespec.compile(
        path, "draft_model", draft=path, dtype="float32", backend="eager", max_batch_size=1,
        max_seq_len=48, num_draft_tokens=2,
    ) as engine:  # fmt: skip
        (output,) = engine.chat([{"role": "user", "content": "abc"}])
        assert output.prompt_token_ids == list(b"abc")
        assert set(output.emitted_per_step[:-1]) == {3}  # it drafts for itself

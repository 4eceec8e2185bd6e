"""quantize= and draft_quantize=: the tokens of a quantized target are its own, whoever drafts.

float32 on the interpreted graphs, tokens equal: sums of quantized products have one order, for any
the number of rows.  The slow run has every config that the CPU runs with every method.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, InvalidOption, NotSupported
from compilespec.lowering.artifacts import ArtifactKey, artifact_key
from compilespec.quantization import (
    NAMES,
    Quantize,
    quantize_module,
    read_quantize,
    save_quantized,
)
from compilespec.tracing.load import Target, load_target
from compilespec.tracing.quantized_weights import is_quantized, stand_ins
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.drafters import METHODS as DRAFTERS
from tests.support.models import VOCAB

torchao_quantization = pytest.importorskip("torchao.quantization")

INT4 = NAMES["int4_weight_only"](torch.device("cpu"))  # as a user's config
CONFIGS = (
    "int8_weight_only", "int8_dynamic", "int4_weight_only", "int4_dynamic", "float8_weight_only",
)  # fmt: skip
PROMPTS = [[5, 17, 33, 2, 8], [44, 3, 3, 9, 12, 61, 7], [80]]
PARAMS = SamplingParams(max_new_tokens=25, ignore_eos=True)
OPTIONS: dict[str, Any] = {"backend": "eager", "max_batch_size": 3, "max_seq_len": 64}
K = 2
OWN_WEIGHTS = [name for name in DRAFTERS if name not in ("ngram", "user", "self")]


@functools.cache
def target(dtype: torch.dtype = torch.float32, num_layers: int = 1) -> nn.Module:
    """A model of widths that groups of 32 divide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, head_dim=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


def info_of(model: nn.Module) -> Any:
    holder = Target(model=model, directory=None, tokenizer=None, eos_token_ids=(), max_seq_len=128)
    return describe_target(trace_target(model), holder)


info = functools.cache(info_of)


def drafting(method: str, model: nn.Module) -> dict[str, Any]:
    return {"num_draft_tokens": K, **DRAFTERS[method](model, info(model), K)}


def model_for(method: str) -> nn.Module:
    taps_deeper = method in ("eagle3", "peagle", "dflash", "dspark")  # hidden states up to hs[2]
    return target(num_layers=2 if taps_deeper else 1)


def tokens(engine: Any) -> list[list[int]]:
    found = [list(output.token_ids) for output in engine.generate(PROMPTS, PARAMS)]
    assert engine.stats().num_recompiles == 0
    return found


def products(engine: Any, phase: str = "decode") -> dict[str, list[str]]:
    """The weights of each operator that multiplies by one."""
    found: dict[str, list[str]] = {}
    for node in engine.graphs[phase].graph_module.graph.nodes:
        name = str(node.target)
        if "linear" in name or ".mm" in name or "addmm" in name:
            weight = node.args[1].meta.get("role", "?")
            found.setdefault(name.split(".")[1], []).append(weight)
    return found


@functools.cache
def plain_tokens(config: str | None, num_layers: int = 1) -> list[list[int]]:
    model = target(num_layers=num_layers)
    with compilespec.compile(model, "none", quantize=config, **OPTIONS) as engine:
        return tokens(engine)


def pairs() -> Iterator[Any]:
    chosen = {("int8_dynamic", "ngram")}  # others in `test_one_is_quantized_and_the_other_not`
    for config in CONFIGS:
        for method in DRAFTERS:
            marks = () if (config, method) in chosen else pytest.mark.slow
            yield pytest.param(config, method, marks=marks, id=f"{config}-{method}")


@pytest.mark.parametrize(("config", "method"), list(pairs()))
def test_speculative_equals_plain_decoding_of_the_same_target(config: str, method: str) -> None:
    """The drafter is quantized too, in another way, where it has weights."""
    other = CONFIGS[(CONFIGS.index(config) + 1) % len(CONFIGS)]
    if other.startswith("int4"):  # the tiny drafters' widths are not all multiples of 32
        other = "float8_weight_only"
    more = {"draft_quantize": other} if method in OWN_WEIGHTS else {}
    model = model_for(method)
    num_layers = model.config.num_hidden_layers
    with compilespec.compile(
        model, method, quantize=config, **more, **drafting(method, model), **OPTIONS
    ) as engine:
        assert tokens(engine) == plain_tokens(config, num_layers)
        used = products(engine)
        assert (
            not {"mm", "addmm", "quantized_linear", "dynamic_int8_linear", "grouped_linear"}
            & used.keys()
        )
        of_target = [w for ws in used.values() for w in ws if w.startswith("packed.target.")]
        # q, k and v are one product, gate and up another; a layer has o and down; the head
        assert len(set(of_target)) == num_layers * 4 + 1
        why = " ".join(engine.plan()["why"])
        assert f"of {num_layers * 7 + 1} products" in why.partition("target quantized: ")[2]
        assert ("draft quantized: " in why) == (method in OWN_WEIGHTS)


def test_configs_give_scores_of_their_own_near_the_models() -> None:
    """What this file compares is no constant, and quantizing is no damage."""
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        own = target()(ids).logits
        found = [quantize_module(target(), Quantize(name))(ids).logits for name in CONFIGS]
    errors = [float((logits - own).norm() / own.norm()) for logits in found]
    for error, bound in zip(errors, (0.02, 0.04, 0.5, 0.5, 0.08), strict=True):
        assert bound / 10 < error < bound
    assert plain_tokens("int8_dynamic") != plain_tokens(None)


@pytest.mark.parametrize("which", ["draft", "target"])
def test_one_is_quantized_and_the_other_not(which: str) -> None:
    """T20: each keeps its own config; a head that they share follows the target."""
    if which == "draft":
        model, more = target(), {"draft_quantize": "int8"}
    else:  # before, so that the draft is made for the quantized one
        model, more = quantize_module(target(), Quantize("int8_weight_only")), {}
    with compilespec.compile(
        model, "eagle", **more, **drafting("eagle", model), **OPTIONS
    ) as engine:
        assert tokens(engine) == plain_tokens("int8_weight_only" if which == "target" else None)
        used = products(engine)
        quantized, plain = used["packed_quantized_linear"], used["packed_linear"]
        other = "target" if which == "draft" else "draft"
        heads = [name for name in quantized if "lm_head" in name]
        assert all(name.startswith(f"packed.{other}") for name in plain)
        assert all(name.startswith(f"packed.{which}") for name in quantized)
        assert len(set(heads)) == 1
        assert len(heads) == (K + 1 if which == "target" else K)


def test_a_head_alone() -> None:
    """For a draft that shares the target's head: it then has its own quantized one."""
    asked, model = Quantize("int8", only="lm_head"), target()
    with compilespec.compile(
        model, "eagle", draft_quantize=asked, **drafting("eagle", model), **OPTIONS
    ) as engine:
        assert tokens(engine) == plain_tokens(None)
        assert set(products(engine)["packed_quantized_linear"]) == {
            "packed.draft.lm_head.weight.qdata"
        }


def test_the_users_model_is_left_as_it_is() -> None:
    model = copy.deepcopy(target(num_layers=2))
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    changed = quantize_module(model, Quantize("int8_weight_only", skip=("*.mlp", "lm_head")))
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    quantized = {name for name, p in changed.named_parameters() if is_quantized(p)}
    assert quantized == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"
    }
    assert changed.model.embed_tokens.weight is model.model.embed_tokens.weight
    with stand_ins(changed) as found:
        assert len(found) == 8
        assert not any(is_quantized(p) for p in changed.parameters())
    assert {name for name, p in changed.named_parameters() if is_quantized(p)} == quantized


def test_a_model_that_torchao_quantized_in_place() -> None:
    model = copy.deepcopy(target())
    torchao_quantization.quantize_(model, read_quantize("int8").config_on(torch.device("cpu")))
    with compilespec.compile(model, "none", **OPTIONS) as engine:
        assert tokens(engine) == plain_tokens("int8_weight_only")


def test_a_saved_model_starts_without_the_full_precision_weights(tmp_path: Any) -> None:
    """What transformers loads, with its `TorchAoConfig`, runs as it is."""
    from safetensors import safe_open

    saved = save_quantized(target(), tmp_path / "saved", "int8")
    with safe_open(saved / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    qdata = [name for name, tensor in stored.items() if name.endswith("qdata")]
    assert len(qdata) == 8
    assert all(stored[name].dtype == torch.int8 for name in qdata)
    wide = {n for n, t in stored.items() if t.dtype == torch.float32 and t.numel() > VOCAB}
    assert wide == {"model.embed_tokens.weight"}
    with compilespec.compile(saved, "none", **OPTIONS) as engine:
        assert tokens(engine) == plain_tokens("int8_weight_only")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Any, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be made a directory"):
        save_quantized(target(), tmp_path / place, "int8")


def test_a_head_keeps_eight_bits_where_four_are_not_asked_for_by_name() -> None:
    usual = quantize_module(target(), Quantize("int4_weight_only"))
    asked = quantize_module(target(), Quantize("int4_weight_only", only="lm_head"))
    named = quantize_module(target(), read_quantize(INT4))
    kinds = [type(one.lm_head.weight).__name__ for one in (usual, asked, named)]
    assert kinds == ["Int8Tensor", "IntxUnpackedToInt8Tensor", "IntxUnpackedToInt8Tensor"]
    assert type(usual.model.layers[0].mlp.up_proj.weight).__name__ == "IntxUnpackedToInt8Tensor"


@pytest.mark.parametrize(
    ("kind", "skip"),
    [("int8_weight_only", "lm_head"), ("int8_weight_only", ()), ("int4_weight_only", ())],
    ids=["head_kept", "head_too", "head_otherwise"],
)
def test_a_saved_tied_model_is_loaded(tmp_path: Any, kind: str, skip: Any) -> None:
    config = copy.deepcopy(target().config)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    asked = Quantize(kind, skip=skip)
    loaded = load_target(save_quantized(model, tmp_path / "saved", asked)).model
    assert model.config.tie_word_embeddings
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embedding) == (skip == "lm_head")
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(loaded(ids).logits, quantize_module(model, asked)(ids).logits)


def test_the_artifact_key_knows_the_config_and_not_the_numbers() -> None:
    def key(quantize: str | None, model: nn.Module) -> ArtifactKey:
        program = compilespec.trace(
            model, "none", quantize=quantize, max_batch_size=3, max_seq_len=64, keep_graphs=False
        )
        return artifact_key(program.graphs["decode"], program, {})

    scaled = copy.deepcopy(target())
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(1.25)
    keys = [key(config, target()) for config in ("int8", "int8_dynamic")]
    assert len(set(keys)) == 2
    assert key("int8", scaled) == keys[0]


def test_the_kinds_product_is_torchaos() -> None:
    """`lower_quantized` against the subclass's own code: exact for int8 on both sides."""
    x = torch.randn(7, 64)
    for name in CONFIGS:
        layer = nn.Sequential(nn.Linear(64, 33))
        quantized = quantize_module(layer, Quantize(name))
        with torch.no_grad():
            want = quantized(x)
        got = _lowered(quantized, x)
        if name == "int8_dynamic":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def _lowered(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from compilespec.ops.quantized_linear import LAYOUTS, dynamic_int8_linear, quantized_linear
    from compilespec.quantization.grouped import GroupedIntTensor

    weight, bias = module[0].weight, module[0].bias
    if isinstance(weight, GroupedIntTensor):
        return torch.ops.compilespec.packed_grouped_linear(
            x, LAYOUTS["quad_nibbles"](weight.qdata), LAYOUTS["groups"](weight.scale), bias, 33,
            LAYOUTS["groups"](weight.zero_point),
        )  # fmt: skip
    if getattr(weight, "act_quant_kwargs", None) is not None:
        return dynamic_int8_linear(x, weight.qdata, weight.scale, bias)
    zero = getattr(weight, "zero_point", None)
    return quantized_linear(x, weight.qdata, weight.scale, bias, 8, zero)


@pytest.mark.parametrize("config", ["float8_dynamic", "Int4WeightOnlyConfig"])
def test_what_the_device_cannot_run_is_an_error_that_names_what_it_can(config: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    asked = config
    if config == "Int4WeightOnlyConfig":
        asked = torchao_quantization.Int4WeightOnlyConfig(group_size=32)
    with pytest.raises(NotSupported) as caught:
        compilespec.compile(target(), quantize=asked, **OPTIONS)
    text = str(caught.value)
    assert text.startswith(f"quantize='{config}' does not run on cpu")
    assert text.endswith(
        "int8_weight_only, int8_dynamic, int8_nested, int4_weight_only, int4_dynamic, file, "
        "float8_weight_only"
    )
    assert "\n" not in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"quantize": "int8", "dtype": "float64"}, "give dtype='float32' or 'bfloat16'"),
        (lambda: {"quantize": Quantize("int8", only="no.such")}, "matches no module"),
        (lambda: {"quantize": object()}, "quantize must be one of int8_weight_only"),
        (lambda: {"draft_quantize": "int8"}, "needs a drafting method"),
    ],
    ids=["float64", "no module", "no config", "no drafter"],
)
def test_bad_requests_name_the_cure(make: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        compilespec.compile(copy.deepcopy(target()), **make(), **OPTIONS)


def test_a_size_that_does_not_suit_is_told_from_a_device() -> None:
    model = nn.Sequential(nn.Linear(48, 48))
    with pytest.raises(InvalidOption, match=r"does not suit the size .* skip="):
        quantize_module(model, Quantize("int4_weight_only"))


@pytest.mark.parametrize("config", CONFIGS)
def test_verify_finds_nothing(config: str) -> None:
    """Where rows are quantized on the way, differences of rounding do not stay small."""
    program = compilespec.trace(
        target(), "eagle", quantize=config, draft_quantize="int8", max_batch_size=3,
        max_seq_len=64, **drafting("eagle", target()),
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)


@pytest.mark.parametrize("config", CONFIGS)
def test_on_inductor(config: str, inductor_cache_dir: Any) -> None:
    """bfloat16, too: plain and speculative of one target; a second start compiles nothing."""
    options = {**OPTIONS, "backend": "inductor", "quantize": config}
    model = target(torch.bfloat16)
    with compilespec.compile(model, "none", **options) as engine:
        wanted = tokens(engine)
    for _ in range(2):
        with compilespec.compile(
            model, "draft_model", draft=copy.deepcopy(model), num_draft_tokens=3,
            draft_quantize=config, **options,
        ) as engine:  # fmt: skip
            assert tokens(engine) == wanted
            assert engine.stats().acceptance_length > 3.5

"""An attached model of PEFT uses the adapter that is active, as PEFT itself does."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import compilespec
from compilespec.errors import InvalidOption, NotSupported
from tests.support.models import tiny_target

OPTIONS: dict[str, Any] = {"spec": "ngram", "num_draft_tokens": 3, "backend": "eager"}
PROMPTS = torch.tensor([[0, 0, 5, 9, 5], [7, 8, 9, 7, 8], [0, 3, 3, 3, 3]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1]])

needs_peft = pytest.mark.filterwarnings("ignore::FutureWarning")  # of its calls of transformers


def tokens_of(model: Any, **call: Any) -> list[list[int]]:
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    ids: Tensor = model.generate(input_ids=PROMPTS, attention_mask=MASK, **given, **call)
    return ids.tolist()


def lora(**changes: Any) -> Any:
    import peft

    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    return peft.LoraConfig(
        **{**given, **changes}, task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.1
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """A PeftModel with two adapters as it is, and an attached one with the same weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-peft")
    torch.manual_seed(1)
    plain = peft.get_peft_model(tiny_target("llama", torch.float32, num_layers=2), lora())
    plain.add_adapter("other", lora(r=3, target_modules=["v_proj", "q_proj"], use_rslora=True))
    plain.eval()
    attached = copy.deepcopy(plain)
    assert compilespec.attach(attached, **OPTIONS) is attached
    yield plain, attached
    compilespec.detach(attached)


@needs_peft
def test_the_active_adapter_is_used(pair: tuple[Any, Any]) -> None:
    seen = []
    engine = compilespec.engine_of(pair[1])
    for name in ("default", "other", "default"):
        for model in pair:
            model.set_adapter(name)
        seen.append(tokens_of(pair[0]))
        assert tokens_of(pair[1]) == seen[-1]
        assert tokens_of(pair[1], repetition_penalty=1.4) == tokens_of(
            pair[0], repetition_penalty=1.4
        )
    with pair[0].disable_adapter(), pair[1].disable_adapter():
        seen.append(tokens_of(pair[0]))
        assert tokens_of(pair[1]) == seen[-1]
    assert tokens_of(pair[1]) == seen[0]  # and it is in use again
    assert len({str(one) for one in seen}) == 3
    assert compilespec.engine_of(pair[1]) is engine
    assert engine.weights_version == 0


@needs_peft
def test_what_is_trained_is_taken_over(pair: tuple[Any, Any]) -> None:
    before = tokens_of(pair[1])
    for model in pair:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B.default" in name:
                    weight.mul_(-1.5)
    assert tokens_of(pair[1]) == tokens_of(pair[0]) != before
    trained = tokens_of(pair[1])
    for model in pair:
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.2)
    assert tokens_of(pair[1]) == tokens_of(pair[0]) != trained
    engine = compilespec.engine_of(pair[1])
    assert engine.weights_version == 0  # the model's own did not change
    for model in pair:
        with torch.no_grad():
            model.get_base_model().lm_head.weight.mul_(-1)
    assert tokens_of(pair[1]) == tokens_of(pair[0])
    assert engine.weights_version == 1


@needs_peft
def test_an_adapter_without_room_compiles_anew(pair: tuple[Any, Any]) -> None:
    engine = compilespec.engine_of(pair[1])
    torch.manual_seed(5)
    weights = None
    for model in pair:
        model.add_adapter("wide", lora(r=9, target_modules=["o_proj"]))
        model.set_adapter("wide")
        state = {name: value for name, value in model.state_dict().items() if "wide" in name}
        weights = weights or state
        model.load_state_dict(weights, strict=False)
        model.eval()
    assert tokens_of(pair[1]) == tokens_of(pair[0])
    assert compilespec.engine_of(pair[1]) is not engine
    for model in pair:
        model.delete_adapter("wide")
        model.set_adapter("other")
    assert tokens_of(pair[1]) == tokens_of(pair[0])


@needs_peft
def test_what_peft_computes_otherwise_is_refused(pair: tuple[Any, Any]) -> None:
    import peft

    plain, attached = pair
    with pytest.raises(NotSupported, match=r"adapter_names= is not read; call set_adapter"):
        tokens_of(attached, adapter_names=["default", "other", "__base__"])
    for model in pair:
        model.set_adapter("default")
    assert tokens_of(attached) == tokens_of(plain)  # no hook is left
    attached.base_model.set_adapter(["default", "other"])
    with pytest.raises(NotSupported, match=r"several adapters are active; combine them by"):
        tokens_of(attached)
    attached.set_adapter("default")
    attached.merge_adapter()
    for served in (tokens_of, compilespec.attach):
        with pytest.raises(NotSupported, match=r"merged into the weights; call unmerge_adapter"):
            served(attached)
    attached.unmerge_adapter()
    compilespec.attach(attached, **OPTIONS)
    attached.train()
    with pytest.raises(NotSupported, match=r"call model\.eval\(\)"):
        tokens_of(attached)
    attached.eval()
    for config, reason in (
        (lora(use_dora=True), "PEFT's adapter 'default': use_dora is set"),
        (lora(modules_to_save=["lm_head"]), "modules_to_save is set"),
        (lora(target_modules=["embed_tokens"]), "Embedding of PEFT is not read"),
        (peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
         "peft_type is 'IA3'; expected 'LORA'"),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "'PROMPT_TUNING'"),
    ):  # fmt: skip
        model = peft.get_peft_model(tiny_target("llama", torch.float32, num_layers=1), config)
        with pytest.raises(NotSupported, match=reason):
            compilespec.attach(model, **OPTIONS)
    model = peft.get_peft_model(tiny_target("llama", torch.float32, num_layers=1), lora())
    with pytest.raises(InvalidOption, match="leave adapters= out"):
        compilespec.attach(model, adapters={}, **OPTIONS)
    model.get_base_model().forward = lambda *args, **given: None
    with pytest.raises(NotSupported, match=r"a forward of its own .* \(del model\.forward\)"):
        compilespec.attach(model, **OPTIONS)


@needs_peft
def test_an_attached_model_may_get_adapters_and_lose_them(pair: tuple[Any, Any]) -> None:
    import peft

    model = compilespec.attach(tiny_target("llama", torch.float32, num_layers=2).eval(), **OPTIONS)
    plain = tokens_of(model)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, lora()).eval()
    adapted = tokens_of(wrapped)
    assert adapted != plain
    assert compilespec.detach(wrapped) is wrapped
    assert tokens_of(wrapped) == adapted
    compilespec.attach(wrapped, **OPTIONS)
    assert tokens_of(wrapped.unload()) == plain
    compilespec.detach(model)


def test_wrappers_of_accelerate_are_served_or_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    model: Any = tiny_target("llama", torch.float32, num_layers=2).eval()
    expected = tokens_of(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = compilespec.attach(accelerator.prepare(model), **OPTIONS)
    assert tokens_of(prepared) == expected
    assert compilespec.engine_of(accelerator.unwrap_model(prepared)).stats().num_emitted > 0
    compilespec.detach(prepared)
    parallel = torch.nn.Module()
    parallel.module = model
    for wrapper in (parallel, torch.compile(model)):
        with pytest.raises(InvalidOption, match=r"accelerator\.unwrap_model\(model\)"):
            compilespec.attach(wrapper, **OPTIONS)
    for name in ("_original_forward", "_hf_hook"):
        model.__dict__[name] = types.SimpleNamespace()
        with pytest.raises(NotSupported, match="keep_fp32_wrapper=False"):
            compilespec.attach(model, **OPTIONS)
        del model.__dict__[name]

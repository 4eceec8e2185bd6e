"""Other weights for an engine that runs: tokens, refusals, requests in flight, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, InvalidOption, NotSupported, SpecError
from compilespec.methods.eagle3 import random_head
from compilespec.methods.eagle3.save import save_head
from compilespec.quantization import Quantize, quantize_module
from compilespec.runtime.engine import Engine
from compilespec.runtime.outputs import GenerationOutput
from compilespec.tracing.checkpoint_files import read_tensors
from tests.support.adapters import write_adapter
from tests.support.drafters import traced_info
from tests.support.models import even_target, tiny_target

SMALL: dict[str, Any] = {"backend": "eager", "max_batch_size": 2, "max_seq_len": 64}
PROMPTS = [list(range(5, 30)), [9, 8, 7, 9, 8, 7, 9, 8]]
Drafter = Callable[[nn.Module], dict[str, Any]]


def params(count: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **fields)


def run(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Tokens, and how many each step emitted: they tell of target and drafter."""
    outputs = engine.generate(PROMPTS, params())
    return [(one.token_ids, one.emitted_per_step) for one in outputs]


def plain(model: nn.Module) -> dict[str, Any]:
    return {}


def ngram(model: nn.Module) -> dict[str, Any]:
    return {"spec": "ngram", "num_draft_tokens": 2}


def head(model: nn.Module) -> dict[str, Any]:
    """A head that shares the target's embedding and head, of which it keeps some rows."""
    draft = random_head(traced_info(model), aux_layers=(0, 1, 2), own_lm_head=False)
    counts = dict.fromkeys(range(0, 96, 2), 1)
    some = {"draft_vocab_size": 48, "draft_vocab_counts": counts}
    return {"spec": "eagle3", "draft": draft, "num_draft_tokens": 2, **some}


def quantized_head(model: nn.Module) -> dict[str, Any]:
    """A head with copies of what it shares."""
    draft = random_head(traced_info(model), aux_layers=(0, 1, 2), own_lm_head=False)
    given = {"spec": "eagle3", "draft": draft, "num_draft_tokens": 2}
    return {**given, "draft_quantize": "int8_weight_only"}


def itself(model: nn.Module) -> dict[str, Any]:
    return {"spec": "self", "num_draft_tokens": 2}


def family(name: str, dtype: torch.dtype = torch.float32) -> Callable[[int], nn.Module]:
    return lambda seed: tiny_target(name, dtype, seed=seed, num_layers=2)


def even(seed: int) -> nn.Module:
    return even_target(num_layers=2, seed=seed)


CASES: dict[str, tuple[Callable[[int], nn.Module], Drafter, dict[str, Any]]] = {
    "plain": (family("qwen2"), plain, {}),
    "tied": (family("gemma3"), ngram, {}),
    "latents": (family("deepseek_v3"), plain, {}),
    "head": (family("llama"), head, {}),
    "quantized_head": (even, quantized_head, {}),
    "self": (even, itself, {}),
    "int8": (even, plain, {"quantize": "int8_weight_only"}),
    "int4_self": (even, plain, {"quantize": "int4_dynamic"}),
    "nested": (even, itself, {"quantize": "int8_nested"}),
    "tied_int8": (family("gemma3"), plain, {"quantize": "int8_dynamic"}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_an_engine_with_these_weights(case: str) -> None:
    make, drafter, options = CASES[case]
    model, other = make(0), make(1)
    state = other.state_dict()
    with compilespec.compile(other, **drafter(other), **options, **SMALL) as fresh:
        wanted = run(fresh)
    with compilespec.compile(model, **drafter(model), **options, **SMALL) as engine:
        before = run(engine)
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert before != wanted
        assert engine.update_weights(state) == engine.weights_version == 1
        assert run(engine) == wanted
        engine.update_weights((name, tensor) for name, tensor in old.items())
        assert run(engine) == before
        half = [name for name in state if ".layers.0." in name]
        engine.update_weights({name: state[name] for name in half})
        engine.update_weights({name: state[name] for name in state if name not in half})
        assert run(engine) == wanted
        assert engine.stats().num_recompiles == 0


# --- one engine, between the weights of two models ---


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    return tiny_target("llama", seed=0, num_layers=2), tiny_target("llama", seed=1, num_layers=2)


@pytest.fixture(scope="module")
def states(models: tuple[nn.Module, nn.Module]) -> list[dict[str, Tensor]]:
    """The weights of both, which stay as they are: the engine changes those of its model."""
    return [{n: t.clone() for n, t in model.state_dict().items()} for model in models]


@pytest.fixture(scope="module")
def made(models: tuple[nn.Module, nn.Module]) -> Iterator[Engine]:
    options = {**SMALL, "max_prefill_tokens": 16, "spec": "ngram", "num_draft_tokens": 2}
    with compilespec.compile(models[0], **options) as engine:
        yield engine


@pytest.fixture
def engine(made: Engine, states: Sequence[dict[str, Tensor]]) -> Engine:
    made.update_weights(states[0])
    return made


@pytest.fixture(scope="module")
def both(made: Engine, states: Sequence[dict[str, Tensor]]) -> list[list[list[int]]]:
    """The tokens of the prompts with the weights of each model."""
    found = []
    for state in states:
        made.update_weights(state)
        found.append([one.token_ids for one in made.generate(PROMPTS, params(20))])
    assert found[0] != found[1]
    return found


def wrong(state: dict[str, Tensor]) -> dict[str, Any]:
    name = "model.layers.1.mlp.up_proj.weight"
    return {
        "name": [*state.items(), ("model.layers.7.mlp.up_proj.weight", state[name])],
        "shape": {**state, name: state[name][:-1]},
        "dtype": {**state, name: state[name].float()},
        "twice": [*state.items(), (name, state[name])],
        "kind": {**state, name: state[name].tolist()},
        "module": nn.Linear(2, 2),
        "no state": 5,
    }


@pytest.mark.parametrize("fault", wrong({"model.layers.1.mlp.up_proj.weight": torch.ones(2)}))
def test_a_wrong_update_changes_nothing(
    fault: str, engine: Engine, states: Sequence[dict[str, Tensor]], both: list[list[list[int]]]
) -> None:
    version = engine.weights_version
    with pytest.raises((CheckpointError, InvalidOption)) as caught:
        engine.update_weights(wrong(states[1])[fault])
    message = str(caught.value)
    assert message.startswith("update_weights: ")
    assert "\n" not in message
    if fault in ("shape", "dtype", "twice", "kind"):
        assert "model.layers.1.mlp.up_proj.weight" in message
    if fault == "name":
        assert "model.layers.7.mlp.up_proj.weight" in message
    assert engine.weights_version == version
    assert [one.token_ids for one in engine.generate(PROMPTS, params(20))] == both[0]


def test_what_cannot_change_is_refused_by_name(
    engine: Engine, states: Sequence[dict[str, Tensor]]
) -> None:
    with pytest.raises(InvalidOption, match=r"draft= needs a drafter .* spec='ngram' has none"):
        engine.update_weights(None, draft={})
    with pytest.raises(InvalidOption, match="policy"):
        engine.update_weights(states[0], policy="later")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected plain numbers"):
        engine.update_weights({"lm_head.weight": states[0]["lm_head.weight"].to("meta")})


def test_a_drafters_checkpoint_is_read_as_at_the_start(tmp_path: Path) -> None:
    """By the names of its files, or by those of its module; with a head that the target shares."""
    model = tiny_target("llama", seed=0, num_layers=2)
    info = traced_info(model)
    for seed in (0, 1):
        save_head(random_head(info, aux_layers=(0, 1, 2), seed=seed), tmp_path / str(seed))
    draft = read_tensors(tmp_path / "1")
    options = {**SMALL, "spec": "eagle3", "num_draft_tokens": 2}
    with compilespec.compile(model, draft=tmp_path / "1", **options) as fresh:
        wanted = {name: tensor.clone() for name, tensor in fresh.executor.weights.items()}
    with compilespec.compile(model, draft=tmp_path / "0", **options) as engine:
        tokens = run(engine)
        found = engine.executor.weights
        assert any(not torch.equal(found[name], tensor) for name, tensor in wanted.items())
        with pytest.raises(CheckpointError, match=r"expected fc\.weight"):
            engine.update_weights(None, draft={"fc.weights": draft["fc.weight"]})
        engine.update_weights(None, draft=draft)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        with pytest.raises(NotSupported, match=r"the drafter's embed_tokens.* the target's own"):
            engine.update_weights(
                None, draft={"embed_tokens.weight": model.model.embed_tokens.weight}
            )
        assert [one[0] for one in run(engine)] == [one[0] for one in tokens]


def test_merged_and_quantized_weights_of_a_checkpoint_stay(tmp_path: Path) -> None:
    model = even(0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = quantize_module(model, Quantize("int8_weight_only", only="*.self_attn.*"))
    write_adapter(tmp_path, model, ["down_proj"])
    with compilespec.compile(stored, adapters=tmp_path, **SMALL) as engine:
        for name, why in (
            ("model.layers.0.self_attn.q_proj.weight", "it is quantized in the checkpoint"),
            ("model.layers.1.mlp.down_proj.weight", "adapter .* was merged into it"),
        ):
            with pytest.raises(NotSupported, match=f"{name} cannot be changed: {why}"):
                engine.update_weights({name: state[name]})
        engine.update_weights({"model.norm.weight": state["model.norm.weight"]})


def test_with_finish_those_that_run_end_with_the_old_weights(
    engine: Engine, states: Sequence[dict[str, Tensor]], both: list[list[list[int]]]
) -> None:
    old = engine.weights_version
    requests = [engine.submit(prompt, params(20)) for prompt in [*PROMPTS, *PROMPTS]]
    for _ in range(4):
        engine.step()
    engine.update_weights(states[1])
    assert [one.finished for one in requests] == [True, True, False, False]
    while engine.has_work:
        engine.step()
    outputs = [one.output() for one in requests]
    assert [one.token_ids for one in outputs] == both[0] + both[1]
    assert [one.weights_versions for one in outputs] == [((0, old),)] * 2 + [((0, old + 1),)] * 2
    assert [one.num_cached_tokens for one in outputs[2:]] == [0, 0]


def continued(models: Sequence[nn.Module], prompt: list[int], first: list[int], count: int) -> Any:
    """Greedy tokens of the second model over the keys and values of the first one."""
    before, after = models
    cache = before(torch.tensor([[*prompt, *first[:-1]]]), use_cache=True).past_key_values
    tokens = list(first)
    while len(tokens) < count:
        logits = after(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def test_with_continue_those_that_run_go_on_from_a_marked_token(
    engine: Engine, states: Sequence[dict[str, Tensor]], both: list[list[list[int]]]
) -> None:
    old = engine.weights_version
    requests = [engine.submit(prompt, params(20)) for prompt in PROMPTS]
    while not all(len(one.output_token_ids) > 5 for one in requests):
        engine.step()
    engine.update_weights(states[1], policy="continue")
    counts = [len(one.output_token_ids) for one in requests]
    while engine.has_work:
        engine.step()
    others = [tiny_target("llama", seed=seed, num_layers=2) for seed in (0, 1)]
    for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
        output = request.output()
        assert output.weights_versions == ((0, old), (count, old + 1))
        assert output.weights_version == old + 1
        first = both[0][index][:count]
        assert output.token_ids == continued(others, PROMPTS[index], first, 20)
        assert output.num_preemptions == 0
    found = engine.generate(PROMPTS, params(20))  # finds nothing that they computed
    assert [one.token_ids for one in found] == both[1]
    assert [one.num_cached_tokens for one in found] == [0, 0]


def test_with_continue_a_prompt_that_is_being_read_is_read_anew(
    engine: Engine, states: Sequence[dict[str, Tensor]], both: list[list[list[int]]]
) -> None:
    request = engine.submit(PROMPTS[0], params(20))  # 25 tokens, 16 a step
    engine.step()
    assert not request.output_token_ids
    engine.update_weights(states[1], policy="continue")
    while engine.has_work:
        engine.step()
    output = request.output()
    assert output.token_ids == both[1][0]
    assert output.weights_versions == ((0, engine.weights_version),)


def test_a_cached_prefix_is_not_found_again(
    engine: Engine, states: Sequence[dict[str, Tensor]], both: list[list[list[int]]]
) -> None:
    engine.generate(PROMPTS, params(2))
    assert engine.generate(PROMPTS[0], params(2))[0].num_cached_tokens > 0
    engine.update_weights(states[1])
    (output,) = engine.generate(PROMPTS[0], params(20))
    assert output.num_cached_tokens == 0
    assert output.token_ids == both[1][0]


def test_an_update_that_breaks_off_closes_the_engine() -> None:
    """Weights of two versions serve nobody."""
    model = tiny_target("llama", seed=0, num_layers=2)
    with compilespec.compile(model, **SMALL) as engine:
        updates = engine._options.updates
        assert updates is not None

        def fail(writes: object) -> None:
            raise MemoryError("no room")

        updates.apply = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            engine.update_weights(tiny_target("llama", seed=1, num_layers=2))
        with pytest.raises(SpecError, match="closed"):
            engine.generate(PROMPTS)


# --- under load ---


def check_versions(
    outputs: Sequence[GenerationOutput], first: int, both: list[list[list[int]]]
) -> None:
    """Every output is of one version, and has that version's tokens."""
    for index, output in enumerate(outputs):
        ((start, version),) = output.weights_versions
        assert start == 0
        assert output.token_ids == both[(version - first) % 2][index % 2]


@pytest.mark.parametrize("number", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_updates_under_load(
    number: int, models: Sequence[nn.Module], both: list[list[list[int]]], states: Any
) -> None:
    """A thread asks all the time; half of the updates wait for those that run."""
    model = tiny_target("llama", seed=0, num_layers=2)
    outputs: list[GenerationOutput] = []
    stop = threading.Event()
    with compilespec.compile(model, **SMALL, spec="ngram", num_draft_tokens=2).serve() as server:

        def ask() -> None:
            while not stop.is_set():
                outputs.extend(server.generate(PROMPTS, params(20)))

        client = threading.Thread(target=ask)
        client.start()
        sizes = []
        compiled = torch._dynamo.utils.counters["stats"].copy()
        try:
            for index in range(number):
                assert server.update_weights(states[(index + 1) % 2]) == index + 1
                sizes.append(num_bytes())
        finally:
            stop.set()
            client.join(60)
        assert server.stats().num_recompiles == 0
        assert torch._dynamo.utils.counters["stats"] == compiled
    assert len({one.weights_version for one in outputs}) > 1
    check_versions(outputs, 0, both)
    assert sizes[-1] - sizes[number // 2] < 8 * 2**20


def num_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_stream_is_read_while_an_update_waits_for_it(
    models: Sequence[nn.Module], states: Any, both: list[list[list[int]]]
) -> None:
    """With "continue" nothing waits; with "finish" tokens still come."""
    model = tiny_target("llama", seed=0, num_layers=2)
    with compilespec.compile(model, **SMALL).serve() as server:
        ticket = server.submit(PROMPTS[0], params(20))
        next(iter(ticket_deltas := iter(ticket)))
        done = threading.Thread(target=server.update_weights, args=(states[1],))
        done.start()
        for _ in ticket_deltas:
            pass
        done.join(60)
        assert ticket.result(60).token_ids == both[0][0]
        assert ticket.result(60).weights_versions == ((0, 0),)
        late = server.submit(PROMPTS[1], params(20))
        assert late.result(60).token_ids == both[1][1]
        with pytest.raises(CheckpointError):
            server.update_weights({"x": torch.ones(1)}, policy="continue")
        assert server.weights_version == 1

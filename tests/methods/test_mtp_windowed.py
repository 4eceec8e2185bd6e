"""Windowed drafting: every draft equals that of a recomputation from scratch.

The reference calls the modules over the whole sequence, without a cache, at every step; the engine
keeps a ring of K pairs and a cache a module, poisoned with NaN before the first request.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import InvalidOption
from compilespec.methods import mtp
from compilespec.methods.base import Drafter
from compilespec.methods.capabilities import FINAL_NORM, Capabilities, Chain
from compilespec.methods.capture import capture_windowed
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.target_info import TargetInfo
from tests.support.models import (
    VOCAB,
    Ask,
    ask_all,
    assert_nothing_held,
    run_traffic,
    target_info,
    tiny_target,
)

MAX_SEQ_LEN = 75
WIDTH = 48
SIZES = ((1, 26), (40, 35), (16, 17), (64, 11), (70, 5), (74, 1), (2, 9), (3, 20))


class Step(nn.Module):
    """One module: attention over [embedding ; hidden], and a head that a script may replace.

    Where the script knows what follows a token, the draft is right; elsewhere it is the random
    head's, so it depends on every row of the module's cache.
    """

    def __init__(self, index: int, target: nn.Module, script: Tensor, window: int = 0) -> None:
        super().__init__()
        self.index, self.window = index, window
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        torch.manual_seed(100 + index)
        self.mix = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.mix.weight.mul_(3)
            self.qkv.weight.mul_(3)
        self.places = nn.Parameter(torch.randn(MAX_SEQ_LEN, WIDTH, dtype=torch.float64))
        self.register_buffer("script", script)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed = self.mix(torch.cat([self.embedding(input_ids), hidden], -1))
        mixed = mixed + self.places[position_ids]
        batch, length, _ = mixed.shape
        heads = self.qkv(mixed).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        seen = torch.ops.compilespec.attention(*heads, 0.3, self.window, 0.0, None)
        recycled = torch.tanh(mixed + seen.flatten(2))
        keys = torch.stack([position_ids + self.index, input_ids], -1).to(hidden.dtype)
        return torch.cat([recycled, keys], -1), recycled

    def propose(self, head_input: Tensor) -> Tensor:
        place, token = head_input[:, -2].long(), head_input[:, -1].long()
        known = self.script[place.clamp(max=MAX_SEQ_LEN), token]
        drawn = self.head(head_input[:, :-2]).argmax(-1)
        return torch.where(known >= 0, known, drawn).to(torch.int32)


class WindowedDrafter(Drafter):
    def __init__(
        self, steps: list[Step], chain: Chain, kv_block_sizes: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.steps, self.chain = nn.ModuleList(steps), chain
        self.kv_block_sizes = kv_block_sizes
        self.num_draft_tokens, self.aux_layers = len(steps), (FINAL_NORM,)

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        return capture_windowed(self, config, info)


class Windowed:
    capabilities = Capabilities(
        name="windowed", kind="windowed", reads_hidden_states=True, own_kv_cache=True
    )

    def __init__(self, drafter: WindowedDrafter) -> None:
        self.drafter = drafter

    def load(self, draft: Any, target: TargetInfo, options: Mapping[str, Any]) -> Drafter:
        return self.drafter


def fresh_drafts(
    model: nn.Module, drafter: WindowedDrafter, tokens: list[int], k: int
) -> list[int]:
    """K drafts after `tokens`, the last of which is the bonus token; nothing is cached."""
    ids = torch.tensor([tokens])
    truth = model.model(ids[:, :-1]).last_hidden_state
    places = torch.arange(len(tokens) - 1).unsqueeze(0)
    following, hidden, drafts = ids[:, 1:], truth, []
    for index in range(k):
        step = drafter.steps[index % len(drafter.steps)]
        head_input, recycled = step(following, places, hidden)
        drafts.append(int(step.propose(head_input[:, -1])))
        following = torch.cat([following[:, 1:], torch.tensor([drafts[-1:]])], 1)
        if drafter.chain == "module_rows":
            hidden = recycled
        else:
            hidden = torch.cat([hidden[:, 1:], recycled[:, -1:]], 1)
    return drafts


@pytest.fixture(scope="module")
def target() -> tuple[nn.Module, list[Ask]]:
    model = tiny_target("llama", num_layers=2)
    return model, ask_all(model, SIZES)


def script_of(asks: list[Ask]) -> Tensor:
    """What follows (position, token) in the known sequences, at two of every three places."""
    script = torch.full((MAX_SEQ_LEN + 1, VOCAB), -1, dtype=torch.int64)
    for ask in asks:
        tokens = [*ask.prompt, *ask.tokens]
        for place in range(len(tokens) - 2):
            if (place + len(ask.prompt)) % 3:
                script[place, tokens[place + 1]] = tokens[place + 2]
    return script


@dataclass(frozen=True, kw_only=True)
class Case:
    chain: Chain
    k: int
    num_modules: int
    windows: tuple[int, ...] = ()
    kv_block_sizes: tuple[int, ...] = ()
    in_one: bool = False  # the ring is the operator's, as on a GPU


CASES = {
    "module_rows-K3": Case(chain="module_rows", k=3, num_modules=3),
    "target_rows-K3": Case(chain="target_rows", k=3, num_modules=3),
    "roll_window-K3": Case(chain="target_rows", k=3, num_modules=3, in_one=True),
    "module_rows-K1": Case(chain="module_rows", k=1, num_modules=1),
    "target_rows-K5": Case(chain="target_rows", k=5, num_modules=5),
    "two modules in turn-K5": Case(chain="module_rows", k=5, num_modules=2),
    # T19: KV groups with blocks of their own size, two of them rings that wrap around
    "KV groups-K3": Case(
        chain="module_rows", k=3, num_modules=3, windows=(0, 6, 11), kv_block_sizes=(8, 4, 16)
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=pytest.mark.slow if case.k == 5 or case.in_one else ())
        for name, case in CASES.items()
    ],
)
def lab(request: pytest.FixtureRequest, target: tuple[nn.Module, list[Ask]]) -> Iterator[Any]:
    (model, asks), case = target, request.param
    script, windows = script_of(asks), case.windows or (0,) * case.num_modules
    steps = [Step(i, model, script, window) for i, window in enumerate(windows)]
    drafter = WindowedDrafter(steps, case.chain, case.kv_block_sizes)
    with pytest.MonkeyPatch.context() as patch:
        loop = importlib.import_module("compilespec.passes.draft_loops.windowed")
        patch.setattr(loop, "rolls_in_one_kernel", lambda ctx: case.in_one)
        compiled = compilespec.compile(
            model, spec=Windowed(drafter), num_draft_tokens=case.k, backend="eager",
            max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=23, buckets=[1, 3, 5],
        )  # fmt: skip
    with compiled as engine:
        nodes = compiled.graphs["decode"].graph_module.graph.nodes
        assert case.in_one == any("roll_window" in str(node.target) for node in nodes)
        for name, buffer in engine._executor.buffers.items():
            if name.startswith("cache."):
                buffer.fill_(float("nan"))
        yield model, asks, drafter, engine, case.k


def test_t07_every_draft_is_that_of_a_recomputation(lab: Any) -> None:
    """Prompts shorter than K and in chunks, rows used again, up to the maximum length."""
    model, asks, drafter, engine, k = lab
    requests = [
        engine.submit(list(a.prompt), SamplingParams(max_new_tokens=len(a.tokens), ignore_eos=True))
        for a in asks
    ]
    num_compared, counts = 0, set()
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.row < 0 or not request.output_token_ids:
                continue
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            state = engine._executor.buffers["tokens_RS"][request.row].tolist()
            assert state[0] == tokens[-1]
            room = MAX_SEQ_LEN - len(tokens)  # drafts past the maximum are nobody's
            wanted = fresh_drafts(model, drafter, tokens, k)
            assert state[1 : 1 + room] == wanted[:room], f"after {len(tokens)} tokens"
            num_compared += 1
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens)
        counts.update(request.emitted_per_step[:-1])
    assert num_compared > 30
    assert counts >= ({1, 2} if k == 1 else {1, 2, 3})


def test_chunks_that_hold_repeated_tokens_alone_are_refused(target: Any) -> None:
    """Each chunk begins with the K - 1 tokens before it: no prompt would ever be in."""
    model, _ = target
    modules = mtp.random_modules(target_info(model, 64), 3)
    with pytest.raises(InvalidOption, match=r"max_prefill_tokens must be above 2: .* got 2"):
        compilespec.trace(
            model, "mtp", draft=modules, num_draft_tokens=3, max_prefill_tokens=2, max_seq_len=64
        )


def test_joins_and_leaves_give_the_models_own_tokens(lab: Any) -> None:
    _, asks, _, engine, _ = lab
    requests = run_traffic(engine, asks, (1, 2, 3, 5))
    for request, ask in zip(requests, asks, strict=True):
        assert request.output_token_ids == list(ask.tokens)
    assert_nothing_held(engine)
    assert engine.stats().num_recompiles == 0


def test_t19_a_window_keeps_a_ring_of_blocks(target: tuple[nn.Module, list[Ask]]) -> None:
    """Caches of a KV group have its block size, and only the blocks that its window needs."""
    model, _ = target
    steps = [Step(i, model, script_of([]), window) for i, window in enumerate((0, 6))]
    drafter = WindowedDrafter(steps, "module_rows", (8, 4))
    traced = compilespec.trace(
        model, spec=Windowed(drafter), num_draft_tokens=2, max_batch_size=5,
        max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=23,
    )  # fmt: skip
    shapes = {spec.name: spec.shape[:2] for spec in traced.buffers}
    assert shapes["cache.target.0.key"] == (25, 16)
    assert shapes["cache.draft.0.0.key"] == (5 * 10, 8)  # all 75 positions
    assert shapes["cache.draft.1.0.key"] == (5 * 9, 4)  # 6 + 23 of them, and a block to turn in

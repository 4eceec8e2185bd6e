"""spec="shared_kv": query-only drafters on the target's caches, and the published assistants."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compilespec
from compilespec import SamplingParams
from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption, NotSupported
from compilespec.methods.registry import get_method
from compilespec.methods.shared_kv import SharedKVDrafter, random_drafter
from compilespec.methods.shared_kv.drafter import attend
from compilespec.passes.graph.nodes import find_role
from compilespec.tracing.load import load_target
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import describe_target
from tests.support.models import (
    COMMON,
    VOCAB,
    ask_all,
    assert_nothing_held,
    greedy_reference,
    run_traffic,
    tiny_target,
)

MAX_SEQ_LEN = 75
PAGED = torch.ops.compilespec.paged_attention.default
GEMMA4_LAYERS = ["sliding_attention", "full_attention"] * 3


def tiny_gemma4() -> nn.Module:
    """Six layers of two head sizes; the last two have no own keys."""
    config = transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 6}, head_dim=12, global_head_dim=16, sliding_window=8,
        layer_types=list(GEMMA4_LAYERS), num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8, final_logit_softcapping=5.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 1.4 / parameter.shape[-1] ** 0.5)
        model.get_input_embeddings().weight.mul_(0.3)
    return model.double().eval()


@functools.cache
def target(family: str):
    model = tiny_gemma4() if family == "gemma4" else tiny_target(family, num_layers=4)
    return model, describe_target(trace_target(model), load_target(model))


SIZES = ((5, 11), (1, 22), (40, 33), (17, 8), (64, 11), (70, 5), (2, 9), (30, 20), (9, 1), (3, 14))


@functools.cache
def asked(family):
    return tuple(ask_all(target(family)[0], SIZES))


# --- tokens ---


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", 1),
        pytest.param("gemma3", 3, marks=pytest.mark.slow),
        pytest.param("gemma4", 5, marks=pytest.mark.slow),
        pytest.param("gemma4", 1, marks=pytest.mark.slow),
        pytest.param("gemma4", 3, marks=pytest.mark.slow),
        pytest.param("llama", 5, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 3, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_plain_decoding(family, count):
    """Requests join and leave in batches of 1 to 8; prompts are cut into chunks of 16."""
    model, info = target(family)
    with compilespec.compile(
        model, spec="shared_kv", draft=random_drafter(info, seed=count), num_draft_tokens=count,
        backend="eager", max_batch_size=8, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16,
        buckets=[1, 2, 5, 8],
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asked(family), (1, 2, 4, 8))
        for request, ask in zip(requests, asked(family), strict=True):
            assert request.output_token_ids == list(ask.tokens), f"prompt of {len(ask.prompt)}"
        assert_nothing_held(engine)
        assert engine.stats().num_recompiles == 0


class Recall(SharedKVDrafter):
    """Proposes by what it sees: the sum of all values of a layer, and the position, as a number.

    Its drafts are right only if it sees exactly the committed keys, at every draft.
    """

    def __init__(self, info, layer: int, num_draft_tokens: int) -> None:
        super().__init__()
        self.kv, self.kv_layers = info.kv_layers[layer], (layer,)
        self.num_draft_tokens = num_draft_tokens
        self.register_buffer("sums", torch.full((512, self.kv.value_dim), 1e6).double())
        self.register_buffer("following", torch.zeros(512, 8, dtype=torch.int64))

    def know(self, sums_ED: Tensor, following_EK: Tensor) -> None:
        self.sums.fill_(1e6)[: len(sums_ED)] = sums_ED
        self.following[: len(sums_ED), : following_EK.shape[1]] = following_EK

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden: Tensor):
        batch, rows = input_ids.shape
        alike = hidden.new_zeros(batch, self.kv.num_heads, rows, self.kv.key_dim)
        mean = attend(alike, self.kv, scale=1.0, window=0)[:, :, 0]  # all keys score the same
        number = position_ids.unsqueeze(-1) + 1
        step = (hidden[..., :1] == -7.0) * hidden[..., 1:2]  # recycled states count the drafts
        counted = torch.cat([hidden * 0 - 7.0, hidden * 0 + step + 1], -1)
        recycled = torch.cat([counted[..., :1], counted[..., -1:], hidden[..., 2:]], -1)
        return torch.cat([mean * number, step], -1), recycled

    def propose(self, head_input: Tensor) -> Tensor:
        distance_BE = (head_input[:, :-1].unsqueeze(1) - self.sums).square().sum(-1)
        nearest_B1 = distance_BE.argmin(-1, keepdim=True)
        token_BK = self.following[nearest_B1.squeeze(1)]
        token_B1 = token_BK.gather(1, head_input[:, -1:].long().clamp(0, 7))
        is_known = distance_BE.gather(1, nearest_B1) < 1e-3
        return torch.where(is_known, token_B1, VOCAB - 1).squeeze(1).to(torch.int32)


@pytest.mark.parametrize(
    ("family", "layer"), [("llama", 2), pytest.param("gemma4", 3, marks=pytest.mark.slow)]
)
def test_every_draft_sees_exactly_the_committed_keys(family, layer):
    """All drafts are accepted, for every length and batch: no rejected key is seen, none is lost,
    and no draft sees more than the one before (T16)."""
    model, info = target(family)
    asks, count = asked(family), 3
    drafter = Recall(info, layer, count)
    sums, following = [], []
    for ask in asks:
        tokens = [*ask.prompt, *ask.tokens]
        prefix = values_of(model, tokens[:-1], layer).cumsum(0)  # [T, Hv]
        for length in range(len(ask.prompt), len(tokens) - count - 1):
            sums.append(prefix[length - 1])
            following.append(torch.tensor(tokens[length + 1 : length + 1 + count]))
    drafter.know(torch.stack(sums), torch.stack(following))
    with compilespec.compile(
        model, spec="shared_kv", draft=drafter, num_draft_tokens=count, backend="eager",
        max_batch_size=5, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=16, buckets=[1, 2, 5],
    ) as engine:  # fmt: skip
        requests = run_traffic(engine, asks, (1, 2, 3, 5))
        for request, ask in zip(requests, asks, strict=True):
            assert request.output_token_ids == list(ask.tokens)
            steps = request.emitted_per_step
            num_whole = max(0, len(ask.tokens) - count - 1) // (count + 1)
            assert steps[:num_whole] == [count + 1] * num_whole


@torch.no_grad()
def values_of(model: nn.Module, tokens: list[int], layer: int) -> Tensor:
    """The values of a layer's first KV head, [T, Hv], as transformers caches them."""
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return cache.layers[layer].values[0, 0]


# --- the step graph (T16) ---


def test_metadata_is_made_once_and_nothing_is_written():
    model, info = target("gemma4")
    drafter = random_drafter(info)
    program = compilespec.trace(
        model, "shared_kv", draft=drafter, num_draft_tokens=3, max_seq_len=MAX_SEQ_LEN
    )
    assert drafter.kv_layers == (2, 3)  # the last of each type with own keys
    assert not [spec.name for spec in program.buffers if "draft" in spec.name]
    for phase in program.graphs.values():
        calls = phase.spliced.graph.find_nodes(op="call_function", target=PAGED)
        target_calls, own = calls[:6], calls[6:]
        caches = [node.args[3].meta["role"] for node in own]
        assert caches == 3 * ["cache.target.2.key", "cache.target.3.key"]
        assert len({node.args[5:9] for node in own}) == 1  # slot, row, position, table
        assert own[0].args[5:8] != target_calls[0].args[5:8]
        assert "full_like" in str(own[0].args[5].target)
        assert own[0].args[5].args[1] == -1
        assert find_role(phase.spliced, "drafts")


def test_every_pass_is_what_its_reference_says():
    model, info = target("llama")
    program = compilespec.trace(
        model, "shared_kv", draft=random_drafter(info), num_draft_tokens=2, max_batch_size=3,
        max_seq_len=48, max_prefill_tokens=64,
    )  # fmt: skip
    report = compilespec.verify(program)
    assert report.ok, str(report)


# --- the published layout ---


@pytest.fixture(scope="module")
def assistant_class():
    """transformers' own assistant, which 5.23 refuses to build: all of its layers are shared."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    known = Gemma4TextConfig.kv_sharing_modes

    def modes(config):
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return known.fget(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield transformers.Gemma4AssistantForCausalLM


def build_assistant(kind, ordered: bool) -> nn.Module:
    text = transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 3, "hidden_size": 32, "vocab_size": VOCAB},
        head_dim=12, global_head_dim=16, sliding_window=5, num_kv_shared_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=0, hidden_size_per_layer_input=0,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=48, use_ordered_embeddings=ordered, num_centroids=1,
        centroid_intermediate_top_k=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5
            fresh = torch.randn_like(parameter)
            parameter.copy_(fresh * scale if parameter.dim() > 1 else 1 + 0.1 * fresh)
            del name
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.8)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model.double().eval()


@torch.no_grad()
def drafts_of_transformers(model, assistant, tokens: list[int], count: int, query_position: str):
    """As transformers drafts, but that no rejected key is left: all is computed again."""
    output = model.model(torch.tensor([tokens[:-1]]), use_cache=False, return_shared_kv_states=True)
    shared = output.shared_kv_states
    hidden, token = output.last_hidden_state[:, -1:], torch.tensor([tokens[-1:]])
    place, drafts = len(tokens) - 1 - (query_position == "last_written"), []
    for _ in range(count):
        embed = model.get_input_embeddings()(token)
        output = assistant(
            inputs_embeds=torch.cat([embed, hidden], -1), position_ids=torch.tensor([[place]]),
            shared_kv_states=shared,
        )  # fmt: skip
        token, hidden = output.logits.argmax(-1), output.last_hidden_state
        drafts.append(int(token))
    return drafts


@pytest.mark.parametrize(
    ("ordered", "query_position"),
    [
        (True, "bonus"),
        pytest.param(False, "bonus", marks=pytest.mark.slow),
        pytest.param(False, "last_written", marks=pytest.mark.slow),
    ],
    ids=["ordered", "plain", "last_written"],
)
def test_drafts_are_those_of_transformers_at_every_step(
    tmp_path, assistant_class, ordered, query_position
):
    model, _ = target("gemma4")
    assistant = build_assistant(assistant_class, ordered)
    assistant.save_pretrained(tmp_path)
    if query_position == "last_written":  # whose windows do not reach one key further
        assistant.model.config.sliding_window -= 1
        assistant.config.text_config.sliding_window = assistant.model.config.sliding_window
    count = 3
    prompts = [[11, 5, 60, 7, 8, 9, 10], [42], [33, 34, 80, 81, 3, 3, 3, 90, 12, 44, 20, 21, 17]]
    with compilespec.compile(
        model, spec="shared_kv", draft=tmp_path, num_draft_tokens=count, backend="eager",
        max_batch_size=3, max_seq_len=MAX_SEQ_LEN, max_prefill_tokens=8,
        query_position=query_position,
    ) as engine:  # fmt: skip
        assert f"query position {query_position}" in engine.plan()["why"][1]
        requests = [
            engine.submit(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
            for prompt in prompts
        ]
        checked = set()
        while engine.has_work:
            engine.step()
            for request in requests:
                if request.finished or not request.output_token_ids:
                    continue
                drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                assert drafts == drafts_of_transformers(
                    model, assistant, tokens, count, query_position
                )
                checked.add(tuple(drafts))
        assert len(checked) >= 12
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == greedy_reference(model, prompt, 9)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, CheckpointError, "missing: model.layers.1"),
        ({"drop": "model.layers.2.self_attn.q_norm.weight"}, CheckpointError, "lacks model.layers"),
        ({"add": "model.layers.0.self_attn.k_proj.weight"}, CheckpointError, "unexpected: .*k_pr"),
        ({"add": "lm_head.weight"}, CheckpointError, "unexpected: lm_head"),
        ({"config": {"model_type": "gemma4"}}, CheckpointError, "expected .* 'gemma4_assistant'"),
        ({"config": {"backbone_hidden_size": 64}}, DraftMismatch, "width 64"),
        ({"text": {"num_attention_heads": 3}}, DraftMismatch, "3 heads of 12, the keys of target"),
        ({"text": {"layer_types": ["chunked_attention"]}}, CheckpointError, "chunked_attention"),
        ({"text": {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}}, NotSupported,
         "rope"),
        ({"text": {"layer_types": None}}, CheckpointError, "lacks layer_types"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, assistant_class, change, error, words):
    _, info = target("gemma4")
    build_assistant(assistant_class, ordered=False).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(change.get("drop"), None)
    if "add" in change:
        tensors[change["add"]] = torch.zeros(VOCAB, 32)
    save_file(tensors, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.update(change.get("config", {}))
    raw["text_config"].update(change.get("text", {}))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(error, match=words) as caught:
        get_method("shared_kv").load(tmp_path, info, {})
    assert "\n" not in str(caught.value)


def test_targets_and_options_that_do_not_fit(tmp_path, assistant_class):
    _, info = target("llama")
    build_assistant(assistant_class, ordered=False).save_pretrained(tmp_path)
    load = get_method("shared_kv").load
    with pytest.raises(DraftMismatch, match="keys of sliding_attention and the target has no such"):
        load(tmp_path, info, {})
    with pytest.raises(InvalidOption, match="query_position must be one of"):
        load(tmp_path, target("gemma4")[1], {"query_position": "next"})
    drafter = random_drafter(info)
    with pytest.raises(InvalidOption, match="only for checkpoints"):
        load(drafter, info, {"query_position": "bonus"})
    drafter.kv_layers = (9,)
    with pytest.raises(DraftMismatch, match="from 0 to 3, got"):
        load(drafter, info, {})
    with pytest.raises(InvalidOption, match="a SharedKVDrafter"):
        load(nn.Linear(2, 2), info, {})


def test_the_embedding_is_the_targets_own():
    model, info = target("llama")
    drafter = random_drafter(info)
    assert drafter.target_embedding.weight is info.embedding
    program = compilespec.trace(model, "shared_kv", draft=drafter, max_seq_len=64)
    assert not [name for name in program.weights if "target_embedding" in name]

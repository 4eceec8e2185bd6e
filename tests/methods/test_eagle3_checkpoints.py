"""Heads of every layout and option: written, read back, computed by the format's formulas."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from compilespec.errors import CheckpointError, DraftMismatch, InvalidOption
from compilespec.methods.eagle3 import random_head, save_head
from compilespec.methods.parts.d2t import check_d2t
from compilespec.methods.parts.layers import rope_frequencies
from compilespec.methods.recycled import RecycledDrafter
from compilespec.methods.registry import get_method
from compilespec.tracing.target_info import TargetInfo

LAYOUTS = ("safeailab", "speculators")
VARIANTS = {
    "plain": {},
    "reduced": {"draft_vocab_size": 29},
    "norm_before_residual": {"norm_before_residual": True, "draft_vocab_size": 29},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2, "draft_vocab_size": 29},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "fc_bias": True},
    "qwen2": {"body": "qwen2"},
    "qwen3": {"body": "qwen3", "head_dim": 16, "num_heads": 2, "num_kv_heads": 1},
    "mistral": {"body": "mistral"},
    "own_embedding": {"own_embedding": True},
    "target_head": {"own_lm_head": False},
    "other_width": {"hidden_size": 24, "head_dim": 8, "num_heads": 3, "num_kv_heads": 1},
    "linear_rope": {
        "rope": (("factor", 4.0), ("rope_theta", 5000.0), ("rope_type", "linear")),
    },
    "gelu": {"hidden_act": "gelu"},
    "two_aux": {"aux_layers": (1, 6), "num_draft_tokens": 5},
}


def make_target(hidden_size: int = 32, vocab_size: int = 61, num_layers: int = 8, **fields):
    generator = torch.Generator().manual_seed(7)
    info = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "embedding": nn.Parameter(torch.randn(vocab_size, hidden_size, generator=generator)),
        "lm_head": nn.Parameter(torch.randn(vocab_size, hidden_size, generator=generator)),
    }
    return TargetInfo(**{**info, **fields})


def load(draft, target, **options):
    return get_method("eagle3").load(draft, target, options)


def inputs(drafter, batch: int = 2, num_rows: int = 5):
    config = drafter.config
    generator = torch.Generator().manual_seed(3)
    shape = (batch, num_rows)
    ids_BS = torch.randint(config.vocab_size, shape, generator=generator, dtype=torch.int32)
    positions_BS = torch.arange(num_rows, dtype=torch.int32) + torch.tensor([[3], [40]])[:batch]
    width = len(config.aux_layers) * config.target_hidden_size
    return ids_BS, positions_BS, 3 * torch.randn(*shape, width, generator=generator)


def run(drafter, ids_BS, positions_BS, aux_BSE):
    hidden_BSD = drafter.combine(aux_BSE)
    head_BSD, recycled_BSD = drafter(ids_BS, positions_BS, hidden_BSD)
    return hidden_BSD, head_BSD, recycled_BSD, drafter.propose(head_BSD)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(tmp_path, layout, variant):
    target = make_target()
    trained_for = {"target_name": "org/name", "target_architectures": ("LlamaForCausalLM",)}
    head = random_head(target, seed=1, **VARIANTS[variant], **trained_for)
    loaded = load(save_head(head, tmp_path, layout), target)

    written = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    read = loaded.state_dict()
    assert read.keys() == written.keys()
    for name in written:
        assert torch.equal(read[name], written[name]), name
    changes = {"layout": layout, "aux_source": loaded.config.aux_source}
    if layout == "safeailab":  # the layout has no field for K, and none for the target
        changes.update(num_draft_tokens=3, target_name=None, target_architectures=())
    else:  # both matrices are always written; what they hold decides who owns them
        changes.update(own_embedding=True, own_lm_head=True)
    assert loaded.config == dataclasses.replace(head.config, **changes)
    assert "\n" not in loaded.describe()
    if not head.config.own_embedding:
        assert loaded.embed_tokens.weight is target.embedding
    if not head.config.own_lm_head:
        assert loaded.lm_head.weight is target.lm_head
    for before, after in zip(run(head, *inputs(head)), run(loaded, *inputs(head)), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_are_those_of_the_formulas(tmp_path, layout, variant):
    target = make_target()
    head = random_head(target, seed=2, **VARIANTS[variant])
    save_head(head, tmp_path, layout)
    prefix = "midlayer." if layout == "safeailab" else "layers.0."
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.replace(prefix, "layers.0."): tensor for name, tensor in weights.items()}
    weights.setdefault("embed_tokens.weight", target.embedding.detach())
    weights.setdefault("lm_head.weight", target.lm_head.detach())

    expected = formulas(weights, head.config, *inputs(head))
    *computed, tokens = run(load(tmp_path, target), *inputs(head))
    for value, wanted in zip(computed, expected[:3], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=2e-5)
    draft_ids = expected[3].argmax(-1)
    if "t2d" in weights:  # the k-th token kept by the mask is draft id k
        draft_ids = weights["t2d"].nonzero().flatten()[draft_ids]
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens.long(), draft_ids)


def formulas(weights: dict[str, Tensor], config, ids_BS, positions_BS, aux_BSE):
    """The format's definition, line by line, on raw tensors."""

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def attention(x: Tensor, name: str) -> Tensor:
        def heads(kind: str, num: int) -> Tensor:
            return linear(x, f"{name}.{kind}_proj").unflatten(-1, (num, -1)).transpose(1, 2)

        q, k = heads("q", config.num_heads), heads("k", config.num_kv_heads)
        if config.body == "qwen3":
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        inv_freq, _ = rope_frequencies(config)
        angle = (positions_BS[..., None] * inv_freq)[:, None]
        phase = torch.polar(torch.ones_like(angle), angle)

        def rotated(y: Tensor) -> Tensor:  # the halves are the real and imaginary part
            low, high = y.chunk(2, dim=-1)
            turned = torch.complex(low.contiguous(), high.contiguous()) * phase
            return torch.cat((turned.real, turned.imag), dim=-1)

        mixed = functional.scaled_dot_product_attention(
            rotated(q), rotated(k), heads("v", config.num_kv_heads), is_causal=True, enable_gqa=True
        )
        return linear(mixed.transpose(1, 2).flatten(-2), f"{name}.o_proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        act = getattr(functional, config.hidden_act)
        return linear(
            act(linear(x, f"{name}.gate_proj")) * linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    if config.norm_before_fc:
        aux_BSE = norm(aux_BSE, "input_norm")
    if config.fc_norm:
        parts = aux_BSE.split(config.target_hidden_size, dim=-1)
        aux_BSE = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
    g = linear(aux_BSE, "fc")
    en = norm(weights["embed_tokens.weight"][ids_BS.long()], "layers.0.input_layernorm")
    gn = norm(g, "layers.0.hidden_norm")
    h = gn if config.norm_before_residual else g
    h = h + attention(torch.cat((en, gn), dim=-1), "layers.0.self_attn")
    h = h + mlp(norm(h, "layers.0.post_attention_layernorm"), "layers.0.mlp")
    for i in range(1, config.num_layers):
        h = h + attention(norm(h, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn")
        h = h + mlp(norm(h, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp")
    p = norm(h, "norm")
    return g, p, p if config.norm_output else h, linear(p, "lm_head")


@pytest.mark.parametrize(("batch", "num_rows"), [(1, 7), (2, 5), (2, 1)])
def test_one_graph_for_each_call(batch, num_rows):
    drafter = random_head(make_target(), draft_vocab_size=29, num_layers=2, fc_norm=True)
    ids_BS, positions_BS, aux_BSE = inputs(drafter, batch, num_rows)
    with torch.no_grad():
        combine = torch.compile(drafter.combine, fullgraph=True, backend="eager")
        forward = torch.compile(drafter, fullgraph=True, backend="eager")
        propose = torch.compile(drafter.propose, fullgraph=True, backend="eager")
        head_BSD, recycled_BSD = forward(ids_BS, positions_BS, combine(aux_BSE))
        token_B = propose(head_BSD[:, -1])
        _, head, recycled, tokens = run(drafter, ids_BS, positions_BS, aux_BSE)
    assert token_B.dtype == torch.int32
    assert token_B.shape == (batch,)
    assert torch.equal(head_BSD, head)
    assert torch.equal(recycled_BSD, recycled)
    assert torch.equal(token_B, tokens[:, -1])


def test_one_symbol_serves_every_batch_size():
    drafter = random_head(make_target(), draft_vocab_size=29)
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    forward = torch.compile(drafter, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch in (2, 3, 5):
            ids = torch.zeros(batch, 4, dtype=torch.int32)
            hidden = torch.zeros(batch, 4, 32)
            for tensor in (ids, hidden):
                torch._dynamo.mark_dynamic(tensor, 0)
            head_BSD, _ = forward(ids, ids, hidden)
            assert head_BSD.shape == (batch, 4, 32)
    assert counter.frame_count == 1


def test_padding_ids_are_harmless():
    drafter = random_head(make_target())
    ids_BS, positions_BS, aux_BSE = inputs(drafter)
    ids_BS[1, 3] = -1
    assert run(drafter, ids_BS, positions_BS, aux_BSE)[1].isfinite().all()


def test_drafter_takes_the_targets_dtype(tmp_path):
    save_head(random_head(make_target(), draft_vocab_size=29), tmp_path)
    target = make_target()
    target = dataclasses.replace(
        target,
        dtype=torch.bfloat16,
        embedding=target.embedding.to(torch.bfloat16),
        lm_head=target.lm_head.to(torch.bfloat16),
    )
    drafter = load(tmp_path, target)
    floating = [p for p in drafter.parameters() if p.is_floating_point()]
    assert {p.dtype for p in floating} == {torch.bfloat16}
    assert drafter.embed_tokens.weight is target.embedding  # a plain tensor is shared too
    assert drafter.rope.inv_freq.dtype == torch.float32
    assert drafter.d2t.dtype == torch.int64
    ids_BS, positions_BS, aux_BSE = inputs(drafter)
    assert run(drafter, ids_BS, positions_BS, aux_BSE.to(torch.bfloat16))[3].dtype == torch.int32


def test_loading_freezes_the_drafter_and_leaves_the_target_alone(tmp_path):
    target = make_target()
    drafter = load(save_head(random_head(target), tmp_path), target)
    assert target.embedding.requires_grad
    assert not drafter.fc.weight.requires_grad
    assert not drafter.training


def test_random_heads_repeat_and_differ():
    target = make_target()
    first, again, other = (random_head(target, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6, 7, 32])
def test_random_head_for_any_depth(tmp_path, num_layers):
    target = make_target(num_layers=num_layers)
    head = random_head(target)
    assert max(head.aux_layers) <= num_layers
    assert load(save_head(head, tmp_path), target).aux_layers == head.aux_layers


def test_random_head_refuses_nonsense():
    target = make_target()
    for fields in ({"draft_vocab_size": 62}, {"body": "mamba"}, {"hidden": 3}):
        with pytest.raises(InvalidOption, match="random_head"):
            random_head(target, **fields)
    with pytest.raises(DraftMismatch):
        random_head(target, vocab_size=60)


# A checkpoint with one thing wrong.


@pytest.fixture
def saved(tmp_path):
    target = make_target()
    save_head(random_head(target, draft_vocab_size=29), tmp_path)
    return tmp_path, target


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("norm.weight"), "missing: norm.weight"),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), "missing: layers.0.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "missing: d2t"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected: extra"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
            "unexpected: layers.0.self_attn.q_norm.weight",
        ),
        (
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
            "appears twice",
        ),
        (
            lambda t: t.update({"norm.weight": torch.ones(16)}),
            r"norm.weight \(expected \[32\], got \[16\]\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(30, 32)}),
            r"lm_head.weight \(expected \[29, 32\], got \[30, 32\]\)",
        ),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(60, 32)}),
            r"embed_tokens.weight \(expected \[61, 32\], got \[60, 32\]\)",
        ),
        (lambda t: t.update(d2t=torch.zeros(28, dtype=torch.int64)), "d2t: expected 29 integers"),
    ],
)
def test_wrong_tensors(saved, change, says):
    directory, target = saved
    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(directory, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"vocab_size": 60}, DraftMismatch, "target vocabulary is 60, the target's is 61"),
        ({"norm_before_fc": True}, CheckpointError, "missing: input_norm.weight"),
        ({"model_type": "qwen3"}, CheckpointError, "missing: .*k_norm"),
        ({"attention_bias": True}, CheckpointError, "missing: .*k_proj.bias"),
        ({"draft_vocab_size": 61}, CheckpointError, "d2t: expected 61 integers"),
        ({"intermediate_size": 48}, CheckpointError, "wrong shape: .*down_proj"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, DraftMismatch, "lie outside"),
    ],
)
def test_wrong_config(saved, fields, error, says):
    directory, target = saved
    change_config(directory, **fields)
    with pytest.raises(error, match=says):
        load(directory, target)


def test_draft_of_another_target(saved):
    directory, _ = saved
    with pytest.raises(DraftMismatch, match="width 32, the target's are 48"):
        load(directory, make_target(hidden_size=48))
    with pytest.raises(DraftMismatch, match="lie outside the target"):
        load(directory, make_target(num_layers=4))


def test_absolute_d2t_is_caught(saved):
    directory, target = saved

    def make_absolute(tensors):
        tensors["d2t"] = tensors["t2d"].nonzero().flatten()

    change_tensors(directory, make_absolute)
    with pytest.raises(CheckpointError, match="absolute target ids"):
        load(directory, target)
    change_tensors(directory, lambda tensors: tensors.pop("t2d"))
    with pytest.raises(CheckpointError, match="looks like absolute target ids"):
        load(directory, target)


@pytest.mark.parametrize(
    ("d2t", "kept", "says"),
    [
        ([1, 1, 4], [1, 2, 6], None),
        ([1, 1, 4], None, None),
        ([0, 0, 0], None, None),
        ([1, 2, 6], [1, 2, 6], "holds absolute target ids"),
        ([1, 2, 4], None, "looks like absolute"),
        ([0, 0, 9], None, "outside the target vocabulary"),
        ([-1, 0, 0], None, "outside the target vocabulary"),
        ([3, 0, 0], None, "d2t decreases"),
        ([0, 0, 1], [1, 2, 3], "contradict"),
    ],
)
def test_d2t_rules(d2t, kept, says):
    t2d = None
    if kept is not None:
        t2d = torch.zeros(10, dtype=torch.bool)
        t2d[kept] = True
    if says is None:
        check_d2t(torch.tensor(d2t), t2d, 3, 10)
        return
    with pytest.raises(CheckpointError, match=says):
        check_d2t(torch.tensor(d2t), t2d, 3, 10)


# Modules instead of directories.


class UserDrafter(RecycledDrafter):
    def __init__(self, num_draft_tokens=2, aux_layers=(1, 2)):
        super().__init__()
        self.num_draft_tokens = num_draft_tokens
        self.aux_layers = aux_layers


def test_a_drafter_is_adopted_as_it_is():
    for drafter in (UserDrafter(), random_head(make_target())):
        assert load(drafter, make_target()) is drafter


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (UserDrafter(num_draft_tokens=0), "num_draft_tokens"),
        (UserDrafter(aux_layers=[1]), "tuple of hs indices"),
        (UserDrafter(aux_layers=(1, 9)), "lie outside"),
        (random_head(make_target(hidden_size=48)), "width 48"),
        (nn.Linear(2, 2), "expected a compilespec Drafter, or a module with .config"),
    ],
)
def test_modules_that_do_not_fit(drafter, says):
    with pytest.raises(DraftMismatch, match=says):
        load(drafter, make_target())


def test_neither_directory_nor_module():
    with pytest.raises(InvalidOption, match="got int"):
        load(3, make_target())


def test_a_module_of_another_library_is_adopted_by_its_tensors(tmp_path):
    target = make_target()
    head = random_head(target, draft_vocab_size=29)
    save_head(head, tmp_path)
    foreign = nn.Module()
    foreign.config = LlamaConfig(**json.loads((tmp_path / "config.json").read_text()))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        owner = foreign
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(leaf, tensor)
    loaded = load(foreign, target)
    assert loaded.fc.weight.data_ptr() == foreign.fc.weight.data_ptr()
    for before, after in zip(run(head, *inputs(head)), run(loaded, *inputs(head)), strict=True):
        assert torch.equal(before, after)

"""paged_attention along the paths of a tree: each node computes what it would in a chain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from compilespec.ops.paged_attention import (
    paged_attention,
    paged_attention_reference,
    write_cache,
    write_cache_reference,
)
from tests.support.attention import NAN, Case, Pool
from tests.support.trees import PARENTS, Tree

CASES = [
    Case(),
    Case(batch=1, context=0),
    Case(context=61, group=5, num_kv_heads=1, block_size=3),
    Case(context=62, head_dim=20, value_dim=33),
    Case(context=253, window=4, sinks=True),
    Case(context=254, softcap=5.0, window=100, head_dim=64, value_dim=64, block_size=64),
    Case(context=255, group=3, sinks=True, softcap=2.0, window=1),
    Case(batch=1, context=700, num_kv_heads=1, head_dim=48, value_dim=48),
    Case(context=118, num_kv_heads=1, group=19),
    Case(latent=True, num_kv_heads=1, group=7, head_dim=40, value_dim=29, context=254),
    Case(latent=True, head_dim=21, value_dim=5, window=3, softcap=3.0, sinks=True, block_size=3),
]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def in_a_chain(tree: Tree, node: int) -> Tensor:
    """The output of a node that stands at the end of a chain of its ancestors: [B, N, Hv]."""
    path, case = tree.paths[node], tree.case
    tokens_BS = [[(row, case.context + d) for d in range(len(path))] for row in range(case.batch)]
    arguments, whole = list(tree.pool.arguments(tokens_BS)), tree.pool.arguments(tree.pool.decode())
    for index in range(3):
        if arguments[index] is not None:
            arguments[index] = whole[index][:, :, path]
    return paged_attention(*arguments)[:, -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_node_has_the_bits_that_it_has_in_a_chain(case, dtype, kernels):
    tree = Tree(dataclasses.replace(case, dtype=dtype))
    arguments = tree.arguments()
    got = paged_attention(*arguments)
    for node in range(len(PARENTS)):
        assert torch.equal(got[:, node], in_a_chain(tree, node))
    for cache, untouched in zip(arguments[3:5], tree.arguments()[3:5], strict=True):
        assert cache is None or torch.equal(cache.nan_to_num(7.0), untouched.nan_to_num(7.0))
    later = paged_attention(*tree.arguments(earlier=4))
    assert torch.equal(later, got[:, 4:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_says_the_same(case):
    tree = Tree(dataclasses.replace(case, dtype=torch.float64))
    got, want = paged_attention(*tree.arguments()), paged_attention_reference(*tree.arguments())
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    late = paged_attention_reference(*tree.arguments(earlier=4))
    torch.testing.assert_close(late, want[:, 4:], rtol=0, atol=0)


def test_threads_and_padded_nodes_change_no_bit(kernels, threads):
    tree = Tree(Case(batch=2, context=700, num_kv_heads=1, head_dim=64, value_dim=64))
    threads(1)
    want = paged_attention(*tree.arguments())
    threads(3)
    arguments = tree.arguments()
    arguments[6][1, 3:] = -1
    got = paged_attention(*arguments)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1, :3], want[1, :3])
    assert not got[1, 3:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_siblings_cannot_leak(dtype, kernels):
    """NaN in the keys and values of a node leaves all but its descendants untouched."""
    tree = Tree(Case(context=62, dtype=dtype))
    arguments = tree.arguments()
    clean = paged_attention(*arguments)
    arguments[1][:, :, 2] = NAN
    arguments[2][:, :, 2] = NAN
    poisoned = paged_attention(*arguments)
    for node, path in enumerate(tree.paths):
        if 2 in path:
            assert poisoned[:, node].isnan().all()
        else:
            assert torch.equal(poisoned[:, node], clean[:, node])


@pytest.mark.parametrize("latent", [False, True], ids=["values", "latent"])
def test_written_keys_are_those_of_the_call(latent, kernels):
    pool = Pool(Case(context=20, latent=latent, value_dim=8, dtype=torch.bfloat16))
    arguments, others = pool.arguments(pool.decode()), pool.arguments(pool.decode())
    arguments[5][1:, 2:] = others[5][1:, 2:] = -1
    write_cache(*arguments[1:6])
    write_cache_reference(*others[1:6])
    for cache, other in zip(arguments[3:5], others[3:5], strict=True):
        assert cache is None or torch.equal(cache.nan_to_num(7.0), other.nan_to_num(7.0))
    with pytest.raises(RuntimeError, match="paged_attention: slot"):
        write_cache(*arguments[1:5], arguments[5] + 10_000)


def test_wrong_paths_are_refused(kernels):
    arguments = Tree(Case()).arguments()
    for wrong in (arguments[14].long(), arguments[14][:, 1:], arguments[14] + 100):
        with pytest.raises(RuntimeError, match="paged_attention"):
            paged_attention(*arguments[:14], wrong)


def test_opcheck():
    tree = Tree(Case(batch=2, context=5, sinks=True, window=3))
    arguments = tree.arguments(earlier=2)
    for cache in arguments[3:5]:
        cache.nan_to_num_()
    torch.library.opcheck(torch.ops.compilespec.paged_attention.default, arguments)
    torch.library.opcheck(torch.ops.compilespec.write_cache.default, arguments[1:6])

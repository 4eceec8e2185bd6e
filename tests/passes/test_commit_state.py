"""What the pass changes, what it must leave alone, what it refuses."""

from __future__ import annotations

import pytest
import torch

from compilespec.errors import PassError
from compilespec.passes.splice.builder import Splice
from compilespec.passes.splice.commit_state import commit_state
from tests.support.hand_graphs import code
from tests.support.steps import CONFIG, PAD, random_inputs, run, started
from tests.support.untouched import check_left_alone, step


def test_commit_writes_live_rows_and_spares_the_rest(rewritten):
    ctx, inputs = rewritten.ctx, random_inputs(rewritten.ctx, 3)
    if ctx.phase == "decode":
        inputs["seq_len_R"][0] = CONFIG.max_seq_len - 1  # its new length is cut at the maximum
    after = run(rewritten.spliced, ctx, inputs)
    old, new = inputs["seq_len_R"], after["seq_len_R"]
    if ctx.phase == "decode":
        for b, row in enumerate(inputs["row_B"].tolist()):
            if row >= 0:
                count = int(after["num_emitted"][b])
                assert int(new[row]) == min(int(old[row]) + count, CONFIG.max_seq_len)
                assert int(after["tokens_RS"][row, 0]) == int(after["emitted"][b, count - 1])
                assert (after["tokens_RS"][row, 1:] >= 0).all()
    else:
        assert int(new[2]) == 4  # the finished prompt's length
        assert int(after["tokens_RS"][2, 0]) == int(after["emitted"][0, 0])
        assert after["emitted"][1].tolist() == [PAD]
        for row in (0, 1):  # an unfinished chunk and a row that is not in the batch
            assert new[row] == old[row]
            assert torch.equal(after["tokens_RS"][row], inputs["tokens_RS"][row])


def test_commit_needs_the_acceptance(parts):
    gm, ctx = started(parts, "decode", "splice_acceptance")
    before = code(gm)
    with pytest.raises(PassError, match="no node plays the role 'target'"):
        commit_state(Splice(gm, ctx))
    assert code(gm) == before


def test_a_step_that_accepts_nothing_is_refused() -> None:
    check_left_alone(
        "commit_state", step("decode", "read_state", "insert_paged_attention"), is_refused=True
    )

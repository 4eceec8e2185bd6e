"""Whole generations against recorded ones."""

from __future__ import annotations

import itertools

import compilespec


def check_oracle(engine, meta, io):
    """From the first length past each prompt on; the first drafts by how many are accepted."""
    for index, trace in enumerate(meta["traces"]):
        tokens = io[f"out.greedy{index}"].tolist()
        steps = [step for step in trace if step["cur_len"] > len(io[f"in.prompt{index}"])]
        known = steps[0]["cur_len"] - 1
        request = engine.submit(
            tokens[:known],
            compilespec.SamplingParams(max_new_tokens=len(tokens) - known, ignore_eos=True),
        )
        for step, following in itertools.pairwise(steps):
            engine.step()  # the first is the prefill and a step
            assert request.emitted_per_step[-1] == step["accepted"] + 1
            assert known + len(request.output_token_ids) == following["cur_len"]
            drafts = engine._executor.buffers["tokens_RS"][request.row, 1:].tolist()
            assert drafts[: len(following["candidates"])] == following["candidates"]
        while engine.has_work:
            engine.step()
        assert request.output_token_ids == tokens[known:]

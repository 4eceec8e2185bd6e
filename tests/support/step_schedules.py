"""Random schedules for the step model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.support.step_model import Chain, Kind, Rules, StepModel, Toy

NONE: tuple[Kind, Chain] = ("none", "module_rows")
RECYCLED: tuple[Kind, Chain] = ("recycled", "module_rows")
UNSHIFTED: tuple[Kind, Chain] = ("unshifted", "module_rows")
MODULE_ROWS: tuple[Kind, Chain] = ("windowed", "module_rows")
TARGET_ROWS: tuple[Kind, Chain] = ("windowed", "target_rows")
KINDS = (NONE, RECYCLED, UNSHIFTED, MODULE_ROWS, TARGET_ROWS)


def kind_id(kind: tuple[Kind, Chain]) -> str:
    return kind[1] if kind[0] == "windowed" else kind[0]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A seeded random schedule of joins, chunks, padded batches, plain steps and leaves.

    A preempted request leaves, and joins again with what it emitted as the end of its prompt.
    """

    kind: tuple[Kind, Chain]
    num_draft_tokens: int
    seed: int
    max_rows: int = 3
    max_seq_len: int = 24
    block_size: int = 3
    num_requests: int = 5
    overlap: bool = False
    ring_size: int = 0
    agreement: float = 0.8
    eos_rate: float = 0.03
    whole_prompts: bool = False
    plain_rate: float = 0.0
    abort_rate: float = 0.0
    conv_width: int | None = None  # of recurrent layers
    fewer_rate: float = 0.0  # steps of a smaller K
    preempt_rate: float = 0.0

    def model(self, rules: Rules | None = None, **options: Any) -> StepModel:
        return StepModel(
            self.kind[0],
            self.num_draft_tokens,
            chain=self.kind[1],
            max_rows=self.max_rows,
            max_seq_len=self.max_seq_len,
            block_size=self.block_size,
            overlap=self.overlap,
            ring_size=self.ring_size,
            conv_width=self.conv_width,
            oracle=Toy(agreement=self.agreement, eos_rate=self.eos_rate, seed=self.seed),
            rules=rules,
            **options,
        )

    def run(self, rules: Rules | None = None, **options: Any) -> StepModel:
        """Serve every request to its end and compare the outputs with plain decoding."""
        rng, model = random.Random(self.seed), self.model(rules, **options)
        waiting = [self._request(rng) for _ in range(self.num_requests)]
        for _ in range(200 * self.num_requests * self.max_seq_len):
            if not waiting and not model.rows:
                break
            while waiting and len(model.rows) < self.max_rows and rng.random() < 0.6:
                model.admit(*waiting.pop())
            waiting += self._step(rng, model)
        assert not model.rows, "the schedule did not end"
        model.drain()
        model.check_outputs()
        assert not model.block_owner, "blocks were lost"
        assert len(set(model.free_blocks)) == self.max_rows * -(
            -self.max_seq_len // self.block_size
        )
        return model

    def _request(self, rng: random.Random) -> tuple[list[int], int]:
        length = rng.choice([1, 2, rng.randint(1, self.max_seq_len - 1), self.max_seq_len - 1])
        length = min(length, self.max_seq_len - 1)
        return [rng.randrange(10) for _ in range(length)], rng.choice([1, 2, 10**9, 10**9])

    def _step(self, rng: random.Random, model: StepModel) -> list[tuple[list[int], int]]:
        """One step; returns the requests that it preempted."""
        live = [row for row in model.rows if not model.request(row).finish_reason]
        preempted = []
        if live and rng.random() < self.abort_rate:
            model.abort(live.pop(rng.randrange(len(live))))
        if live and rng.random() < self.preempt_rate:
            request = model.request(live.pop())
            preempted.append(
                ([*request.prompt, *request.output], request.limit - len(request.output))
            )
            model.abort(request.row)
        chunks = []
        for row in live:
            left = model.prompt_left(row)
            if left and rng.random() < 0.8:
                chunks.append((row, left if self.whole_prompts else rng.randint(1, left)))
        rows = model.running()
        rng.shuffle(rows)
        if rng.random() < 0.4:
            rows = rows[: rng.randint(0, len(rows))]
        drafts = self._num_drafts(rng)
        overrun = [row for row in rows if not model.can_draft(row)]
        if drafts and overrun:
            rows, drafts = overrun, 0
        model.step(
            chunks=chunks,
            rows=rows,
            padded_prefill=rng.randint(0, 4),
            padded_decode=rng.randint(0, 4),
            num_draft_tokens=drafts,
        )
        return preempted

    def _num_drafts(self, rng: random.Random) -> int:
        """Drafters with states must see every token, windowed ones always draft all K."""
        most, is_sighted = self.num_draft_tokens, self.kind == UNSHIFTED and self.conv_width
        if not is_sighted and rng.random() < self.plain_rate:
            return 0
        if self.kind[0] != "windowed" and most and rng.random() < self.fewer_rate:
            return rng.randint(1, most)
        return most

"""The references' small algorithms against scalar oracles, worked examples and replays."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compilespec.errors import InvalidOption
from tests.oracles import trtllm as ops

PAD = -1


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- T03, T04: acceptance ---


def first_best(scores) -> int:
    return max(range(len(scores)), key=lambda v: (scores[v], -v))


@given(
    num_contexts=st.integers(0, 4), num_generations=st.integers(0, 5), num_drafts=st.integers(1, 8),
    vocab=st.integers(1, 5), seed=st.integers(0, 999),
)  # fmt: skip
def test_t03_strict_acceptance(num_contexts, num_generations, num_drafts, vocab, seed):
    """I11, M9: few distinct logits, so that ties and matches are common; contexts come first."""
    draw = torch.Generator().manual_seed(seed)
    rows = num_contexts + num_generations * (num_drafts + 1)
    logits = torch.randint(-1, 2, (rows, vocab), generator=draw).float()
    drafts = torch.randint(0, vocab, (num_generations, num_drafts), generator=draw)
    accepted, counts = ops.accept_strict(logits, drafts, num_contexts)
    assert accepted.dtype == counts.dtype == torch.int32
    target = [first_best(row) for row in logits.tolist()]
    for context in range(num_contexts):
        assert accepted[context].tolist() == [target[context]] + [0] * num_drafts
        assert counts[context] == 1
    for generation, mine in enumerate(drafts.tolist()):
        begin = num_contexts + generation * (num_drafts + 1)
        its = target[begin : begin + num_drafts + 1]
        count = 1
        while count <= num_drafts and mine[count - 1] == its[count - 1]:
            count += 1
        assert accepted[num_contexts + generation].tolist() == its
        assert counts[num_contexts + generation] == count


def test_t03_one_row_of_logits_and_the_golden_trace():
    """M9: E + FGH -> FGXY accepts FGX; X + PQR -> PYST accepts PY."""
    accepted, counts = ops.accept_strict(
        torch.tensor([0.0, 3, 3]), torch.empty(0, 2, dtype=torch.int32), 1
    )
    assert (accepted.tolist(), counts.tolist()) == ([[1, 0, 0]], [1])
    target = [ord(letter) for letter in "FGXYPYST"]
    logits = torch.nn.functional.one_hot(torch.tensor(target), 128).float()
    drafts = torch.tensor([[ord(letter) for letter in word] for word in ("FGH", "PQR")])
    accepted, counts = ops.accept_strict(logits, drafts, 0)
    assert counts.tolist() == [3, 2]
    flat_accepted, flat_counts = ops.accept_strict(logits, drafts.view(2, 3), 0)
    assert flat_accepted.equal(accepted)
    assert flat_counts.equal(counts)
    words = ["".join(map(chr, row[:n])) for row, n in zip(accepted.tolist(), counts, strict=True)]
    assert words == ["FGX", "PY"]
    with pytest.raises(ValueError, match="rows of logits"):
        ops.accept_strict(logits[:7], drafts, 0)


@pytest.mark.parametrize(("force", "count"), [(0, 2), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_t04_forced_counts(force, count):
    """I1; H-1: a negative number is an error."""
    counts = ints(1, 1, 2, 2)
    forced = ops.force_num_accepted(counts, 2, force, 3)
    assert forced.tolist() == [1, 1, count, count]
    assert counts.tolist() == [1, 1, 2, 2]
    with pytest.raises(InvalidOption):
        ops.force_num_accepted(counts, 2, -1, 3)


# --- T09: relaxed acceptance ---

BEGIN, END = 5, 6
RELAXED = {"begin": BEGIN, "end": END}


def relaxed_oracle(logits, drafts, delta, topk):
    """The fused kernel's loops for one generation."""
    kept = 0
    for scores, draft in zip(logits, drafts, strict=False):
        chances = torch.softmax(scores, -1).tolist()
        order = sorted(range(len(chances)), key=lambda v: (-chances[v], v))
        found = False
        for place in range(min(topk, len(order))):
            if place > 0 and chances[order[place]] < torch.tensor(chances[order[0]]) - delta:
                break
            found = found or order[place] == draft
        if not found:
            break
        kept += 1
    return [*drafts[:kept], first_best(logits[kept].tolist())]


@given(
    num_generations=st.integers(0, 4), num_contexts=st.integers(0, 3), num_drafts=st.integers(1, 4),
    topk=st.integers(1, 6), delta=st.sampled_from([0.0, 0.125, 0.5]), seed=st.integers(0, 999),
)  # fmt: skip
def test_t09_relaxed_against_a_scalar_oracle(
    num_generations, num_contexts, num_drafts, topk, delta, seed
):
    """M10.  Few distinct logits: ties, also at margin 0 (H-13)."""
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = num_contexts + num_generations * (num_drafts + 1)
    logits = torch.randint(0, 3, (rows, 8), generator=draw).float()
    drafts = torch.randint(0, 8, (num_generations, num_drafts), generator=draw)
    num_requests = num_contexts + num_generations
    margins = torch.tensor([rng.choice([0.0, delta]) for _ in range(num_requests)])
    chunks = [[rng.randrange(8) for _ in range(rng.randint(1, 4))] for _ in range(num_contexts)]
    emitted, counts, after = ops.accept_relaxed(
        logits, drafts, margins, chunks, topk=topk, relaxed_delta=0.5, **RELAXED
    )
    assert (emitted.dtype, counts.dtype, after.dtype) == (torch.int32, torch.int32, torch.float32)
    for row in range(num_requests):
        margin = float(margins[row])
        if row < num_contexts:
            want = [first_best(logits[row].tolist())]
            margin = 0.5 if BEGIN in chunks[row] else 0.0
        else:
            begin = num_contexts + (row - num_contexts) * (num_drafts + 1)
            judges = logits[begin : begin + num_drafts + 1]
            want = relaxed_oracle(judges, drafts[row - num_contexts].tolist(), margins[row], topk)
        for token in want:
            margin = 0.5 if token == BEGIN else 0.0 if token == END else margin
        assert emitted[row].tolist() == want + [1] * (num_drafts + 1 - len(want))
        assert counts[row] == len(want)
        assert float(after[row]) == margin


def one_step(probabilities, draft, margin, topk=4):
    logits = torch.tensor(probabilities).log()
    emitted, counts, _ = ops.accept_relaxed(
        torch.stack([logits, logits]), torch.tensor([[draft]]), torch.tensor([margin]), [],
        topk=topk, relaxed_delta=0.5, **RELAXED,
    )  # fmt: skip
    return emitted[0, : counts[0]].tolist()


def test_t09_the_margin_is_a_difference_of_probabilities():
    """H-11: .50 and .30 are .2 apart, and .51 in logarithms."""
    chances = [0.5, 0.3, 0.15, 0.05]
    assert one_step(chances, 1, 0.25) == [1, 0]
    assert one_step(chances, 2, 0.25) == [0]
    assert one_step(chances, 2, 0.36) == [2, 0]
    assert one_step(chances, 2, 0.36, topk=2) == [0]
    assert one_step([0.4, 0.4, 0.2], 1, 0.0) == [1, 0]  # H-13, the reference's tie


def test_t09_the_reference_forgets_across_chunks():
    """H-12: what `passes.splice.acceptance.relaxed` does not copy."""
    logits = torch.eye(8)[:1]
    none = torch.empty(0, 2, dtype=torch.int64)
    for chunk, margin in (([3, BEGIN, 4], 0.5), ([3, 4], 0.0), ([BEGIN, END], 0.5)):
        *_, after = ops.accept_relaxed(
            logits, none, torch.tensor([0.5]), [chunk], topk=2, relaxed_delta=0.5, **RELAXED
        )
        assert after.tolist() == [margin]


# --- I12, I13, I8, E12 ---


def test_draft_tokens_are_target_ids():
    """I12."""
    logits = torch.tensor([[0.0, 2, 2], [1, 0, 0], [0, 0, 9]])
    assert ops.sample_greedy(logits).tolist() == [1, 0, 2]
    mapped = ops.sample_greedy(logits, torch.tensor([4, 10, 3]))
    assert (mapped.tolist(), mapped.dtype) == ([11, 4, 5], torch.int32)


def test_next_new_tokens_begin_with_the_last_accepted():
    """I13."""
    made = ops.next_new_tokens(
        ints([7, 8, 9], [4, 5, 6], [1, 0, 0]), ints(3, 2, 1), ints([1, 2], [3, 4], [5, 6])
    )
    assert made.tolist() == [[9, 1, 2], [5, 3, 4], [1, 5, 6]]
    assert made.dtype == torch.int32


def test_sampling_rows():
    """I8."""
    temperature, top_k, top_p = ops.sampling_rows(
        [
            (None, False),
            ({"temperature": 0.5, "top_k": 3, "top_p": 0.25}, True),
            ({"temperature": 0.0, "top_k": 3}, True),
            ({"temperature": 2.0, "top_k": -1}, False),
        ],
        2,
    )
    largest = 2**31 - 1
    torch.testing.assert_close(
        temperature, torch.tensor([1e-5, *[0.5] * 3, *[1e-5] * 3, 2.0]), rtol=0, atol=0
    )
    assert top_k.tolist() == [largest, 3, 3, 3, largest, largest, largest, largest]
    assert top_p.tolist() == [1.0, 0.25, 0.25, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert (top_k.dtype, top_p.dtype) == (torch.int32, torch.float32)


def test_probabilities_and_next_tokens():
    """E12: greedy rows among drawn ones; the probabilities are those that were drawn from."""
    logits = torch.tensor([[1.0, 3, 2]]).repeat(20000, 1)
    tokens, same = ops.compute_probs_and_sample_next_token(logits, None)
    assert same is logits
    assert tokens.unique().tolist() == [1]
    temperature = torch.full((20000,), 2.0)
    temperature[::2] = -1
    draw = torch.Generator().manual_seed(0)
    tokens, probs = ops.compute_probs_and_sample_next_token(logits, temperature, draw)
    assert tokens[::2].unique().tolist() == [1]
    torch.testing.assert_close(probs[1], torch.tensor([0.5, 1.5, 1.0]).softmax(-1))
    observed = torch.bincount(tokens[1::2], minlength=3)
    wanted = probs[1] * 10000
    assert float(((observed - wanted) ** 2 / wanted).sum()) < 13.8  # false alarm 1e-3, 2 degrees


# --- T06: input shift ---


def test_t06_worked_example():
    """E2: [a1 | b1 b2 | c1 c2 c3] + [a2 b3 c4] -> [a2 | b2 b3 | c2 c3 c4]; b goes on (H-4)."""
    ids, wanted = ints(11, 21, 22, 31, 32, 33), [12, 22, 23, 32, 33, 34]
    accepted = ints([12, 0], [99, 0], [34, 0])
    shifted = ops.shift_context_inputs(ids, [1, 2, 3], accepted, [None, 23, None])
    assert shifted.tolist() == wanted
    assert ops.shift_context_inputs(ids, [1, 2, 3], accepted).tolist()[2] == 99  # the reference's
    prepared = ops.prepare_prefill_inputs(
        ids, torch.arange(6), ints(0, 1, 3, 6), ints(1, 2, 3), ints(0, 0, 0), ints(1, 0, 1),
        ints(12, 99, 34), ints(98, 23, 98), batch_size=5,
    )  # fmt: skip
    assert prepared.input_ids.tolist() == wanted
    assert prepared.query_start_loc.tolist() == [0, 1, 3, 6, 6, 6]
    assert prepared.seq_lens.tolist() == [1, 2, 3, 0, 0]
    assert prepared.last_token_indices.tolist() == [0, 2, 5, 0, 0]
    assert ids.tolist() == [11, 21, 22, 31, 32, 33]


ragged = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 5), st.booleans()), min_size=1, max_size=5
)


def batch_of(requests, seed=0):
    """Packed ids, offsets, rejected counts (a request keeps a row), sampled flags, next tokens."""
    rng = random.Random(seed)
    rejected = [min(r, length - 1) if sampled else 0 for length, r, sampled in requests]
    offsets = [0]
    for length, *_ in requests:
        offsets.append(offsets[-1] + length)
    ids = [rng.randrange(1, 90) for _ in range(offsets[-1])]
    following = [rng.randrange(90, 99) for _ in requests]
    return ids, offsets, rejected, [int(sampled) for *_, sampled in requests], following


@given(requests=ragged)
def test_t06_shift_against_lists(requests):
    """A6: each request up to its rejected tail, ended by its own next token."""
    ids, offsets, rejected, sampled, following = batch_of(requests)
    junk = [-5] * len(requests)
    prepared = ops.prepare_prefill_inputs(
        ints(*ids), torch.arange(len(ids)), ints(*offsets), ints(*[n for n, *_ in requests]),
        ints(*rejected), ints(*sampled),
        ints(*[f if s else j for f, s, j in zip(following, sampled, junk, strict=True)]),
        ints(*[j if s else f for f, s, j in zip(following, sampled, junk, strict=True)]),
    )  # fmt: skip
    for request, follows in enumerate(following):
        begin, end = offsets[request], offsets[request + 1] - rejected[request]
        assert prepared.input_ids[begin:end].tolist() == [*ids[begin + 1 : end], follows]
        assert prepared.last_token_indices[request] == end - 1


# --- T27: compaction ---


@given(requests=ragged)
def test_t27_compact_batch_drafts_what_the_padded_one_does(requests):
    """E7, A4: a causal drafter gives the same at each request's last row."""
    ids, offsets, rejected, _, following = batch_of(requests, seed=1)
    start, num_rejected, ones = ints(*offsets), ints(*rejected), ints(*[1] * len(requests))
    compact_start, rows = ops.compact_inputs(start, num_rejected)
    want = [0]
    for (length, *_), gone in zip(requests, rejected, strict=True):
        want.append(want[-1] + length - gone)
    assert compact_start.tolist() == want
    args = (ones, ints(*following), ones)
    padded = ops.prepare_prefill_inputs(
        ints(*ids), torch.arange(len(ids)), start, ones, num_rejected, *args
    )
    compact = ops.prepare_prefill_inputs(
        ints(*ids)[rows], rows, compact_start, ones, num_rejected * 0, *args
    )
    for request in range(len(requests)):
        seen = []
        for made, loc in ((padded, start), (compact, compact_start)):
            begin, last = int(loc[request]), int(made.last_token_indices[request])
            inputs = zip(
                made.input_ids[begin : last + 1].tolist(),
                made.positions[begin : last + 1].tolist(),
                strict=True,
            )
            seen.append(list(inputs))
        assert seen[0] == seen[1]


# --- T26 ---


def test_t26_skip_forward():
    """I10."""
    logits = torch.zeros(7, 11)
    made = ops.skip_forward(logits, 5, 3)
    assert made["logits"] is logits
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in made.items() if name != "logits"}
    assert shapes == {
        "new_tokens": ((5, 4), torch.int32),
        "new_tokens_lens": ((5,), torch.int32),
        "next_draft_tokens": ((5, 3), torch.int32),
        "next_new_tokens": ((5, 4), torch.int32),
    }
    assert made["new_tokens_lens"].tolist() == [1] * 5


# --- T07: MTP pools and the golden traces ---


def letters(text: str) -> torch.Tensor:
    return ints(*[ord(letter) for letter in text])


def states(text: str) -> torch.Tensor:
    """H_X for a letter X: [X, 0]; a module's own output h_X is [X, 1]."""
    return torch.tensor([[float(ord(letter)), 0.0] for letter in text])


def said(hidden: torch.Tensor) -> str:
    return ",".join(f"{'Hh'[int(kind)]}_{chr(int(letter))}" for letter, kind in hidden.tolist())


class Traced:
    """Modules that note their inputs and draft a script."""

    def __init__(self, script: str) -> None:
        self.script, self.seen, self.positions = script, [], []

    def module(self, step: int):
        def run(tokens, hidden, positions):
            self.seen.append(f"{''.join(map(chr, tokens.tolist()))}/{said(hidden)}")
            self.positions.append(positions.tolist())
            out = torch.stack([tokens.float(), torch.ones(len(tokens))], 1)
            logits = torch.zeros(len(tokens), 128)
            logits[:, ord(self.script[step])] = 1
            return out, logits

        return run

    def draft(self, tokens, hidden, positions) -> str:
        modules = [self.module(step) for step in range(len(self.script))]
        drafts = ops.vanilla_draft_loop(modules, tokens, hidden, positions, [len(tokens)])
        assert drafts.dtype == torch.int32
        return "".join(map(chr, drafts[0].tolist()))


def test_t07_golden_traces():
    """M4-M7, M8: the three traces of the reference's docstring."""
    pools = ops.MTPPools(2, 3, 2)
    slot = pools.add(7)
    trace = Traced("FGH")
    shifted = ops.vanilla_context_inputs(letters("ABCD"), ord("E"))
    assert trace.draft(shifted, states("ABCD"), torch.arange(4)) == "FGH"
    assert trace.seen == ["BCDE/H_A,H_B,H_C,H_D", "CDEF/H_B,H_C,H_D,h_E", "DEFG/H_C,H_D,h_E,h_F"]
    pools.update(7, letters("ABCD"), states("ABCD"), 4)

    def generation(inputs, target, count, begin, script):
        trace = Traced(script)
        pools.update(7, letters(inputs), states(inputs), count)
        rows = ops.vanilla_generation_inputs(
            pools.tokens_RK[slot], pools.hidden_RKD[slot], letters(target),
            torch.arange(begin, begin + 4), count,
        )  # fmt: skip
        assert rows[-1].all()
        assert trace.draft(*rows[:3]) == script
        return trace

    first = generation("EFGH", "FGXY", 3, 4, "NOP")
    assert first.seen == ["FGX/H_E,H_F,H_G", "GXN/H_F,H_G,h_X", "XNO/H_G,h_X,h_N"]
    assert first.positions == [[4, 5, 6]] * 3
    second = generation("XNOP", "KZZZ", 1, 7, "UVQ")
    assert second.seen == ["GXK/H_F,H_G,H_X", "XKU/H_G,H_X,h_K", "KUV/H_X,h_K,h_U"]
    assert second.positions == [[5, 6, 7]] * 3
    seq_lens, kv_lens = ops.vanilla_lens(ints(4), ints(7 + 4), ints(1), 0, 3)
    assert (seq_lens.tolist(), kv_lens.tolist()) == ([3], [5 + 3])


@given(
    num_drafts=st.integers(1, 5), num_prompt=st.integers(1, 7), seed=st.integers(0, 999),
    num_steps=st.integers(1, 8),
)  # fmt: skip
def test_t07_pools_against_the_list_of_tokens(num_drafts, num_prompt, seed, num_steps):
    """M5, M6, H-6, H-9, H-21: for any acceptance, the rows are the last committed tokens."""
    rng = random.Random(seed)
    pools = ops.MTPPools(1, num_drafts, 1, relaxed=True)
    pools.add(0)
    pools.update(0, ints(*range(50, 59)), torch.full((9, 1), 50.0), 9)  # an earlier owner
    pools.delta_R[0] = 1
    pools.free(0)
    slot = pools.add(1)
    assert pools.delta_R[slot] == 0
    assert (pools.resource_count, pools.needed_to_completion()) == (1, 0)
    known = [rng.randrange(1, 40) for _ in range(num_prompt)]
    rows = ints(*known)
    pools.update(1, rows, rows.float().unsqueeze(1), num_prompt)
    bonus, written = rng.randrange(1, 40), set(range(num_prompt))
    for _ in range(num_steps):
        count = rng.randint(1, num_drafts + 1)
        inputs = [bonus, *(rng.randrange(1, 40) for _ in range(num_drafts))]
        bonus = rng.randrange(1, 40)
        accepted = [*inputs[1:count], bonus, *[0] * (num_drafts + 1 - count)]
        begin = len(known)
        known += inputs[:count]
        rows = ints(*inputs)
        window = ops.committed_window(pools.tokens_RK[slot], rows, count)
        pools.update(1, rows, rows.float().unsqueeze(1), count)
        padded = [0] * num_drafts + known
        assert pools.tokens_RK[slot].tolist() == padded[-num_drafts:]
        assert window.tolist() == padded[-num_drafts - 1 :] if len(known) > num_drafts else True
        assert window[1:].tolist() == pools.tokens_RK[slot].tolist()
        tokens, hidden, positions, valid = ops.vanilla_generation_inputs(
            pools.tokens_RK[slot], pools.hidden_RKD[slot], ints(*accepted),
            torch.arange(begin, begin + num_drafts + 1), count,
        )  # fmt: skip
        assert tokens.tolist() == [*padded, bonus][-num_drafts:]
        true_positions = range(len(known) - num_drafts, len(known))
        assert positions.tolist() == [max(p, 0) for p in true_positions]
        assert valid.tolist() == [p >= 0 for p in true_positions]
        for position, state, is_valid in zip(positions, hidden, valid, strict=True):
            if is_valid:
                assert float(state) == known[position]
        written |= set(range(max(0, len(known) - num_drafts - 1), len(known)))
    assert written == set(range(len(known)))  # K + 1 rows skip no slot


def test_t07_a_window_of_k_rows_skips_slots():
    """H-21, K=1: the fault that `committed_window` mends."""
    length, written = 4, set(range(4))
    for _ in range(10):
        length += 2  # all accepted
        written |= set(range(length - 1, length))
    assert len(written) < length


def test_t07_short_prompt_has_no_negative_positions():
    """H-9: L=1, K=3 gives -1, 0, 1 in the reference."""
    _, _, positions, valid = ops.vanilla_generation_inputs(
        ints(0, 5, 6), torch.zeros(3, 1), ints(7, 0, 0, 0), torch.arange(1, 5), 1
    )
    assert positions.tolist() == [0, 0, 1]
    assert valid.tolist() == [False, True, True]


# --- T08: lengths and positions against a replay ---


@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=4), num_drafts=st.integers(1, 5),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_t08_lengths_equal_a_replay_of_the_true_tokens(prompts, num_drafts, seed):
    """M8, M11, A9, E3: every pass attends exactly to what is committed and drafted so far."""
    rng = random.Random(seed)
    num_contexts = rng.randint(0, len(prompts))
    context_lens = prompts[:num_contexts]
    counts = [1] * num_contexts + [rng.randint(1, num_drafts + 1) for _ in prompts[num_contexts:]]
    # what the target's step saw: the prompt, or the committed tokens and K + 1 more
    seen = context_lens + [length + num_drafts + 1 for length in prompts[num_contexts:]]
    committed = context_lens + [
        length + count
        for length, count in zip(prompts[num_contexts:], counts[num_contexts:], strict=True)
    ]
    new_rows = context_lens + [num_drafts + 1] * (len(prompts) - num_contexts)
    accepted = ints(*counts)

    seq_lens, kv_lens = ops.vanilla_lens(
        ints(*new_rows), ints(*seen), accepted, num_contexts, num_drafts
    )
    assert kv_lens.tolist() == committed
    assert seq_lens.tolist()[num_contexts:] == [num_drafts] * (len(prompts) - num_contexts)

    packed, begin, last_rows = [], 0, []
    for request, length in enumerate(new_rows):
        packed += [(request, seen[request] - length + row) for row in range(length)]
        kept = length if request < num_contexts else counts[request]
        last_rows.append(begin + kept - 1)
        begin += length
    gather = ops.eagle_step0_gather(context_lens, accepted, num_drafts)
    assert gather.tolist() == last_rows
    assert [packed[row] for row in gather] == [
        (request, length - 1) for request, length in enumerate(committed)
    ]
    for step in range(1, num_drafts + 1):
        kv_lens = ops.eagle_later_lens(ints(*seen), accepted, num_contexts, num_drafts, step)
        assert kv_lens.tolist() == [length + step for length in committed]

    rejected = [s - c for s, c in zip(seen, committed, strict=True)]
    limit = max(committed)  # the longest has no room for a draft
    lengths, positions = ops.eagle_draft_lens(
        ints(*seen), ints(*[c - 1 for c in committed]), ints(*rejected), max_model_len=limit
    )
    assert lengths.tolist() == [min(c + 1, limit) for c in committed]
    assert positions.tolist() == [min(c, limit - 1) for c in committed]


def test_t08_positions_past_the_end_write_nothing():
    """E5, S5, H-16: slot PAD, position 0, length 1; the table's end and padded rows are safe."""
    table = ints([3, 5], [4, 6], [7, 8], [1, 2])
    positions, lengths, slots = ops.advance_positions(
        ints(2, 3, 6, 7), ints(3, 4, 7, 8), table, block_size=4, max_model_len=8, batch_size=6
    )
    assert positions.tolist() == [3, 4, 7, 0]
    assert lengths.tolist() == [4, 5, 8, 1]
    assert slots.tolist() == [3 * 4 + 3, 6 * 4, 8 * 4 + 3, PAD, PAD, PAD]
    *_, slots = ops.advance_positions(
        ints(9), ints(10), ints([3, 5]), block_size=4, max_model_len=99
    )
    assert slots.tolist() == [5 * 4 + 2]  # clamped to the last block of the table

"""Bucket lists, modes, recorder and dispatcher over small callables; no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compilespec.cudagraphs.buckets import (
    Buckets,
    default_decode,
    default_prefill,
    read_buckets,
    smallest,
)
from compilespec.cudagraphs.dispatcher import Dispatcher, capture_all
from compilespec.cudagraphs.drivers import EmulatedDriver, Graph, weak_tensor
from compilespec.cudagraphs.inputs import BatchInputs
from compilespec.cudagraphs.modes import MODES, GraphOptions, read_graph_options, units_for
from compilespec.cudagraphs.recorder import GraphRecorder
from compilespec.cudagraphs.recording import Signature
from compilespec.cudagraphs.report import GraphKey
from compilespec.errors import InvalidOption, StaleGraphInput
from compilespec.lowering.stitching import OpStep, PieceStep, Stitched, StitchPlan
from compilespec.program import InputSpec, LoweredPhase, Phase, ProgramConfig, StepKey
from compilespec.progress import Progress, Reporter

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = ProgramConfig(
    num_draft_tokens=1, max_batch_size=9, max_seq_len=32, max_prefill_tokens=24, block_size=4,
    num_blocks=8, vocab_size=7, dtype=torch.float64, device=CPU,
)  # fmt: skip


# --- bucket lists ---


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 100, 256])
def test_default_decode_buckets_hold_every_batch_and_end_at_the_maximum(most: int) -> None:
    buckets = default_decode(most)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == (most,)
    for size in range(1, most + 1):
        (chosen,) = smallest(buckets, (size,)) or (0,)
        assert size <= chosen
        assert chosen in (1, 2, 4) or chosen - size < 16, "padding is bounded"


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 16), (8, 64), (64, 65), (8, 2048)])
def test_default_prefill_buckets_hold_every_batch(rows: int, tokens: int) -> None:
    buckets = default_prefill(rows, tokens)
    assert max(bucket[1] for bucket in buckets) == tokens
    for count in {1, 2, 31, 64, 65, tokens - 1, tokens} & set(range(1, tokens + 1)):
        for requests in {1, min(rows, count)}:
            chosen = smallest(buckets, (requests, count))
            assert chosen is not None
            assert chosen[1] <= max(64, 1.5 * count)


def test_the_smallest_bucket_has_the_fewest_tokens_then_the_fewest_requests() -> None:
    buckets = [(1, 64), (8, 64), (1, 128), (4, 32)]
    assert smallest(buckets, (1, 40)) == (1, 64)
    assert smallest(buckets, (2, 40)) == (8, 64)
    assert smallest(buckets, (2, 32)) == (4, 32)
    assert smallest(buckets, (2, 65)) is None


def test_buckets_are_read_from_sizes_or_by_phase() -> None:
    sizes = {"max_batch_size": 8, "max_prefill_tokens": 64}
    assert read_buckets(None, **sizes) is None
    assert read_buckets([8, 2, 2], **sizes) == Buckets(decode=((2,), (8,)))
    both = {"decode": [8], "prefill": [(8, 64), (1, 16)]}
    assert read_buckets(both, **sizes) == Buckets(decode=((8,),), prefill=((1, 16), (8, 64)))


@pytest.mark.parametrize(
    "given",
    [[], [1, 4], [0, 8], [8.0], [True, 8], {"decode": [4]}, {"verify": [8]}, {},
     {"prefill": [(8, 63)]}, {"prefill": [(7, 64)]}, {"prefill": [64]}, {"prefill": []}],
    ids=str,
)  # fmt: skip
def test_buckets_that_hold_not_all_batches_are_refused(given: object) -> None:
    with pytest.raises(InvalidOption, match=r"^buckets must"):
        read_buckets(given, max_batch_size=8, max_prefill_tokens=64)


# --- modes ---


@pytest.mark.parametrize(
    ("mode", "decode", "prefill"),
    [
        ("full_and_piecewise", "full", "piecewise"),
        ("full", "full", "full"),
        ("full_decode_only", "full", None),
        ("piecewise", "piecewise", "piecewise"),
        ("none", None, None),
    ],
)
def test_kinds_of_graphs_by_mode(mode: str, decode: str | None, prefill: str | None) -> None:
    kinds = GraphOptions(mode=mode).kinds_on(CPU)
    assert (kinds.get("decode"), kinds.get("prefill")) == (decode, prefill)
    wanted = {p for p, kind in (("decode", decode), ("prefill", prefill)) if kind == "piecewise"}
    assert set(units_for(kinds)) == wanted, "pieces are compiled where pieces are captured"


def test_auto_is_full_and_piecewise_on_cuda_and_nothing_on_the_cpu() -> None:
    auto = GraphOptions()
    assert auto.kinds_on(CUDA) == MODES["full_and_piecewise"]
    assert auto.kinds_on(CPU) == {}
    assert read_graph_options("full") == GraphOptions(mode="full")
    with pytest.raises(InvalidOption, match=r"cudagraphs must be one of auto, .*; got 'always'"):
        read_graph_options("always")
    with pytest.raises(InvalidOption, match="max_seconds"):
        GraphOptions(max_seconds=-1)


# --- a user's phase ---


class Toy:
    """A decode step on a state buffer: adds 1 to each live row, returns it with the row."""

    def __init__(self) -> None:
        self.state = torch.zeros(CONFIG.max_batch_size + 1, dtype=torch.float64)
        self.weight = torch.ones(3, dtype=torch.float64)
        self.batches: list[int] = []

    def __call__(self, row_B: Tensor, state: Tensor, weight: Tensor) -> list[Tensor]:
        self.batches.append(len(row_B))
        index_B = torch.where(row_B >= 0, row_B, CONFIG.max_batch_size).long()
        state.index_put_((index_B,), torch.where(row_B >= 0, state[index_B] + weight[0], 0.0))
        return [state[index_B].clone(), row_B * 10]

    @property
    def fixed(self) -> dict[str, Tensor]:
        return {"state": self.state, "weight": self.weight}

    def phase(self, name: Phase = "decode") -> LoweredPhase:
        return LoweredPhase(
            key=StepKey(name, 0),
            call=self,
            inputs=(
                InputSpec(name="row_B", kind="batch"),
                InputSpec(name="state", kind="state"),
                InputSpec(name="weight", kind="weight"),
            ),
            outputs=("value", "tens"),
            compile_ms=0.0,
            from_cache=False,
        )


class MeteredDriver(EmulatedDriver):
    """Takes memory for every capture, and runs out of it for some calls."""

    def __init__(self, *, mib: float = 0.0, fails: Callable[[int], bool] = lambda n: False) -> None:
        self.num_captures, self._taken, self._mib, self._fails = 0, 0, mib, fails

    def capture(self, call: Callable[[], Sequence[Tensor]]) -> tuple[Graph, Sequence[Tensor]]:
        self.num_captures += 1
        if self._fails(self.num_captures):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        self._taken += int(self._mib * 2**20)
        return super().capture(call)

    def reserved_bytes(self) -> int:
        return self._taken

    def free_bytes(self) -> int | None:
        return 400 * 2**20


def dispatcher(
    toy: Toy,
    *,
    driver: EmulatedDriver | None = None,
    options: GraphOptions | None = None,
    sizes: Sequence[int] = (1, 4, 8),
) -> Dispatcher:
    recorder = GraphRecorder(driver or EmulatedDriver(), options or GraphOptions(), mode="full")
    return Dispatcher(
        toy.phase(), toy.fixed, CONFIG, buckets=[(size,) for size in sizes], kind="full",
        recorder=recorder,
    )  # fmt: skip


def captured(one: Dispatcher) -> list[tuple[int, ...]]:
    assert one._recorder is not None
    return [record.key.bucket for record in one._recorder.report.captured]


@pytest.mark.parametrize(
    ("batch", "bucket"), [(1, 1), (2, 4), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)]
)
def test_a_batch_runs_in_the_smallest_bucket_that_holds_it(batch: int, bucket: int) -> None:
    toy = Toy()
    one = dispatcher(toy)
    capture_all([one], startup_seconds=600)
    assert not toy.state.any(), "capturing ran on padded rows alone"
    toy.batches.clear()
    rows = list(range(batch))[::-1]
    values, tens = one({"row_B": rows})
    assert toy.batches == [bucket]
    assert tens[:batch].tolist() == [10 * row for row in rows]
    assert values[:batch].tolist() == [1.0] * batch
    assert len(values) == bucket
    assert values[batch:].isnan().all(), "rows beyond the batch are poisoned"
    assert toy.state[:-1].tolist() == [1.0] * batch + [0.0] * (CONFIG.max_batch_size - batch)
    assert one.num_recompiles == 0


def test_a_batch_larger_than_every_bucket_runs_as_it_is() -> None:
    toy = Toy()
    one = dispatcher(toy)
    told: list[Progress] = []
    capture_all([one], startup_seconds=600, progress=Reporter(told.append))
    assert [(r.what, r.index, r.total) for r in told if r.done] == [
        ("decode, K=0: 8 (full)", 1, 3),
        ("decode, K=0: 4 (full)", 2, 3),
        ("decode, K=0: 1 (full)", 3, 3),
    ]  # fmt: skip
    toy.batches.clear()
    values, _ = one({"row_B": list(range(9))})
    assert toy.batches == [9], "unpadded, uncaptured (E4)"
    assert values.tolist() == [1.0] * 9
    assert one._recorder is not None
    assert one._recorder.report.num_uncaptured == 1
    assert one._recorder.report.num_replays == 0


def test_decode_steps_are_captured_first_and_of_each_phase_the_largest() -> None:
    """What is left when the time at start is spent stalls traffic later: better a prefill."""
    toys = [Toy(), Toy()]
    driver = EmulatedDriver()
    recorder = GraphRecorder(driver, GraphOptions(), mode="full_and_piecewise")
    keys = []
    recorder.capture = lambda key, phase, inputs: keys.append(key)  # type: ignore[assignment]
    decode = Dispatcher(
        toys[0].phase(), toys[0].fixed, CONFIG, buckets=[(1,), (9,), (4,)], kind="full",
        recorder=recorder,
    )  # fmt: skip
    prefill = Dispatcher(
        replace(
            toys[1].phase("prefill"), inputs=(InputSpec(name="ids_T", kind="batch"),),
            stitched=Stitched(StitchPlan(num_inputs=1, steps=(), outputs=()), {}),
        ), {}, CONFIG, buckets=[(1, 8), (4, 8), (1, 24), (9, 24)], kind="piecewise",
        recorder=recorder,
    )  # fmt: skip
    capture_all([prefill, decode], startup_seconds=600)
    assert [key.bucket for key in keys] == [(9,), (4,), (1,), (9, 24), (1, 24), (4, 8), (1, 8)]
    assert [key.kind for key in keys] == ["full"] * 3 + ["piecewise"] * 4


def test_without_time_at_start_buckets_are_captured_when_they_are_needed() -> None:
    toy = Toy()
    one = dispatcher(toy)
    capture_all([one], startup_seconds=0)
    assert captured(one) == []
    one({"row_B": [2, 5]})
    one({"row_B": [2, 5, 6]})
    assert captured(one) == [(4,)], "once, and no other"
    assert toy.state.tolist()[:7] == [0, 0, 2, 0, 0, 2, 1]


def test_out_of_memory_drops_a_bucket_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    one = dispatcher(toy, driver=MeteredDriver(fails=lambda number: number in (1, 3)))
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        capture_all([one], startup_seconds=600)
    assert captured(one) == [(4,)], "8 failed, 4 went well, 1 failed"
    assert "no graph for decode, K=0: 8 (full): out of memory" in caplog.text
    assert "Tried to allocate 2.00 GiB" in caplog.text
    assert one._recorder is not None
    assert len(one._recorder.report.dropped) == 2
    toy.batches.clear()
    one({"row_B": [3]})
    one({"row_B": [0, 1, 2, 3, 4]})
    assert toy.batches == [4, 5], "1 runs in the next larger bucket, 5 uncaptured at its own size"
    one({"row_B": [3]})
    assert toy.state[3] == 3, "nothing is tried again"
    assert len(one._recorder.report.dropped) == 2


def test_memory_budget_ends_capturing(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    one = dispatcher(toy, driver=MeteredDriver(mib=30), options=GraphOptions(max_mib=50))
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        capture_all([one], startup_seconds=600)
    assert captured(one) == [(8,), (4,)], "the second goes over, the third is not begun"
    assert "graphs take 60 MiB (max_mib)" in caplog.text
    one({"row_B": [3]})
    assert toy.state[3] == 1


def test_memory_budget_is_a_quarter_of_what_is_free() -> None:
    one = dispatcher(Toy(), driver=MeteredDriver(mib=100))
    capture_all([one], startup_seconds=600)
    assert captured(one) == [(8,)], "100 of 400 MiB"


def test_time_budget_ends_capturing_for_good(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    one = dispatcher(toy, options=GraphOptions(max_seconds=0))
    with caplog.at_level(logging.WARNING, logger="compilespec"):
        one({"row_B": [3]})
    assert captured(one) == []
    assert "(max_seconds)" in caplog.text
    assert toy.batches == [1]


# --- replay ---


def other_address(tensor: Tensor) -> Tensor:
    return tensor.clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_address, "expected address 0x"),
        (lambda t: t.to(torch.float32), "expected dtype torch.float64"),
        (lambda t: t[:2], r"expected shape \[3\], got \[2\]"),
        (lambda t: t.to("meta"), "expected device cpu, got meta"),
    ],
    ids=["address", "dtype", "shape", "device"],
)
def test_replay_refuses_an_input_that_is_another(
    change: Callable[[Tensor], Tensor], words: str
) -> None:
    toy = Toy()
    one = dispatcher(toy)
    recording = one.capture((4,))
    assert recording is not None
    inputs = one._inputs((4,), {"row_B": [1]}, None)
    recording.replay(inputs)
    assert toy.state[1] == 1
    inputs[2] = change(inputs[2])
    with pytest.raises(StaleGraphInput, match=words) as caught:
        recording.replay(inputs)
    message = str(caught.value)
    assert "decode, K=0: 4 (full): input weight" in message
    assert "copy_()" in message
    assert "\n" not in message
    assert toy.state[1] == 1, "nothing ran"


def test_replays_between_pieces_keep_no_autograd_history() -> None:
    """A model's own parameters, such as learned sinks, may ask for gradients."""
    plan = StitchPlan(
        num_inputs=2,
        steps=(
            PieceStep(piece="twice", inputs=(0,), outputs=(2,)),
            OpStep(target="aten.mul.Tensor", args=(("value", 2), ("value", 1)), output=3),
            PieceStep(piece="twice", inputs=(3,), outputs=(4,)),
        ),
        outputs=(4,),
    )
    stitched = Stitched(plan, {"twice": lambda given: (given * 2,)})
    inputs = (InputSpec(name="row_B", kind="batch"), InputSpec(name="sinks", kind="weight"))
    phase = replace(Toy().phase(), inputs=inputs, call=torch.no_grad()(stitched), stitched=stitched)
    recorder = GraphRecorder(EmulatedDriver(), GraphOptions(), mode="piecewise")
    one = Dispatcher(
        phase, {"sinks": torch.nn.Parameter(torch.ones(1))}, CONFIG, buckets=[(2,)],
        kind="piecewise", recorder=recorder,
    )  # fmt: skip
    for _ in range(2):
        (made,) = one({"row_B": [3, 5]})
        assert made.tolist() == [12, 20]
        assert made.grad_fn is None


def test_values_written_into_a_captured_tensor_are_seen() -> None:
    toy = Toy()
    one = dispatcher(toy)
    one({"row_B": [1]})
    toy.weight.fill_(7)
    one({"row_B": [1]})
    assert toy.state[1] == 8


def test_outputs_stand_at_one_place_until_the_next_call() -> None:
    toy = Toy()
    one = dispatcher(toy)
    first, _ = one({"row_B": [0, 1]})
    kept = first[:2].clone()
    second, _ = one({"row_B": [2, 0, 1]})
    assert kept.tolist() == [1.0, 1.0]
    assert first[:2].tolist() == [1.0, 2.0], "what was there is gone"
    third, _ = one({"row_B": [2]})
    assert first.data_ptr() == second.data_ptr() == third.data_ptr(), "buckets share the place"


def test_the_graph_holds_no_output_of_the_captured_call() -> None:
    """Outputs are copied out inside the graph: the pool is free for the next bucket."""
    import gc
    import weakref

    toy, made = Toy(), []
    phase = toy.phase()

    def call(*inputs: Tensor) -> list[Tensor]:
        results = toy(*inputs)
        made.extend(weakref.ref(result) for result in results)
        return results

    recorder = GraphRecorder(EmulatedDriver(), GraphOptions(), mode="full")
    one = Dispatcher(
        replace(phase, call=call), toy.fixed, CONFIG, buckets=[(4,)], kind="full", recorder=recorder
    )
    one({"row_B": [1]})
    gc.collect()
    assert len(made) == 6, "a warm-up, a capture, a replay"
    assert all(ref() is None for ref in made)


def test_report_is_plain_data() -> None:
    one = dispatcher(Toy(), driver=MeteredDriver(mib=30, fails=lambda number: number == 2))
    capture_all([one], startup_seconds=600)
    one({"row_B": [1]})
    assert one._recorder is not None
    report = one._recorder.report.as_dict()
    assert report["mode"] == "full"
    assert report["driver"] == "emulated"
    assert [graph["bucket"] for graph in report["graphs"]] == [(8,), (1,)]
    assert all(graph["num_graphs"] == 1 and graph["seconds"] > 0 for graph in report["graphs"])
    assert [graph["mib"] for graph in report["graphs"]] == [30.0, 30.0]
    assert report["mib"] == 60
    assert list(report["dropped"]) == ["decode, K=0: 4 (full)"]
    assert (report["num_replays"], report["num_uncaptured"]) == (1, 0)
    assert str(GraphKey(StepKey("prefill", 1), (2, 64), "piecewise")) == "prefill: 2x64 (piecewise)"
    assert str(GraphKey(StepKey("decode", 1), (2,), "full")) == "decode, K=1: 2 (full)"


# --- inputs ---


def test_batch_inputs_are_padded_at_fixed_aligned_addresses() -> None:
    inputs = BatchInputs(("ids_T", "row_T", "commit_row_R"), {"T": 70, "R": 3}, CPU)
    sizes = {"R": 2, "T": 66}
    inputs.write({"ids_T": [5, 6], "row_T": [0, 0], "commit_row_R": [0]}, sizes)
    views = inputs.views(sizes)
    assert views["ids_T"].tolist() == [5, 6] + [0] * 64
    assert views["row_T"].tolist() == [0, 0] + [-1] * 64
    assert views["commit_row_R"].tolist() == [0, -1]
    assert all(view.dtype == torch.int32 for view in views.values())
    base = views["ids_T"].data_ptr()
    assert all((view.data_ptr() - base) % 256 == 0 for view in views.values())
    assert inputs.views(sizes)["row_T"].data_ptr() == views["row_T"].data_ptr()
    inputs.write({"ids_T": [9]}, sizes, {"ids_T": 4})
    assert views["ids_T"].tolist() == [9] + [4] * 65, "no entry of an earlier batch is left"
    assert views["row_T"].tolist() == [-1] * 66


def test_signature_names_what_differs() -> None:
    tensor = torch.zeros(4, 6)
    assert Signature.of(tensor).difference(Signature.of(tensor)) == ""
    assert "strides" in Signature.of(tensor).difference(Signature.of(tensor.t().contiguous().t()))


@pytest.mark.gpu
def test_weak_tensors_do_not_keep_memory() -> None:
    tensor = torch.arange(24, device="cuda", dtype=torch.bfloat16).view(4, 6).t()
    weak = weak_tensor(tensor)
    assert torch.equal(weak, tensor)
    assert (weak.data_ptr(), weak.stride()) == (tensor.data_ptr(), tensor.stride())
    before = torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() < before

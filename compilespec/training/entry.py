"""`train()`: a drafter for a target, from data to a checkpoint that `compile()` loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compilespec.errors import InvalidOption
from compilespec.errors.suggest import not_one_of
from compilespec.ops.device import traits_of
from compilespec.pipeline.entry import compile as compile_engine
from compilespec.tracing.load import Target, load_target
from compilespec.training.data import FileData, Loader, read_prompts
from compilespec.training.draft_model import DraftModelTraining
from compilespec.training.eagle3 import Eagle3Training
from compilespec.training.files import alone_in
from compilespec.training.generation import GENERATED, Generated, generate_answers
from compilespec.training.method import TrainingMethod
from compilespec.training.mtp import MtpEagleTraining, MtpTraining
from compilespec.training.options import TrainOptions
from compilespec.training.report import Record
from compilespec.training.state import FILE_NAME, RunState
from compilespec.training.stored_states import (
    KeptStates,
    RecordedStates,
    StateStore,
    is_recorded,
)
from compilespec.training.teacher import Teacher
from compilespec.training.trainer import Trainer, num_trained

METHODS: Mapping[str, type[TrainingMethod]] = {
    "eagle3": Eagle3Training,
    "draft_model": DraftModelTraining,
    "mtp": MtpTraining,
    "mtp_eagle": MtpEagleTraining,
}


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run."""

    output: Path
    """The drafter's checkpoint, for `draft=`."""
    num_steps: int
    acceptance: float
    """The best measured acceptance length; 0.0 without a measurement."""
    last: Record | None
    """The last step of this call; None where the run was over already."""
    interrupted: bool = False
    """True if a signal ended it, with its state saved."""


class Listener:
    """Listens to a run; your own class shows it."""

    def on_plan(self, lines: list[str]) -> None:
        """Called with the plan and its costs before anything begins."""

    def on_generated(self, state: Generated) -> None:
        """Called after each answered prompt."""

    def on_record(self, record: Record, run: RunState) -> None:
        """Called after each step."""


def train(
    model: nn.Module | str | Path,
    data: str | Path | Loader,
    output: str | Path,
    *,
    method: str | TrainingMethod = "eagle3",
    generate: bool = False,
    max_new_tokens: int = 256,
    temperatures: tuple[float, ...] = (0.0,),
    chat_template: bool = True,
    resume: bool = False,
    tokenizer: Any = None,
    listener: Listener | None = None,
    options: TrainOptions | None = None,
) -> TrainResult:
    """Train a drafter for a target.

    Args:
        model: the target, as `compile` takes it.
        data: a .jsonl or .txt file or a folder of such (see `compilespec.training.data`), a folder
            that `spec="save_hidden_states"` wrote, or a `Loader`.
        output: a folder for the drafter; beside it `training/` with state, log, table and plots.
        method: by name, or your own `TrainingMethod`.
        generate: `data` holds prompts; the target answers them first, into output/generated.jsonl.
        max_new_tokens: of an answer.
        temperatures: of the answers, each prompt's one of them.
        chat_template: a prompt that is a bare text is asked through the model's chat template,
            where it has one; False continues the text.
        resume: go on with the run in `output`, if there is one: with the losses that it would have
            had without a stop.
        listener: called with what happens.
    Raises: SpecError.
    """
    options, listener = options or TrainOptions(), listener or Listener()
    taught, output = find_method(method), Path(output)
    has_state = (output / "training" / FILE_NAME).is_file()
    if has_state and not resume:
        raise InvalidOption(
            f"{output} holds a run already: go on with it by resume=True, or give another folder"
        )
    target = load_target(model, tokenizer=tokenizer)
    if generate:
        if not isinstance(data, str | Path):
            raise InvalidOption("generate=True takes a file of prompts, not a loader")
        data = answer(
            target, data, output, max_new_tokens, temperatures, listener,
            backend=options.backend, chat_template=chat_template,
        )  # fmt: skip
    teacher = Teacher(_for_teaching(target, model, tokenizer, options))
    loader = _load_data(data, target, teacher, options)
    with alone_in(output / "training"):
        store: StateStore | None = loader if isinstance(loader, RecordedStates) else None
        if options.keep_states and store is None:
            store = KeptStates(output / "training" / "states")
        trainer = Trainer(
            target, teacher, taught, loader, output, options, listener.on_record, store
        )
        if has_state:
            trainer.resume()
        listener.on_plan(
            [*plan_of(trainer), *(loader.told() if isinstance(loader, FileData) else ())]
        )
        last = trainer.train()
    return TrainResult(
        output=output,
        num_steps=trainer.run.step,
        acceptance=trainer.run.best,
        last=last,
        interrupted=trainer.interrupted,
    )


def answer(
    target: Target,
    data: str | Path,
    output: Path,
    max_new_tokens: int,
    temperatures: tuple[float, ...],
    listener: Listener,
    *,
    backend: str = "inductor",
    chat_template: bool = True,
) -> Path:
    """Let the target answer the prompts of `data`; returns the file of its answers."""
    has_template = bool(getattr(target.tokenizer, "chat_template", None))
    prompts, told = read_prompts(data, as_messages=chat_template and has_template)
    path = output / GENERATED
    listener.on_plan(told)
    with compile_engine(
        target.model, "none", tokenizer=target.tokenizer, max_batch_size=16,
        max_seq_len=min(target.max_seq_len or 2048, 2048), backend=backend,
    ) as engine:  # fmt: skip
        state = generate_answers(
            engine,
            prompts,
            path,
            max_new_tokens=max_new_tokens,
            temperatures=temperatures,
            on_record=listener.on_generated,
        )
    failed = f"; {state.num_failed} failed, the first: {state.why}" if state.num_failed else ""
    listener.on_plan([f"answers: {state.num_done} of {state.num_prompts}{failed}"])
    return path


def find_method(method: str | TrainingMethod) -> TrainingMethod:
    """Raises: InvalidOption."""
    if isinstance(method, TrainingMethod):
        return method
    if method not in METHODS:
        raise not_one_of("method", method, METHODS)
    return METHODS[method]()


def plan_of(trainer: Trainer) -> list[str]:
    """The costs of a run: sizes, memory and disk."""
    trained = num_trained(trainer.drafter)
    options, info = trainer.options, trainer.teacher.info
    rows = trainer.method.draft_ids(trainer.drafter)
    num_rows = info.vocab_size if rows is None else len(rows)
    states = options.batch_tokens * info.hidden_size * 4 * 8
    probs = options.batch_tokens * num_rows * 4 * 2  # and the slopes of one draft step
    heads = options.depth * num_rows * info.hidden_size * 4  # gradients, of each draft step
    for_step = states + probs + heads
    return [
        f"{trainer.method.spec}: {trained / 1e6:.2f}M parameters to train, head of {num_rows} of "
        f"{info.vocab_size} tokens",
        f"data: {len(trainer.learned)} sequences to learn from, {len(trainer.judged)} held out"
        f"{'' if trainer.judged else ': too few, the acceptance will not be measured'}",
        f"memory beside the model: {trained * 16 / 2**20:.0f} MiB for weights and optimiser, up to "
        f"{for_step / 2**20:.0f} MiB for a step; disk: {trained * 12 / 2**20:.0f} MiB for "
        f"the state, {trained * trainer.target.dtype.itemsize / 2**20:.0f} MiB for the drafter",
        *_plan_of_states(trainer),
    ]


def _plan_of_states(trainer: Trainer) -> list[str]:
    """The costs of keeping the hidden states."""
    if not isinstance(trainer.store, KeptStates):
        return []
    num_tokens = sum(map(len, trainer.learned))
    return [
        f"hidden states: up to {num_tokens * trainer.store.row_bytes / 2**20:.0f} MiB of disk for "
        f"the {num_tokens} tokens that there are now, {trainer.store.row_bytes} bytes each"
    ]


def _load_data(
    data: str | Path | Loader, target: Target, teacher: Teacher, options: TrainOptions
) -> Loader:
    if not isinstance(data, str | Path):
        return data
    if is_recorded(Path(data)):
        return RecordedStates(Path(data))
    return FileData(
        data, target.tokenizer, vocab_size=teacher.info.vocab_size, max_length=options.max_length
    )


def _for_teaching(
    target: Target, model: nn.Module | str | Path, tokenizer: Any, options: TrainOptions
) -> Target:
    """The target in the teacher's dtype: half precision is slow on most processors."""
    dtype: torch.dtype | str | None = options.dtype
    if dtype is None and traits_of(target.device).is_cpu and target.dtype.itemsize < 4:
        dtype = torch.float32
    if dtype is None:
        return target
    if isinstance(model, nn.Module):
        import copy

        return load_target(copy.deepcopy(model), dtype=dtype, tokenizer=tokenizer)
    return load_target(model, dtype=dtype, tokenizer=tokenizer)

"""The processes of a tensor-parallel job: rank 0 schedules, the others repeat its calls.

The calls of rank 0's executor go to the others as one message a launch; inside a launch the ranks
communicate through the collectives of the step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from compilespec.errors import InvalidOption, NotSupported, RankLost, RanksDiffer
from compilespec.ops.collectives.group import ProcessGroup, lost_rank, serve_process
from compilespec.passes.splice.evidence import Evidence
from compilespec.runtime.executor import Executor, PrefillChunk
from compilespec.runtime.sampling_rows import RowSampling, TokenLogprobs
from compilespec.tracing.adapter_files import LowRank

_MESSAGE_BYTES = 4096  # bytes of a launch's first message, its length included
_LENGTH_BYTES = 8
_FOREVER = timedelta(days=3650)  # followers wait for the next launch without limit


_open: list[object] = []  # the executor of this process that other ranks follow; one at a time


class Ranks:
    """This process among the processes of its job."""

    def __init__(self, size: int) -> None:
        """Join the job that torchrun started.

        Raises: NotSupported (there is no job, or another engine is open); InvalidOption (the job
        has another size).
        """
        if _open:
            raise NotSupported(
                "the ranks of a job follow one engine at a time: close the other one first"
            )
        torch_distributed = torch.distributed
        if not torch_distributed.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise NotSupported(
                    f"tensor_parallel_size={size} needs as many processes: start the program with "
                    f"torchrun --nproc-per-node {size}"
                )
            torch_distributed.init_process_group("gloo")
        world = torch_distributed.get_world_size()
        if world != size:
            raise InvalidOption(
                f"tensor_parallel_size={size} must be the number of processes of the job, which "
                f"is {world}: start the program with torchrun --nproc-per-node {size}"
            )
        self.group = ProcessGroup()
        self.rank, self.size = self.group.rank, size
        self._control = torch_distributed.new_group(backend="gloo", timeout=_FOREVER)
        serve_process(self.group)

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare the facts that must be equal on every rank.  Raises: RanksDiffer, on every
        rank.
        """
        found: list[Any] = [None] * self.size
        with self._watched():
            torch.distributed.all_gather_object(found, dict(facts), group=self._control)
        for rank, other in enumerate(found):
            names = [name for name in found[0] if found[0][name] != other.get(name)]
            if names:
                name = names[0]
                raise RanksDiffer(
                    f"rank {rank} has other {name} than rank 0: {other.get(name)}, expected "
                    f"{found[0][name]}; start every rank with the same code, model and options"
                )

    def tell(self, answer: str) -> list[str]:
        """Every rank's answer, in rank order."""
        found: list[Any] = [None] * self.size
        with self._watched():
            torch.distributed.all_gather_object(found, answer, group=self._control)
        return [str(one) for one in found]

    def send(self, data: bytes) -> None:
        """Send bytes from rank 0 to all other ranks."""
        buffer = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _MESSAGE_BYTES - _LENGTH_BYTES]
        buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rest = data[_MESSAGE_BYTES - _LENGTH_BYTES :]
        with self._watched():
            torch.distributed.broadcast(buffer, 0, group=self._control)
            if rest:
                tensor = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
                torch.distributed.broadcast(tensor, 0, group=self._control)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0."""
        buffer = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        with self._watched():
            torch.distributed.broadcast(buffer, 0, group=self._control)
            data = bytes(buffer.numpy().tobytes())
            length = int.from_bytes(data[:_LENGTH_BYTES], "little")
            data = data[_LENGTH_BYTES:][:length]
            if len(data) < length:
                rest = torch.zeros(length - len(data), dtype=torch.uint8)
                torch.distributed.broadcast(rest, 0, group=self._control)
                data += bytes(rest.numpy().tobytes())
        return data

    def part(self) -> None:
        """Wait until every rank has come this far, or ended; called after the last message."""
        with contextlib.suppress(RankLost), self._watched():
            torch.distributed.barrier(group=self._control)

    @contextlib.contextmanager
    def _watched(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise lost_rank(self.rank, "between steps", error) from error


class LeadExecutor:
    """Rank 0's executor: runs its calls, and lets the other ranks repeat them."""

    def __init__(self, executor: Executor, ranks: Ranks) -> None:
        self.geometry = executor.geometry
        self._executor, self._ranks = executor, ranks
        self._waiting: list[bytes] = []  # calls since the last message
        self._closed = False
        _open.append(self)
        atexit.register(self._leave)

    def set_blocks(
        self,
        row: int,
        blocks: Sequence[int],
        prefix: Sequence[int] = (),
        state_place: int | None = None,
    ) -> None:
        self._note("set_blocks", row, list(blocks), list(prefix), state_place)
        self._executor.set_blocks(row, blocks, prefix, state_place)

    def add_blocks(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._note("add_blocks", row, start, list(blocks))
        self._executor.add_blocks(row, start, blocks)

    def set_sampling(self, row: int, sampling: RowSampling) -> None:
        self._note("set_sampling", row, sampling)
        self._executor.set_sampling(row, sampling)

    def adapter_products(self) -> Mapping[str, tuple[int, int]]:
        return self._executor.adapter_products()

    def write_adapter(self, place: int, modules: Mapping[str, LowRank]) -> None:
        self._note("write_adapter", place, dict(modules))
        self._executor.write_adapter(place, modules)

    def logprobs(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        return self._executor.logprobs(row, tokens, count)

    def prompt_logprobs(self, row: int) -> dict[int, TokenLogprobs]:
        return self._executor.prompt_logprobs(row)

    def set_drafts(self, rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        self._note("set_drafts", list(rows), [list(ids) for ids in drafts])
        self._executor.set_drafts(rows, drafts)

    def read_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        return self._executor.read_drafts(rows)

    def read_parents(self, rows: Sequence[int]) -> Sequence[list[int] | None]:
        return self._executor.read_parents(rows)

    def keep_text(self, tokens: Sequence[int]) -> None:
        self._note("keep_text", list(tokens))
        self._executor.keep_text(tokens)

    def set_masks(self, rows: Sequence[int], masks_NSW: Tensor) -> None:
        self._note("set_masks", list(rows), torch.as_tensor(masks_NSW).clone())
        self._executor.set_masks(rows, masks_NSW)

    def launch_prefill(self, chunks: Sequence[PrefillChunk]) -> Any:
        self._send("launch_prefill", list(chunks))
        return self._executor.launch_prefill(chunks)

    def launch_decode(self, rows: Sequence[int], num_draft_tokens: int | None = None) -> Any:
        self._send("launch_decode", list(rows), num_draft_tokens)
        return self._executor.launch_decode(rows, num_draft_tokens)

    def catch_up(self, rows: Sequence[int], backlogs: Sequence[int]) -> None:
        self._send("catch_up", list(rows), list(backlogs))
        self._executor.catch_up(rows, backlogs)

    def collect(self, handle: Any) -> list[list[int]]:
        return self._executor.collect(handle)

    def evidence(self, handle: Any) -> Sequence[Evidence]:
        return self._executor.evidence(handle)

    def release_caches(self) -> int:
        self._send("release_caches")
        return self._executor.release_caches()

    def close(self) -> None:
        self._leave()
        self._executor.close()

    def _leave(self) -> None:
        """Release the other ranks; runs once."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._leave)
            _open.clear()
            with contextlib.suppress(RankLost):
                self._send("close")
                self._ranks.part()

    def _note(self, name: str, *args: Any) -> None:
        """Add a call to the next message, with its present arguments."""
        self._waiting.append(pickle.dumps((name, args)))

    def _send(self, name: str, *args: Any) -> None:
        self._note(name, *args)
        data, self._waiting = pickle.dumps(self._waiting), []
        self._ranks.send(data)


def follow(executor: Executor, ranks: Ranks) -> None:
    """Repeat rank 0's calls until it closes its executor.  Raises: RankLost."""
    while True:
        for call in pickle.loads(ranks.receive()):
            name, args = pickle.loads(call)
            getattr(executor, name)(*args)
            if name == "close":
                ranks.part()
                return

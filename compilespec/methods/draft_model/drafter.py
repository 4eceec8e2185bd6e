"""A causal language model as a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compilespec.errors import DraftMismatch
from compilespec.methods.base import Drafter
from compilespec.methods.draft_model.vocab_map import VocabMap, share_tokens
from compilespec.program import ProgramConfig, Traced
from compilespec.tracing.capture import EXAMPLE_SHAPE, output_widths, trace_call
from compilespec.tracing.target import trace_target
from compilespec.tracing.target_info import TargetInfo


class ModelDrafter(Drafter):
    """The unmodified model, traced as the target is.

    Args:
        tokenizers: tokenizers of target and draft model if their vocabularies differ; None if ids
            mean the same in both.
        num_ids: ids of a common vocabulary; None for as many as the target's head has rows.  Rows
            of a head beyond them are padding.
        mask_token_id: the draft model's id in the rows of drafts 2 to K, all of one pass; None: it
            drafts one after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        max_seq_len: int | None,
        *,
        tokenizers: tuple[Any, Any] | None = None,
        num_ids: int | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.max_seq_len = model, max_seq_len
        self._tokenizers, self._num_ids = tokenizers, num_ids
        self.num_draft_tokens = 0  # a model suggests no K
        self.mask_token_id = mask_token_id
        self.vocab_map: VocabMap | None = None

    def capture(self, config: ProgramConfig, info: TargetInfo) -> dict[str, Traced]:
        """ "forward" (input_ids, position_ids -> logits at [B, T]) and "propose" (logits_BV -> the
        best id that the target has, int32 [B], and what a draw needs: see `trace_proposal`).  With
        another vocabulary also "translate" (input_ids of the target -> those of the draft model,
        [B, T]); `propose` gives target ids in any case.  With a mask token "mask" (position_ids ->
        its ids, [B, T]).

        Raises: DraftMismatch (vocabularies, fewer positions), TraceError.
        """
        if self.max_seq_len is not None and self.max_seq_len < config.max_seq_len:
            raise DraftMismatch(
                f"the draft model takes {self.max_seq_len} positions, the program "
                f"{config.max_seq_len}: give max_seq_len={self.max_seq_len} or less"
            )
        forward = trace_target(self.model, name="draft", longest=config.max_seq_len)
        (vocab_size,) = output_widths(forward)
        calls = {"forward": forward}
        if self._tokenizers is not None:
            self._map_tokens(*self._tokenizers, info, vocab_size)
            calls["translate"] = self._trace_translation(config)
        elif vocab_size < (self._num_ids or info.vocab_size):
            raise DraftMismatch(
                f"the draft model knows {vocab_size} ids, the target "
                f"{self._num_ids or info.vocab_size}; expected one vocabulary (either may be "
                f"padded), or both tokenizers, to map the tokens they share: give tokenizer= and "
                f"draft_tokenizer="
            )
        calls["propose"] = self._trace_proposal(config, info, vocab_size)
        if self.mask_token_id is not None:
            calls["mask"] = self._trace_mask(config, self.mask_token_id)
        return calls

    def _map_tokens(self, target: Any, draft: Any, info: TargetInfo, vocab_size: int) -> None:
        known = share_tokens(target, draft, vocab_size=info.vocab_size, draft_vocab_size=vocab_size)
        self.vocab_map = known
        shared = (known.d2t_abs >= 0).nonzero().flatten()
        fed = torch.where(known.t2d >= 0, known.t2d, known.unknown_id)
        for name, tensor in (
            ("draft_id_of", fed),  # [V]: what the model is fed for each target id
            ("shared_ids", shared),  # [C]: the draft ids that may be proposed, ascending
            ("target_id_of", known.d2t_abs[shared]),  # [C]: their target ids
        ):
            self.register_buffer(name, tensor.to(info.device), persistent=False)

    def _trace_translation(self, config: ProgramConfig) -> Traced:
        def translate(input_ids: Tensor) -> Tensor:
            ids: Tensor = self.draft_id_of[input_ids.long()].to(torch.int32)  # type: ignore[index]
            return ids

        ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=config.device)
        return self._trace("translate", translate, input_ids=(ids, (0, 1)))

    def _trace_mask(self, config: ProgramConfig, mask_token_id: int) -> Traced:
        def mask(position_ids: Tensor) -> Tensor:
            return torch.full_like(position_ids, mask_token_id)

        positions = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int32, device=config.device)
        return self._trace("mask", mask, position_ids=(positions, (0, 1)))

    def _trace_proposal(self, config: ProgramConfig, info: TargetInfo, vocab_size: int) -> Traced:
        known = info.vocab_size

        def propose(logits_BV: Tensor) -> tuple[Tensor, ...]:
            mine_BV = logits_BV[:, :known]
            return mine_BV.argmax(-1).to(torch.int32), mine_BV

        def propose_shared(logits_BV: Tensor) -> tuple[Tensor, ...]:
            mine_BC = logits_BV.index_select(1, self.shared_ids)  # type: ignore[arg-type]
            ids_C: Tensor = self.target_id_of  # type: ignore[assignment]
            return ids_C[mine_BC.argmax(-1)].to(torch.int32), mine_BC, ids_C.view(-1)

        logits = torch.zeros(EXAMPLE_SHAPE[0], vocab_size, dtype=config.dtype, device=config.device)
        call = propose if self.vocab_map is None else propose_shared
        return self._trace("propose", call, logits_BV=(logits, (0,)))

    def _trace(self, name: str, call: Any, **arguments: Any) -> Traced:
        return trace_call(self, call, arguments, name=f"draft.{name}", owner="draft")

    def describe(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        shared = "" if self.vocab_map is None else f", {self.vocab_map.describe()}"
        mask = self.mask_token_id
        masked = "" if mask is None else f", all drafts of one pass, mask token {mask}"
        name = type(self.model).__name__
        return f"draft model {name}, {count / 1e6:.2f}M parameters{shared}{masked}"

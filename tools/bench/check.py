"""Checks, before any speed is printed, that a way's tokens are greedy tokens of the model.

Two programs that add the same products in different orders may part at a near tie, and then write
different, equally greedy texts.  So a difference is judged by the logits: a copy of the model in a
wider dtype reads each way's whole text at once, and no token may lie further below the best logit
than rounding explains.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

# Allowed distance below the best logit, as a share of the largest logit at that position: about two
# units in the last place for 16-bit types, what summing some thousand products leaves for others.
MARGIN_BOUND = {
    torch.bfloat16: 2.0**-6,
    torch.float16: 2.0**-9,
    torch.float32: 2.0**-17,
    torch.float64: 2.0**-40,
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One way's tokens for one prompt, compared with the baseline's."""

    way: str
    batch: int
    prompt: str
    num_tokens: int
    first_difference: int | None
    """Index of the first token that differs from the baseline's; None if identical."""
    margin: float | None
    """At that index: logit of the baseline's token minus logit of this way's."""
    worst_margin: float
    """Best logit minus logit of the chosen token, where it is largest relative to `bound`."""
    worst_index: int
    bound: float
    """What `worst_margin` may reach at `worst_index`."""

    @property
    def ok(self) -> bool:
        return self.worst_margin <= self.bound

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}


class Checker:
    """Judges texts by a copy of the model in a wider dtype.

    Args:
        model: a causal LM; it is copied, to float64 if it is float32 or wider, else to float32.
    """

    def __init__(self, model: nn.Module, bound: float | None = None) -> None:
        dtype = next(model.parameters()).dtype
        wide = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
        self.model = copy.deepcopy(model).to(wide).eval()
        self.bound = MARGIN_BOUND[dtype] if bound is None else bound

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Logits_TV that judge `tokens`: row i is the distribution that token i was drawn from."""
        device = next(self.model.parameters()).device
        ids_1T = torch.tensor([prompt + tokens[:-1]], device=device)
        logits_TV: Tensor = self.model(input_ids=ids_1T, use_cache=False).logits[0]
        return logits_TV[len(prompt) - 1 :].cpu()

    def compare(
        self,
        way: str,
        batch: int,
        name: str,
        prompt: list[int],
        tokens: list[int],
        reference: list[int],
    ) -> Comparison:
        """Judge one text.

        Raises:
            ValueError: the text is not as long as the baseline's (all ways ignore EOS).
        """
        if len(tokens) != len(reference):
            raise ValueError(
                f"{way}, batch {batch}, prompt {name!r}: expected {len(reference)} tokens, as from "
                f"the baseline, got {len(tokens)}; every way must ignore EOS and emit "
                "max_new_tokens"
            )
        logits_TV = self.logits(prompt, tokens)
        rows_T = torch.arange(len(tokens))
        chosen_T = logits_TV[rows_T, torch.tensor(tokens)]
        margin_T = logits_TV.max(dim=-1).values - chosen_T
        bound_T = self.bound * logits_TV.abs().max(dim=-1).values
        worst = int((margin_T / bound_T.clamp_min(1e-30)).argmax())
        first = next(
            (i for i, (a, b) in enumerate(zip(tokens, reference, strict=True)) if a != b), None
        )
        margin = None
        if first is not None:
            margin = float(logits_TV[first, reference[first]] - logits_TV[first, tokens[first]])
        return Comparison(
            way=way,
            batch=batch,
            prompt=name,
            num_tokens=len(tokens),
            first_difference=first,
            margin=margin,
            worst_margin=float(margin_T[worst]),
            worst_index=worst,
            bound=float(bound_T[worst]),
        )

"""Your own drafter: what followed the newest token when it last stood in the request.

python examples/own_drafter.py [MODEL [BACKEND]]
"""

import sys

import torch

import compilespec
from compilespec import SamplingParams

K = 3


def draft(history_BL, length_B):
    """Traced into the step; the parameters' names say what it reads.  -1 is no draft."""
    place_L = torch.arange(history_BL.shape[1], device=history_BL.device)
    length_B1 = length_B.long()[:, None]
    newest_B1 = history_BL.gather(1, length_B1 - 1)
    stood_BL = (history_BL == newest_B1) & (place_L < length_B1 - 1)
    next_B1 = (stood_BL * (place_L + 1)).amax(1, keepdim=True)  # 0: it never stood before
    wanted_BK = next_B1 + place_L[:K]
    found_BK = (next_B1 > 0) & (wanted_BK < length_B1)
    return torch.where(found_BK, history_BL.gather(1, wanted_BK.clamp(max=len(place_L) - 1)), -1)


def main(model: str = "demo", backend: str = "inductor") -> None:
    with compilespec.compile(
        model, spec="user", draft=draft, num_draft_tokens=K, max_seq_len=256, backend=backend
    ) as engine:
        (output,) = engine.generate("x = [1, 2, 3, 1, 2,", SamplingParams(max_new_tokens=48))
        print(output.text)
        print(f"tokens by verify step: {output.emitted_per_step}")


if __name__ == "__main__":
    main(*sys.argv[1:])

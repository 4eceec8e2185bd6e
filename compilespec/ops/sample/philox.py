"""Counter-based random numbers in plain torch: the same bits on every device and in the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from compilespec.ops.sample import layout

_WORD = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_reference(counter_N4: Tensor, key_2: Tensor) -> Tensor:
    """Philox-4x32-10: four random words for each counter.

    Args:
        counter_N4, key_2: int64 holding unsigned 32-bit words; one key per counter, [N, 2], also
            works.
    Returns:
        [N, 4] int64, unsigned 32-bit words.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    a, b, c, d = (word & _WORD for word in counter_N4.unbind(1))
    first, second = (word & _WORD for word in key_2.unbind(-1))
    for _ in range(10):
        high_a, low_a = _multiply(a, _FACTORS[0])
        high_c, low_c = _multiply(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return torch.stack([a, b, c, d], 1)


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words; no intermediate overflows int64."""
    upper = word * (factor >> 16)
    lower = word * (factor & 0xFFFF) + ((upper & 0xFFFF) << 16)
    return (lower >> 32) + (upper >> 16), lower & _WORD


def noise_bits(
    ids_N: Tensor, *, seed_low: int, seed_high: int, sample: int, position: int, stream: int
) -> Tensor:
    """The random word of each token id: int64 [N], unsigned 32-bit words.

    Key: the seed.  Counter: (place of the id, position of the token being drawn, sample index,
    stream).  Sixty-four ids share sixteen counters; each sixteen neighbours use one word of each:
    id 64 a + 16 k + i is word k of counter 16 a + i.
    """
    ids_N = ids_N.long()
    place_N = (ids_N >> 6 << 4) | (ids_N & 15)
    rest = torch.tensor([position, sample, stream], device=ids_N.device).expand(len(ids_N), 3)
    key = torch.tensor([seed_low, seed_high], device=ids_N.device)
    words_N4 = philox_reference(torch.cat([place_N.unsqueeze(1), rest], 1), key)
    return words_N4.gather(1, (ids_N >> 4 & 3).unsqueeze(1)).squeeze(1)


def noise_bits_of_rows(
    ids_N: Tensor, row_B: Tensor, drawn_B: Tensor, stream_B: Tensor, sampling_RI: Tensor
) -> Tensor:
    """`noise_bits` of each request, by its state row: int64 [B, N].  No loop, no host sync."""
    ids_N, words_BI = ids_N.long(), sampling_RI[row_B].long()
    size = (len(row_B), len(ids_N))
    place_BN = ((ids_N >> 6 << 4) | (ids_N & 15)).expand(size)
    rest = (drawn_B.long(), words_BI[:, layout.SAMPLE], stream_B.long())
    counter_BN4 = torch.stack([place_BN, *(word.unsqueeze(1).expand(size) for word in rest)], 2)
    key_B2 = torch.stack([words_BI[:, layout.SEED_LOW], words_BI[:, layout.SEED_HIGH]], 1)
    key_BN2 = key_B2.unsqueeze(1).expand(*size, 2)
    words_N4 = philox_reference(counter_BN4.flatten(0, 1), key_BN2.flatten(0, 1))
    which_N1 = (ids_N >> 4 & 3).repeat(len(row_B)).unsqueeze(1)
    return words_N4.gather(1, which_N1).view(size)


def gumbel(bits_N: Tensor) -> Tensor:
    """-log(-log(u)) with u = (bits + 1/2) / 2**32: float32, finite, exact in both tails.

    Above one half, -log(u) is computed from 1 - u, which keeps all its digits if u is near 1.
    """
    is_upper_N = bits_N >> 31 == 1
    word_N = torch.where(is_upper_N, bits_N ^ _WORD, bits_N)
    v_N = (word_N.to(torch.float32) + 0.5) * 2.0**-32  # u, or 1 - u: at most one half
    exponential_N = torch.where(is_upper_N, -torch.log1p(-v_N), -torch.log(v_N))
    return -torch.log(exponential_N)

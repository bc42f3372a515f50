"""Random numbers for sampling as a pure function of (seed, position, token id).

Nothing is drawn from a generator with a state, so a sequence's noise depends neither on its batch
mates nor on its place in the batch nor on what was sampled before, and a recomputed step gives
what it gave the first time.

A row's key is the output number ``position`` of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), seeded by the mixed seed. A token's
32 bits are the finaliser of MurmurHash3 (Austin Appleby, public domain) over the token's own hash
and the key's two halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1
_MURMUR_1 = 0x85EBCA6B - 2**32
_MURMUR_2 = 0xC2B2AE35 - 2**32
# Largest float32 below 1: at 1 the exponential would be infinite.
_BELOW_ONE = 1.0 - 2.0**-24


def _signed(value: int, bits: int) -> int:
    value &= 2**bits - 1
    return value - 2**bits if value >> (bits - 1) else value


def mix_seed(seed: int) -> int:
    """A seed (64 bits, signed or not) as the start state of its stream, as a signed int64."""
    z = (seed + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
    return _signed(z ^ (z >> 31), 64)


def row_keys(mixed_seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys per row of mixed seeds and positions, int64 [rows] both."""
    z = mixed_seeds + (positions + 1) * _signed(_GOLDEN, 64)
    z = (z ^ _shift_64(z, 30)) * _signed(_MIX_1, 64)
    z = (z ^ _shift_64(z, 27)) * _signed(_MIX_2, 64)
    z = z ^ _shift_64(z, 31)
    return _low_half(z), _low_half(z >> 32)


def token_hashes(num_ids: int) -> Tensor:
    """A fixed, well mixed int32 for each id, [num_ids]."""
    h = _low_half(torch.arange(1, num_ids + 1, dtype=torch.int64) * 0x9E3779B9)
    h = (h ^ _shift_32(h, 16)) * _MURMUR_1
    h = (h ^ _shift_32(h, 13)) * _MURMUR_2
    return h ^ _shift_32(h, 16)


def gumbel(hashes: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Standard Gumbel noise, float32, between -3 and 23.

    Args:
        hashes: int32 [rows or 1, n], of ``token_hashes``.
        keys: of ``row_keys``, int32 [rows] each.
    """
    first, second = (key.unsqueeze(-1) for key in keys)
    h = (hashes ^ first).mul_(_MURMUR_1)
    h.bitwise_xor_(_shift_32(h, 13)).add_(second).mul_(_MURMUR_2)
    h.bitwise_xor_(_shift_32(h, 16)).mul_(_MURMUR_1)
    h.bitwise_xor_(_shift_32(h, 13))
    # Signed to [0, 1): small values keep all their bits, as they make the large noise.
    v = h.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32).to(torch.float32)
    return v.clamp_(max=_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def _shift_32(h: Tensor, bits: int) -> Tensor:
    # >> on signed integers copies the sign; the mask makes it the shift of an unsigned.
    shifted: Tensor = (h >> bits) & (2 ** (32 - bits) - 1)
    return shifted


def _shift_64(z: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _low_half(z: Tensor) -> Tensor:
    return (((z & 0xFFFFFFFF) ^ 2**31) - 2**31).to(torch.int32)

"""Gumbel noise keyed by seed, position and token, for sampling that does not depend on drafts.

The token of largest x_t + g_t has the distribution softmax(x), if g_t = -log(-log u_t) with u_t
uniform. Here u_t is a hash of the seed, the position and the token.
"""

from functools import lru_cache
from math import log
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray: TypeAlias = npt.NDArray[np.int64]
Ints = TypeVar("Ints", Tensor, IntArray)  # int64
Unsigned: TypeAlias = npt.NDArray[np.uint64]
UINT64_MASK = 2**64 - 1
BITS = 52  # of a uniform number
# SplitMix64 (Steele, Lea, Flood, 2014): its step, and the shifts and factors of its finalizer.
STEP = 0x9E3779B97F4A7C15
FINALIZER = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
ROUNDING = 1e-5  # more than the relative error of a score


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return (n, m) float64 standard Gumbel noise, the same on every device.

    The noise is a function of `seeds` (n,), `positions` (n,) and `ids` (n, m), all int64.
    """
    if ids.device.type == "cpu":
        # For fifty operations on few numbers NumPy takes a third of PyTorch's time.
        bits = torch.from_numpy(_hashed(seeds.numpy(), positions.numpy(), ids.numpy()))
    else:
        bits = _hashed(seeds, positions, ids)
    uniform = bits.double() * 2.0**-BITS + 2.0 ** (-BITS - 1)  # never 0, never 1
    return -(-uniform.log()).log()


@lru_cache(maxsize=1 << 16)  # candidates of a place are looked up again and again
def noise(seed: int, position: int, id: int) -> float:
    """Return the noise of one token as `gumbel`, up to rounding; faster for few tokens."""
    bits = _mixed_int(_key(seed, position) ^ _key(id)) >> (64 - BITS)
    return -log(-log(bits * 2.0**-BITS + 2.0 ** (-BITS - 1)))


def keys_of(seeds: Tensor, positions: Tensor) -> list[int]:
    """Return the hashes of seeds (n,) and positions (n,) that the noise of n rows depends on."""
    return [_key(*pair) for pair in zip(seeds.tolist(), positions.tolist())]


def noisiest(values_V: Tensor, seed: int, position: int) -> int:
    """Return the token with the largest sum of value and noise, on a CPU.

    Only the noise of `contenders` is computed.
    """
    x = values_V.detach().numpy()
    first = int(x.argmax())
    score = float(x[first]) + noise(seed, position, first)
    scale = log(2) * BITS + ROUNDING * max(1.0, abs(score))
    ids = contenders(values_V, score, scale, _key(seed, position))
    if len(ids) < 2:  # then only `first` can be chosen
        return first
    keys = torch.tensor([seed]), torch.tensor([position])
    noise_m = gumbel(*keys, torch.from_numpy(ids)[None])[0].numpy()
    return int(ids[(x[ids] + noise_m).argmax()])


def contenders(values_V: Tensor, score: float, scale: float, key: int) -> IntArray:
    """Return the tokens that may exceed `score` by value and noise.

    A token of value x exceeds a score s if its noise is above s - x, so if -log u < e^(x - s). Because
    1 - u < -log u, it cannot exceed s unless 1 - u < e^(x - s), which is fast to test for all tokens.
    `scale` is the logarithm of the number of uniform numbers, and a margin for rounding. `key` is the
    hash of seed and position.
    """
    x = values_V.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = np.exp((x - x.dtype.type(score)) + x.dtype.type(scale))
    # (1 - u) 2^BITS + 1/2, an integer.
    above = 2**BITS - _all_bits(key, len(x)).view(np.int64)
    return np.flatnonzero(above <= bounds + 1)


def _all_bits(key: int, V: int) -> Unsigned:
    """Return the BITS random bits of each of the first V tokens."""
    x = _mixed_ids(V) ^ np.uint64(key)
    shifted = np.empty_like(x)  # new arrays would take half of the time
    x += np.uint64(STEP)
    for shift, factor in FINALIZER:
        x ^= np.right_shift(x, np.uint64(shift), out=shifted)
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    x >>= np.uint64(64 - BITS)
    return x


@lru_cache(maxsize=4)
def _mixed_ids(V: int) -> Unsigned:
    return _mixed(np.arange(V)).view(np.uint64)


@lru_cache(maxsize=1 << 16)
def _key(number: int, position: int | None = None) -> int:
    mixed = _mixed_int(number)
    return mixed if position is None else _mixed_int(mixed ^ position)


def _mixed_int(x: int) -> int:
    x = (x + STEP) & UINT64_MASK
    for shift, factor in FINALIZER:
        x = (x ^ (x >> shift)) * factor & UINT64_MASK
    return x ^ (x >> 31)


def _hashed(seeds: Ints, positions: Ints, ids: Ints) -> Ints:
    key = _mixed(_mixed(seeds) ^ positions)
    return _shifted(_mixed(key[:, None] ^ _mixed(ids)), 64 - BITS)


def _mixed(x: Ints) -> Ints:
    """Apply SplitMix64's step and finalizer to int64, which wraps like uint64."""
    x = x + (STEP - 2**64)
    for shift, factor in FINALIZER:
        x = (x ^ _shifted(x, shift)) * (factor - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Ints, bits: int) -> Ints:
    return (x >> bits) & ((1 << (64 - bits)) - 1)

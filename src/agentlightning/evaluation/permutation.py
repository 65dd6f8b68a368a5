"""The p-value of a mean paired difference by flipping signs. Pure.

Where two agents are equal, each difference is as likely negative as positive: the 2^n sums of +-d_i are equally likely,
and the two-sided p-value is the share of them that is at least as far from 0 as the one observed (Fisher, The Design of
Experiments, 1935, section 21; Dror et al., ACL 2018, section 3.2). All are counted where their sums take few values, as
those of rewards of 0 and 1 do. Else 9,999 flips are drawn, with the same seed always, and the observed one counts as
one more (Phipson and Smyth 2010, equation 2), so that the p-value is never 0.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

MOST_SUMS = 4096
"""Above so many different values, sign flips are drawn."""
DRAWS = 9999
DIGITS = 10
"""To which sums are rounded, in units of the largest difference, so that 0.1 + 0.2 is 0.3."""
TOLERANCE = 1e-6
"""Sums that differ by less are equal."""


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean of the differences; 1 where all are 0, or there is none."""
    largest = max(map(abs, differences), default=0.0)
    if largest == 0:
        return 1.0
    scaled = [each / largest for each in differences if each]
    observed = abs(math.fsum(scaled)) - TOLERANCE
    found = _all_sums(scaled)
    if found is not None:
        return min(1.0, math.fsum(share for size, share in found.items() if size >= observed))
    extreme = sum(abs(each) >= observed for each in _drawn_sums(scaled))
    return (extreme + 1) / (DRAWS + 1)


def add_flipped(sizes: Mapping[float, float], difference: float) -> dict[float, float]:
    """The distribution of |sum| once a difference with a random sign is added: size -> probability."""
    added: dict[float, float] = defaultdict(float)
    for size, probability in sizes.items():
        added[round(size + difference, DIGITS)] += probability / 2
        added[abs(round(size - difference, DIGITS))] += probability / 2
    return added


def _all_sums(differences: Sequence[float]) -> Mapping[float, float] | None:
    sizes: Mapping[float, float] = {0.0: 1.0}
    for each in sorted(differences, key=abs):
        sizes = add_flipped(sizes, abs(each))
        if len(sizes) > MOST_SUMS:
            return None
    return sizes


def _drawn_sums(differences: Sequence[float]) -> Iterator[float]:
    """Sums of randomly flipped differences: eight signs are one random byte, and one look-up in a table."""
    tables = [_signed_sums(differences[start : start + 8]) for start in range(0, len(differences), 8)]
    rng = random.Random(0)
    for _ in range(DRAWS):
        yield sum(table[signs] for table, signs in zip(tables, rng.randbytes(len(tables)), strict=True))


def _signed_sums(differences: Sequence[float]) -> list[float]:
    """All 256 sums of up to eight signed differences; of fewer, each occurs equally often."""
    sums = [0.0]
    for place in range(8):
        difference = differences[place] if place < len(differences) else 0.0
        sums = [each + sign * difference for each in sums for sign in (-1, 1)]
    return sums

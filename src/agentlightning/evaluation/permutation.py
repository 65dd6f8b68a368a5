"""The sign-flip test of a mean paired difference, and its inversion: which means it does not reject. Pure.

Where two agents are equal, each difference is as likely negative as positive: the 2^n sums of +-d_i are equally likely,
and the two-sided p-value is the share of them that is at least as far from 0 as the one observed (Fisher, The Design of
Experiments, 1935, section 21; Dror et al., ACL 2018, section 3.2). All are counted where their sums take few values, as
those of rewards of 0 and 1 do. Else 9,999 flips are drawn, with the same seed always, and the observed one counts as
one more (Phipson and Smyth 2010, equation 2), so that the p-value is never 0.

The flips of the set S reject a mean g below the observed one where |sum of +-(d_i - g)| is at least |sum of d_i - g|:
where g is at least the mean of S or that of the others. So the limits are quantiles of the means of subsets (Hartigan,
JASA 64, 1969, typical values).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add

MOST_SUMS = 4096
"""Above so many different values, sign flips are drawn."""
DRAWS = 9999
DIGITS = 10
"""To which sums are rounded, in units of the largest difference, so that 0.1 + 0.2 is 0.3."""
TOLERANCE = 1e-6
"""Sums that differ by less are equal."""
MOST_ENUMERATED = 10
"""Of so many differences all subsets are counted for the limits; of more, 1,999 are drawn."""
LIMIT_DRAWS = 1999


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


def sign_flip_limits(differences: Sequence[float], alpha: float) -> tuple[float, float]:
    """The lowest and the highest mean whose two-sided p-value is at least alpha; infinite where none is rejected."""
    lows, highs = zip(*_subset_means(differences), strict=True)
    exact = len(differences) <= MOST_ENUMERATED
    place = math.ceil(alpha * len(lows) - TOLERANCE) if exact else math.ceil(alpha * (LIMIT_DRAWS + 1)) - 1
    return sorted(lows)[max(place, 1) - 1], sorted(highs, reverse=True)[max(place, 1) - 1]


def _subset_means(differences: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The lower and the higher mean of a set of differences and of the others, of all sets or of drawn ones."""
    count, total = len(differences), math.fsum(differences)
    # A set's sum and size are the parts of one complex number.
    tables = _tables(differences, lambda each, value: (each, each + complex(value, 1)))
    if count <= MOST_ENUMERATED:
        last = tables[-1][: 2 ** ((count - 1) % 8 + 1)]
        sets = last if count <= 8 else [one + other for one in tables[0] for other in last]
    else:
        sets = _drawn(tables, LIMIT_DRAWS)
    for each in sets:
        size = round(each.imag)
        if 0 < size < count:
            means = each.real / size, (total - each.real) / (count - size)
            yield min(means), max(means)
        else:
            yield -math.inf, math.inf


def _drawn_sums(differences: Sequence[float]) -> Iterator[float]:
    """Sums of randomly flipped differences."""
    return (each.real for each in _drawn(_tables(differences, lambda each, value: (each - value, each + value)), DRAWS))


def _drawn(tables: Sequence[Sequence[complex]], draws: int) -> Iterable[complex]:
    """Eight choices are one random byte, and one look-up in a table."""
    rng = random.Random(0)
    sums: Iterable[complex] = repeat(0j, draws)
    for table in tables:
        sums = map(add, sums, map(table.__getitem__, rng.randbytes(draws)))
    return sums


def _tables(
    differences: Sequence[float], choose: Callable[[complex, float], tuple[complex, complex]]
) -> list[list[complex]]:
    """For each eight differences the 256 sums of what may be chosen of them; of fewer, each occurs equally often."""
    tables: list[list[complex]] = []
    for start in range(0, len(differences), 8):
        sums = [0j]
        for value in differences[start : start + 8]:
            sums = [*(choose(each, value)[0] for each in sums), *(choose(each, value)[1] for each in sums)]
        tables.append(sums * (256 // len(sums)))
    return tables

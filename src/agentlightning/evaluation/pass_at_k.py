"""How often an agent solves a task in k rollouts: in at least one of them, or in all. Pure.

From n rollouts of a task, c of them solved, without bias:

    pass@k = 1 - C(n - c, k) / C(n, k)     one of k solves it    (Chen et al. 2021, arXiv:2107.03374, equation 1)
    pass^k = C(c, k) / C(n, k)             all k solve it        (Yao et al. 2024, arXiv:2406.12045, section 3)
"""

from __future__ import annotations

from math import comb


def pass_at_k(rollouts: int, solved: int, k: int) -> float:
    """The probability that at least one of k rollouts solves the task, where `solved` of `rollouts` have."""
    return 1.0 - comb(rollouts - solved, k) / comb(rollouts, k)


def pass_hat_k(rollouts: int, solved: int, k: int) -> float:
    """The probability that all of k rollouts solve the task."""
    return comb(solved, k) / comb(rollouts, k)

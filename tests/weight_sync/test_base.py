"""What all transfers share: the manifest of tensors and their packing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.weight_sync.transfer import as_bytes, manifest, pack_over

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,  # Not contiguous.
    "c.bias": torch.ones(()),
    "d.weight": torch.arange(5, dtype=torch.float32),
}


sizes = st.lists(st.integers(0, 40), max_size=30)


@given(sizes, st.integers(1, 60))
def test_pack_over_cuts_where_the_server_cuts(lengths: list[int], limit: int):
    tensors = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    runs = [[tensor.nbytes for tensor in run] for run in pack_over(tensors, limit)]
    assert [length for run in runs for length in run] == lengths
    assert all(sum(run) > limit for run in runs[:-1])
    assert all(sum(run[:-1]) <= limit for run in runs)


def test_the_manifest_lists_tensors_in_order():
    assert manifest(WEIGHTS) == {
        "names": ["a.weight", "b.weight", "c.bias", "d.weight"],
        "dtype_names": ["float32", "bfloat16", "float32", "float32"],
        "shapes": [[3, 4], [3, 2], [], [5]],
    }
    assert as_bytes(WEIGHTS["b.weight"]).view(torch.bfloat16).tolist() == [0, 3, 1, 4, 2, 5]

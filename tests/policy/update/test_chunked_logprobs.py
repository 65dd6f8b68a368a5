"""Chunked log-probabilities and entropies equal the plain ones, with their gradients, in the memory of one chunk."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from agentlightning.policy.update import forward
from agentlightning.policy.update.forward import Chosen, logprobs_from_linear, logprobs_from_logits

torch.set_num_threads(1)  # more threads cost more than they bring at this size

N, H, V = 13, 6, 31


def plain(logits: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """The formulas, with everything in memory at once."""
    if chosen.temperatures is not None:
        logits = logits / chosen.temperatures[:, None]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, chosen.tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def data(dtype: torch.dtype, bias: bool = False, temperatures: bool = True, entropy: bool = True) -> Any:
    torch.manual_seed(0)
    tensors = [torch.randn(N, H), 3 * torch.randn(V, H), *([torch.randn(V)] if bias else [])]
    inputs = [each.to(dtype).requires_grad_() for each in tensors]
    warmth = (torch.rand(N, dtype=torch.float64) + 0.5).to(torch.promote_types(dtype, torch.float32))
    return inputs, Chosen(torch.randint(0, V, (N,)), warmth if temperatures else None, entropy)


def total(found: tuple[Tensor, Tensor], entropy: bool) -> Tensor:
    """A loss with another weight for each position."""
    weights = torch.linspace(-1, 2, N, dtype=found[0].dtype)
    return (found[0] * weights).sum() + ((found[1] * weights.flip(0)).sum() if entropy else 0)


@pytest.fixture(params=[1, 10**6], ids=["rows one by one", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "BLOCK_CPU", request.param)


@pytest.mark.parametrize("size", [1, 5, N, 100])
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("temperatures", [False, True], ids=["", "temperatures"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_are_those_of_the_plain_computation_to_1e_9(
    bias: bool, temperatures: bool, entropy: bool, size: int
) -> None:
    inputs, chosen = data(torch.float64, bias, temperatures, entropy)
    expected = plain(functional.linear(*inputs), chosen)
    found = logprobs_from_linear(inputs[0], inputs[1], inputs[2] if bias else None, chosen, size)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert found[1].requires_grad == entropy
    gradients = torch.autograd.grad(total(found, entropy), inputs)
    wanted = torch.autograd.grad(total(expected, entropy), inputs)
    torch.testing.assert_close(gradients, wanted, atol=1e-9, rtol=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    (hidden, weight, bias), chosen = data(torch.float64, bias=True)
    hidden, chosen = hidden[:4].detach().requires_grad_(), chosen.part(slice(4))

    def linear(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_linear(*tensors, chosen, size=3)  # type: ignore[misc]

    assert torch.autograd.gradcheck(linear, (hidden, weight, bias))
    logits = functional.linear(hidden, weight).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda given: logprobs_from_logits(given, chosen), (logits,))


@pytest.mark.parametrize("size", [5, 100])
def test_float32_agrees_to_its_own_precision(size: int) -> None:
    inputs, chosen = data(torch.float32)
    expected = plain(functional.linear(*inputs), chosen)
    found = logprobs_from_linear(*inputs, None, chosen, size)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(total(found, True), inputs), torch.autograd.grad(total(expected, True), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 100])
def test_the_gradient_of_bfloat16_weights_is_summed_in_float32(size: int) -> None:
    inputs, chosen = data(torch.bfloat16)
    expected = plain(functional.linear(*inputs).float(), chosen)
    found = logprobs_from_linear(*inputs, None, chosen, size)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    mine = torch.autograd.grad(total(found, True), inputs)
    theirs = torch.autograd.grad(total(expected, True), inputs)
    for gradient, wanted in zip(mine, theirs, strict=True):
        assert gradient.dtype == torch.bfloat16
        apart = (gradient.float() - wanted.float()).norm() / wanted.float().norm()
        assert apart < 0.01, "one unit in the last place is 0.008; sums of 13 roundings would be further apart"


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient_and_changes_no_other(frozen: int) -> None:
    inputs, chosen = data(torch.float64)
    trained = inputs[1 - frozen]
    (wanted,) = torch.autograd.grad(total(plain(functional.linear(*inputs), chosen), True), [trained])
    inputs[frozen].requires_grad_(False)
    total(logprobs_from_linear(*inputs, None, chosen, 5), True).backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(trained.grad, wanted, atol=1e-9, rtol=1e-9)


def test_a_second_backward_pass_gives_the_same() -> None:
    inputs, chosen = data(torch.float64)
    loss = total(logprobs_from_linear(*inputs, None, chosen, 5), True)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), first, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 100])
def test_passes_add_up_and_in_place_where_the_weight_has_a_precise_gradient(size: int, dtype: torch.dtype) -> None:
    inputs, chosen = data(dtype)
    total(logprobs_from_linear(*inputs, None, chosen, size), True).backward()
    first, held = inputs[1].grad.clone(), inputs[1].grad.data_ptr()
    for passes in (2, 3):
        total(logprobs_from_linear(*inputs, None, chosen, size), True).backward()
        torch.testing.assert_close(inputs[1].grad, passes * first)
        assert inputs[1].grad.data_ptr() == held
    assert inputs[1].grad.dtype == dtype


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e3])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float) -> None:
    inputs, _ = data(torch.float32)
    cold = Chosen(functional.linear(*inputs).argmax(-1), torch.full((N,), temperature), True)
    with torch.no_grad():
        inputs[1] *= 1e4
    logprobs, entropy = logprobs_from_linear(*inputs, None, cold, 5)
    assert torch.isfinite(logprobs).all()
    assert (entropy >= -1e-6).all()
    if temperature < 1:
        assert torch.equal(logprobs, torch.zeros(N)), "the most probable token is certain"


def test_a_logit_that_is_nan_spoils_its_own_position_only() -> None:
    (hidden, weight), chosen = data(torch.float64)
    with torch.no_grad():
        hidden[3] = torch.nan
    logprobs, _ = logprobs_from_linear(hidden, weight, None, chosen, 5)
    assert logprobs.isnan().nonzero().flatten().tolist() == [3]


def test_nothing_is_kept_without_a_gradient_nor_after_the_result_is_dropped() -> None:
    inputs, chosen = data(torch.float32)
    with torch.no_grad():
        assert logprobs_from_linear(*inputs, None, chosen, 5)[0].grad_fn is None
    gc.disable()
    try:
        found = logprobs_from_linear(*inputs, None, chosen, 5)
        held = weakref.ref(found[1].grad_fn.last_chunk)  # type: ignore[union-attr]
        assert held() is not None
        del found
        assert held() is None
    finally:
        gc.enable()

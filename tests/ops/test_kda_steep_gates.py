"""Softplus gates that leave nothing: gradients of the Triton kernels are 0 there, whatever the rate."""

import pytest
import torch
from kda_kernels import SOFTPLUS, interpreted, make, run


@interpreted
@pytest.mark.parametrize("rate", [20.0, 88.0, 90.0])
def test_gates_that_leave_nothing_have_no_gradient(rate):
    inputs, sequences = make([34, 1, 9], H=1, K=16, V=16)
    inputs = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        inputs[3].fill_(1e4)
        inputs[5].fill_(rate)
    o, final = run(inputs, SOFTPLUS, sequences)[:2]
    (o.square().sum() + final.square().sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs)
    assert not any(inputs[i].grad.any() for i in (3, 5, 6))

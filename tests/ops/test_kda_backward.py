"""KDA's backward kernels: what their gradients must not depend on, gradients through states at checkpoints, and which
kernel does them."""

import pytest
import torch
from kda_kernels import CUDA, NAMES, SAFE, SOFTPLUS, check, error, gpu, interpreted, kernels, make, recurrence, run

from perilune.ops.kda import Raw, gradients_cuda, triton_backward
from perilune.ops.sequences import Sequences

PER_TOKEN = NAMES[:5]


def gradients(inputs, sequences, weights, final_weights=None, **options):
    """Gradients of a fixed projection of the outputs (and of the final states)."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = run(leaves, SAFE, sequences, **options)[:2]
    loss = (o.float() * weights).sum()
    if final_weights is not None:
        loss = loss + (final * final_weights).sum()
    loss.backward()
    return dict(zip(NAMES, (x.grad for x in leaves), strict=True))


def draw(*shape):
    device = "cuda" if CUDA else "cpu"
    return torch.randn(*shape, generator=torch.Generator(device=device).manual_seed(3), device=device)


def packed_and_alone(sizes, **options):
    """A sequence's gradients among others and by itself; the state's too."""
    inputs, sequences = make([10, 130, 0, 65], [0, 36, 7, 64], **sizes)
    o, final = draw(*inputs[2].shape), draw(*inputs[7].shape)
    together = gradients(inputs, sequences, o, final, **options)
    for n, (a, b) in enumerate(((0, 10), (10, 140), (140, 140), (140, 205))):
        if a == b:
            continue
        device = inputs[0].device
        part = Sequences.from_lengths([b - a], [sequences.starts[n]], device)
        mine = [*(x[a:b] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
        alone = gradients(mine, part, o[a:b], final[n : n + 1], **options)
        assert all(torch.equal(alone[name], together[name][a:b]) for name in PER_TOKEN)
        assert torch.equal(alone["initial"][0], together["initial"][n])


@interpreted
def test_packing_changes_no_bit():
    packed_and_alone({"H": 1, "K": 16, "V": 16})


@gpu
@pytest.mark.parametrize("save", ["inputs", "all"])
def test_gpu_packing_changes_no_bit(save):
    packed_and_alone({"H": 3, "K": 128, "V": 128, "dtype": torch.bfloat16}, save=save)


FORMS = ["triton", "hopper"]


def use(form, monkeypatch):
    """This form of B2, whatever the inputs."""
    if form == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon form needs Hopper")
    monkeypatch.setattr(triton_backward, "reverse_scan_name", lambda d_o, K: form)


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_gpu_heads_change_no_bit(form, monkeypatch):
    """From 72 heads on a program of Triton's reverse scan takes all of V."""
    use(form, monkeypatch)
    inputs, sequences = make([200], H=80, K=128, V=128, dtype=torch.bfloat16)
    weights = draw(*inputs[2].shape)
    many = gradients(inputs, sequences, weights)
    few = gradients([*(x[:, 7:10] for x in inputs[:5]), *(x[7:10] for x in inputs[5:7]), inputs[7][:, 7:10]],
                    sequences, weights[:, 7:10])  # fmt: skip
    assert all(torch.equal(few[name], many[name][:, 7:10]) for name in PER_TOKEN)


def states(sizes, bound):
    """Gradients that enter at states in the middle, at the end of a chunk that is the last, and from outputs."""
    inputs, sequences = make([66, 64], [100, 0], **sizes)
    marks = ((128,), (64,))
    weights = draw(2, *inputs[7].shape[1:])
    ours = [x.clone().requires_grad_() for x in inputs]
    o, _, at = run(ours, SAFE, sequences, checkpoints=marks)
    ((at * weights).sum() + o.float().square().sum()).backward()
    exact = [x.double().requires_grad_() for x in inputs]
    o, final, at = recurrence(*exact, SAFE, sequences, at=marks[0])
    ((at[0] * weights[0]).sum() + (final[1] * weights[1]).sum() + o.square().sum()).backward()
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        assert error(a.grad, b.grad) < bound, name


@interpreted
def test_gradients_through_states_at_checkpoints():
    states({"H": 1, "K": 16, "V": 16}, 5e-5)


@gpu
def test_gpu_gradients_through_states_at_checkpoints():
    states({"H": 3, "K": 128, "V": 128, "dtype": torch.bfloat16}, 1.5e-2)


@interpreted
def test_only_the_final_state_is_used():
    """No gradient of the outputs at all."""
    inputs, sequences = make([66], H=1, K=16, V=16, kind="slow")
    ours = [x.clone().requires_grad_() for x in inputs]
    run(ours, SAFE, sequences)[1].square().sum().backward()
    exact = [x.double().requires_grad_() for x in inputs]
    recurrence(*exact, SAFE, sequences)[1].square().sum().backward()
    for name, a, b in zip(NAMES[1:], ours[1:], exact[1:], strict=True):
        assert error(a.grad, b.grad) < 5e-5, name
    assert not ours[0].grad.any()


BF16 = {"K": 128, "V": 128, "dtype": torch.bfloat16}


@gpu
@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 127, 1000])
def test_gpu_lengths(T):
    check(*make([T], H=5, **BF16), SAFE, 7e-3, 1e-2, loose=3e-2)


@gpu
@pytest.mark.parametrize("gate", [SAFE, SOFTPLUS], ids=["safe", "softplus"])
@pytest.mark.parametrize("K", [64, 128])
def test_gpu_without_nvrtc(K, gate, monkeypatch):
    """The Triton kernels of B3, which run where gradients.cu does not."""
    monkeypatch.setattr(gradients_cuda, "why_not", lambda x: "for the test")
    inputs, sequences = make([70, 1, 129], H=2, K=K, V=K, dtype=torch.bfloat16)
    # dt_bias: a sum over tokens of what these kernels round to bfloat16 on the way.
    check(inputs, sequences, gate, 7e-3, 2e-2, loose=3e-2, sums=5e-2)


@gpu
@pytest.mark.parametrize("rows", ["whole", "cut"])
def test_gpu_views_and_an_expanded_gradient(rows):
    """q, k, v, g, beta inside larger tensors of NaN; the gradient of a sum has stride 0.

    Where v's heads lie side by side the kernels are the same, and so are the bits. Otherwise K2 is another one.
    """
    inputs, sequences = make([70, 33], [0, 90], H=3, **BF16)
    *raw, A_log, dt_bias, initial = inputs

    def inside(x, margin=16):
        inner = [d + 2 * margin for d in x.shape[2:]]
        wide = torch.full((x.shape[0] + 6, 5, *inner), torch.nan, device="cuda", dtype=x.dtype)
        view = wide[3:-3, 1:4, margin : margin + 128] if inner else wide[3:-3, 1:4]
        view.copy_(x)
        return view

    def grads(tensors):
        leaves = [x.detach().requires_grad_() for x in (*tensors, A_log, dt_bias, initial)]
        run(leaves, SAFE, sequences)[0].sum().backward()
        return [x.grad for x in leaves]

    views = [inside(x) for x in raw]
    if rows == "whole":
        views[2] = inside(raw[2], margin=0)
        assert kernels.scan_name(views[2], 128) == kernels.scan_name(raw[2], 128)
    for name, a, b in zip(NAMES, grads(raw), grads(views), strict=True):
        # A_log and dt_bias: sums over all tokens that nearly cancel.
        bound = 0.0 if rows == "whole" else 5e-2 if name in ("A_log", "dt_bias") else 1e-2
        assert error(b, a) <= bound, name


@gpu
def test_gpu_which_kernel():
    inputs, sequences = make([70], H=2, **BF16)

    def name(tensors, gate=SAFE):
        return kernels.gradients_name(kernels.inputs(Raw(*tensors[:7]), gate, sequences))

    assert name(inputs) == "cuda"
    assert name(inputs, SOFTPLUS) == "cuda"
    assert name([inputs[0].repeat(1, 1, 2)[:, :, ::2], *inputs[1:]]) == "triton"


def test_why_not_says_what_is_missing():
    inputs, sequences = make([5], H=1, K=128, V=128)
    x = kernels.inputs(Raw(*inputs[:7]), SAFE, sequences)
    assert gradients_cuda.why_not(x).startswith("a tensor is not bfloat16" if CUDA else "cpu is not a Hopper GPU")


@gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [([10, 130, 0, 65], 3), ([70], 72)], ids=["few heads", "many heads"])
def test_gpu_both_reverse_scans(sizes, form, monkeypatch):
    """Gradients with either form of B2, against float64."""
    use(form, monkeypatch)
    lengths, H = sizes
    inputs, sequences = make(lengths, H=H, K=128, V=128, dtype=torch.bfloat16)
    check(inputs, sequences, SAFE, 7e-3, 2e-2, loose=3e-2)

"""`chunk_kda` on [B, T, H, K] tensors against a float64 recurrence, option by option, and what it refuses."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from kda_oracle import recur, relative

from perilune import Error, Sequences
from perilune.config import Gate
from perilune.ops.kda import adapter, kda
from perilune.ops.kda.adapter import chunk_kda

# fp32 against float64 over a few chunks: 5e-5 (outputs), 2e-4 (gradients) of the chunk form; measured below 1e-5.
FORWARD, BACKWARD = 5e-5, 2e-4
B, T, H, HV, K, V = 2, 70, 2, 4, 8, 12
INSIDE = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


# The positional parameters of fla-core 0.6.0 (MIT), in order.
POSITIONAL = [
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
    *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
    *("safe_gate", "lower_bound", "disable_recompute", "return_intermediate_states", "state_v_first"),
    *("cu_seqlens", "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs"),
]


def draw(batch: int = B, tokens: int = T, states: int = B, heads: int = HV) -> dict[str, torch.Tensor]:
    """Raw float64 inputs; beta and g are what the projections give."""
    shapes = {
        "q": (batch, tokens, H, K),
        "k": (batch, tokens, H, K),
        "v": (batch, tokens, heads, V),
        "g": (batch, tokens, heads, K),
        "beta": (batch, tokens, heads),
        "A_log": (heads,),
        "dt_bias": (heads * K,),
        "initial_state": (states, heads, K, V),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64) * (0.5 if "_" in name else 1) for name, shape in shapes.items()
    }


def expected(
    x: dict[str, torch.Tensor],
    lengths: list[int],
    norm: bool,
    gate: bool,
    sigmoid: bool,
    bound: float | None = None,
    scale: float = K**-0.5,
    beta_max: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final state token by token, from the definition of each option."""
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    heads = x["v"].shape[2]
    if norm:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if gate:
        z, rate = g + x["dt_bias"].view(heads, K), x["A_log"].exp()[:, None]
        g = -rate * torch.logaddexp(z, torch.zeros_like(z)) if bound is None else bound / (1 + torch.exp(-rate * z))
    if sigmoid:
        beta = beta_max / (1 + torch.exp(-beta))
    owner = torch.arange(heads) // (heads // H)
    flat = [y.flatten(0, 1) for y in (q[:, :, owner] * scale, k[:, :, owner], x["v"], g, beta)]
    o, final = recur(*flat, x["initial_state"], lengths)
    return o.view(x["v"].shape), final


def activated(x: dict[str, torch.Tensor], norm: bool, gate: bool, sigmoid: bool) -> dict[str, torch.Tensor]:
    """Inputs as a caller gives them who does the activations that are not inside."""
    y = dict(x)
    if not norm:
        y["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if not gate:
        y["g"] = -5 * x["g"].sigmoid()
    if not sigmoid:
        y["beta"] = x["beta"].sigmoid()
    return y


@pytest.mark.parametrize(("norm", "gate", "sigmoid"), list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("bound", [None, -3.0])
def test_values_and_gradients_of_every_activation_choice(
    norm: bool, gate: bool, sigmoid: bool, bound: float | None
) -> None:
    x = {name: t.requires_grad_() for name, t in activated(draw(), norm, gate, sigmoid).items()}
    y = {name: t.detach().float().requires_grad_() for name, t in x.items()}
    wanted = expected(x, [T] * B, norm, gate, sigmoid, bound)
    flags = dict(zip(INSIDE, (norm, gate, sigmoid), strict=True))
    found = chunk_kda(**y, **flags, safe_gate=bound is not None, lower_bound=bound, output_final_state=True)
    pulls = [torch.randn_like(t) for t in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        assert a.dtype == torch.float32
        assert relative(a, b) < FORWARD
    sum((a * p).sum() for a, p in zip(wanted, pulls, strict=True)).backward()  # type: ignore[union-attr]
    sum((a * p.float()).sum() for a, p in zip(found, pulls, strict=True)).backward()  # type: ignore[union-attr,operator]
    for name in x:
        if x[name].grad is None:  # A_log and dt_bias where the gate is outside
            assert y[name].grad is None
        else:
            assert relative(y[name].grad, x[name].grad) < BACKWARD, name


@pytest.mark.parametrize("inside", [INSIDE, {}])
def test_packed_documents_equal_documents_alone_to_the_bit(inside: dict[str, bool]) -> None:
    lengths = [3, 0, 64, 65]
    x = {name: t.float() for name, t in activated(draw(1, sum(lengths), 4), *[bool(inside)] * 3).items()}
    cu = torch.tensor([0, 3, 3, 67, 132], dtype=torch.int32)
    o, final = chunk_kda(**x, **inside, lower_bound=-5.0, cu_seqlens=cu, output_final_state=True)
    again, _ = chunk_kda(**x, **inside, lower_bound=-5.0, cu_seqlens=torch.full((5,), -1), cu_seqlens_cpu=cu)
    assert torch.equal(o, again)
    assert final is not None
    for n, (a, b) in enumerate(itertools.pairwise(cu.tolist())):
        one = {name: t[:, a:b] if name in ("q", "k", "v", "g", "beta") else t for name, t in x.items()}
        one["initial_state"] = x["initial_state"][n : n + 1]
        o_one, final_one = chunk_kda(**one, **inside, lower_bound=-5.0, output_final_state=True)
        assert torch.equal(o[:, a:b], o_one)
        assert final_one is not None
        assert torch.equal(final[n], final_one[0])


def test_all_inside_is_kda_to_the_bit() -> None:
    x = {name: t.float() for name, t in draw(heads=H).items()}
    flat = [x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")]
    gate, cut = Gate("safe", -5.0), Sequences.from_lengths([T] * B)
    o_THV, final_NHKV = kda(*flat, x["A_log"], x["dt_bias"].view(H, K), gate, x["initial_state"], cut)
    o, final = chunk_kda(**x, **INSIDE, safe_gate=True, lower_bound=-5.0, output_final_state=True)
    assert final is not None
    assert torch.equal(o.flatten(0, 1), o_THV)
    assert torch.equal(final, final_NHKV)


@pytest.mark.parametrize("norm", [True, False])
def test_scale(norm: bool) -> None:
    x = draw()
    flags = INSIDE | {"use_qk_l2norm_in_kernel": norm}
    x["k"] *= 1 if norm else 0.1  # without a norm the recurrence of long keys diverges
    wanted, _ = expected(x, [T] * B, norm, True, True, -5.0, scale=0.7)
    o, none = chunk_kda(**{name: t.float() for name, t in x.items()}, **flags, scale=0.7, lower_bound=-5.0)
    assert none is None
    assert relative(o, wanted) < FORWARD


def test_doubled_beta() -> None:
    x = draw()
    wanted = expected(x, [T] * B, True, True, True, -5.0, beta_max=2.0)
    y = {name: t.float() for name, t in x.items()}
    found = chunk_kda(**y, **INSIDE, allow_neg_eigval=True, lower_bound=-5.0, output_final_state=True)
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        assert relative(a, b) < FORWARD


@pytest.mark.parametrize("name", ["state_v_first", "transpose_state_layout"])
@pytest.mark.parametrize("inside", [INSIDE, {}])
def test_the_state_with_v_first_is_the_transpose(name: str, inside: dict[str, bool]) -> None:
    x = {n: t.float() for n, t in activated(draw(), *[bool(inside)] * 3).items()}
    o, final = chunk_kda(**x, **inside, lower_bound=-5.0, output_final_state=True)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    o_v, final_v = chunk_kda(**x, **inside, lower_bound=-5.0, output_final_state=True, **{name: True})  # type: ignore[arg-type]
    assert final is not None
    assert final_v is not None
    assert torch.equal(o, o_v)
    assert torch.equal(final, final_v.mT)
    assert final_v.is_contiguous()


@pytest.mark.parametrize("inside", [INSIDE, {}])
def test_strides_do_not_matter(inside: dict[str, bool]) -> None:
    x = {n: t.float() for n, t in activated(draw(), *[bool(inside)] * 3).items()}
    views = {n: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 2 else t for n, t in x.items()}
    assert not views["q"].is_contiguous()
    found, wanted = (chunk_kda(**y, **inside, lower_bound=-5.0, output_final_state=True) for y in (views, x))
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_what_is_left_out_is_zero() -> None:
    x = {name: t.float() for name, t in draw().items()}
    zeros = {name: torch.zeros_like(x[name]) for name in ("A_log", "dt_bias", "initial_state")}
    given = chunk_kda(**x | zeros, **INSIDE, lower_bound=-5.0)
    absent = chunk_kda(*[x[name] for name in ("q", "k", "v", "g", "beta")], **INSIDE, lower_bound=-5.0)  # type: ignore[arg-type]
    assert torch.equal(given[0], absent[0])


def test_parameters_of_the_gate_are_not_read_when_it_is_outside() -> None:
    x = {name: t.float() for name, t in activated(draw(), True, False, True).items()}
    flags = INSIDE | {"use_gate_in_kernel": False}
    o, _ = chunk_kda(**x, **flags, safe_gate=True)
    x["A_log"].fill_(float("nan"))
    x["dt_bias"].fill_(float("nan"))
    assert torch.equal(o, chunk_kda(**x, **flags, safe_gate=True, lower_bound=-1.0)[0])
    # The bound is a promise that changes the arithmetic, not the result.
    assert relative(chunk_kda(**x, **flags)[0], o) < FORWARD


def test_bfloat16_inputs_give_bfloat16_outputs_and_a_float32_state() -> None:
    x = draw()
    rounded = {name: t.bfloat16() if name in ("q", "k", "v", "g", "beta") else t.float() for name, t in x.items()}
    wanted, _ = expected({name: t.double() for name, t in rounded.items()}, [T] * B, True, True, True, -5.0)
    for flags in (INSIDE, INSIDE | {"allow_neg_eigval": False, "scale": 1.0}):
        o, final = chunk_kda(**rounded, **flags, lower_bound=-5.0, output_final_state=True)  # type: ignore[arg-type]
        assert o.dtype == torch.bfloat16
        assert final is not None
        assert final.dtype == torch.float32
        # Two roundings of 2^-9 at most: of o, and of its product with the scale.
        assert relative(o, wanted * (flags.get("scale", K**-0.5) * K**0.5)) < 4e-3


def test_double_inputs_stay_double() -> None:
    x = draw()
    wanted = expected(x, [T] * B, True, True, True, -5.0)
    for a, b in zip(chunk_kda(**x, **INSIDE, lower_bound=-5.0, output_final_state=True), wanted, strict=True):
        assert a is not None
        assert relative(a, b) < 1e-12


def test_disable_recompute_reaches_the_kernels_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: t.float() for name, t in draw().items()}
    o, _ = chunk_kda(**x, **INSIDE, lower_bound=-5.0)
    saved: list[str] = []

    def record(*raw: Any, save: str) -> tuple[torch.Tensor, ...]:
        saved.append(save)
        return kda(*raw)

    monkeypatch.setattr(adapter, "kda", record)
    for flag in (True, False):
        assert torch.equal(o, chunk_kda(**x, **INSIDE, lower_bound=-5.0, disable_recompute=flag)[0])
    assert saved == ["all", "inputs"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"return_intermediate_states": True}, "return_intermediate_states is not supported"),
        ({"cp_context": object()}, "cp_context is not supported"),
        ({"use_graph": True}, "use_graph is not supported"),
        ({"max_num_seqs": 4}, "max_num_seqs is not supported"),
        ({"chunk_size": 32}, "chunk_size is 32"),
        ({"head_first": False}, "head_first not supported"),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, "allow_neg_eigval is True"),
        ({"safe_gate": True, "lower_bound": None}, "lower_bound is None"),
        ({"lower_bound": -6.0}, "lower_bound is -6.0"),
        ({"lower_bound": None, "A_log": None}, "A_log is None"),
        ({"q": torch.zeros(T, H, K)}, "q has shape"),
        ({"k": torch.zeros(B, T, HV, K)}, "k has shape"),
        ({"v": torch.zeros(B, T, 3, V)}, "v has 3 heads"),
        ({"g": torch.zeros(B, T, H, K)}, "g has shape"),
        ({"beta": torch.zeros(B, T, H)}, "beta has shape"),
        ({"beta": torch.zeros(B, T, HV, dtype=torch.int64)}, "beta is torch.int64"),
        ({"k": torch.zeros(B, T, H, K, device="meta")}, "k is on meta"),
        ({"v": torch.zeros(B, T, HV, V, dtype=torch.bfloat16)}, "q, k, v are"),
        ({"q": torch.zeros(B, T, H, 300), "k": torch.zeros(B, T, H, 300)}, "K = 300"),
        ({"A_log": torch.zeros(H)}, "A_log has 2 elements"),
        ({"dt_bias": torch.zeros(H * K)}, "dt_bias has 16 elements"),
        ({"initial_state": torch.zeros(B, HV, V, K)}, "initial_state has shape"),
        ({"initial_state": torch.zeros(B, HV, K, V), "state_v_first": True}, "initial_state has shape"),
        ({"initial_state": torch.zeros(B, HV, K, V, dtype=torch.bfloat16)}, "initial_state is torch.bfloat16"),
        ({"cu_seqlens": torch.tensor([0, T])}, "q has batch 2"),
        ({"cu_seqlens_cpu": torch.tensor([0, T])}, "cu_seqlens_cpu is given without"),
    ],
)
def test_refusals_name_the_argument(changes: dict[str, Any], named: str) -> None:
    x = {name: t.float() for name, t in draw().items()}
    with pytest.raises(Error, match=named) as caught:
        chunk_kda(**{**x, **INSIDE, "lower_bound": -5.0, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cu", [[0, 5], [1, T], [0, 50, 40, T], []])
def test_a_cut_must_cover_the_tokens(cu: list[int]) -> None:
    x = {name: t.float() for name, t in draw(1).items() if name != "initial_state"}
    with pytest.raises(Error, match="cu_seqlens"):
        chunk_kda(**x, **INSIDE, lower_bound=-5.0, cu_seqlens=torch.tensor(cu, dtype=torch.int64))
    with pytest.raises(Error, match=r"cu_seqlens is torch\.float32"):
        chunk_kda(**x, **INSIDE, lower_bound=-5.0, cu_seqlens=torch.tensor([0.0, T]))


def test_positional_order_is_that_of_the_other_library() -> None:
    names = [p.name for p in inspect.signature(chunk_kda).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == POSITIONAL


def test_no_tokens() -> None:
    x = {name: t.float() for name, t in draw(tokens=0).items()}
    for inside in (INSIDE, {}):
        o, final = chunk_kda(**x, **inside, lower_bound=-5.0, output_final_state=True)
        assert o.shape == (B, 0, HV, V)
        assert final is not None
        assert torch.equal(final, x["initial_state"])

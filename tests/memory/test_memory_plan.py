"""Plans: what is read, which rule decides, what is refused; and names without a plan cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perilune import Error
from perilune.memory import PRESETS, Memory, Placement, Plan, load_plan
from perilune.memory.plan import PLACEMENTS
from perilune.ops.names import deciding, keep, layer, region

TENSOR, RECIPE, REGION = (False, True), (True, True), (True, False)
NAMES = {"layers.0.kda.u": TENSOR, "layers.1.kda.u": TENSOR, "layers.1.norm": RECIPE, "layers.1.attn": REGION}


@pytest.mark.parametrize("text", PLACEMENTS)
def test_placements_read_and_print_the_same(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "hots", "host+fp8", "recompute+fp8", "fp8+fp8", "keep+host", "peer+fp8"])
def test_other_placements_are_refused(text: str) -> None:
    with pytest.raises(Error, match=r"placement of 'kda\.u' is .*allowed: keep, recompute"):
        Plan.of({"kda.u": text})


def test_the_first_rule_that_can_be_done_decides() -> None:
    plan = Plan.of({"layers.0.*": "keep", "kda.*": "fp8+host", "*": "recompute"})
    found = {name: str(plan.placement(name, *kind)) for name, kind in NAMES.items()}
    assert found == {
        "layers.0.kda.u": "keep",
        "layers.1.kda.u": "fp8+host",
        "layers.1.norm": "recompute",
        "layers.1.attn": "recompute",
    }
    # A tensor without a recipe is passed over by "recompute", a region by "host"; what nothing matches is kept.
    assert str(Plan.of({"*": "recompute"}).placement("layers.1.kda.u", *TENSOR)) == "keep"
    assert str(Plan.of({"*": "host"}).placement("layers.1.attn", *REGION)) == "keep"


@pytest.mark.parametrize(("pattern", "placement"), [("kda.w", "host"), ("attn", "host"), ("kda.u", "recompute")])
def test_a_pattern_without_a_name_is_an_error_with_the_nearest(pattern: str, placement: str) -> None:
    with pytest.raises(Error, match=rf"pattern '{pattern}' matches no name that can be {placement}; nearest: \w+"):
        Plan.of({pattern: placement}).check(NAMES)
    Plan.of({pattern: placement}, required=False).check(NAMES)


def test_presets_and_files(tmp_path: Path) -> None:
    for name in PRESETS:
        assert load_plan(name) == Plan.of(PRESETS[name], required=False)
    file = tmp_path / "plan.toml"
    file.write_text('[plan]\n"kda.u" = "fp8+host"\n"*" = "keep"\n')
    assert load_plan(str(file)) == Plan.of({"kda.u": "fp8+host", "*": "keep"})
    for text, message in (("[plan", "cannot be read"), ("x = 1", "one table"), ("[plan]\na = 1", "one table")):
        file.write_text(text)
        with pytest.raises(Error, match=message):
            load_plan(str(file))
    with pytest.raises(Error, match=r"cannot be read"):
        load_plan(str(tmp_path / "absent.toml"))
    with pytest.raises(Error, match=r"'k4'; allowed: none, full-recompute, k3"):
        load_plan("k4")


@pytest.mark.parametrize("where", ["host", "nvme", "fp8+host"])
def test_a_plan_needs_its_stores(where: str) -> None:
    with pytest.raises(Error, match=r"no such store is given"):
        Memory(Plan.of({"kda.u": where}))


def test_names_without_a_plan_give_back_what_they_got() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    node, version = y.grad_fn, y._version
    assert keep("y", y, torch.mul, x, 2) is y
    layer(3)
    assert region("same", lambda a: a, y) is y
    assert y.grad_fn is node
    assert y._version == version


def test_one_plan_at_a_time() -> None:
    memory = Memory(Plan())
    with memory.step(), pytest.raises(Error, match="active already"), deciding(memory):
        pass
    # And none is left behind.
    with memory.step():
        pass

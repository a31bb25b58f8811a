"""What the bytes of pages and states mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engines import small_model

from perilune import Error, ModelConfig
from perilune.serve import EngineConfig, Geometry
from perilune.serve.cache.cache import Copy
from perilune.serve.pools import Layout, Pools

ENGINE = EngineConfig(10**6)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_the_sizes_are_those_the_cache_counts_from_the_config(name: str, kv: str) -> None:
    config = ModelConfig.from_pretrained(name)
    layout = Layout.of(config, dataclasses.replace(ENGINE, kv=kv), torch.bfloat16)
    expected = Geometry.of(config, "bf16" if kv == "model" else "fp8")
    assert layout.geometry() == expected


def test_every_field_of_a_layout_is_in_its_digest() -> None:
    layout = Layout.of(small_model().config, ENGINE, torch.float32)
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        other = dataclasses.replace(layout, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
        assert other.digest != layout.digest, field.name


def test_a_model_of_one_kind_of_layers_is_refused() -> None:
    config = small_model().config
    none = dataclasses.replace(config, num_layers=2, dense_layers=2, mla=dataclasses.replace(config.mla, layers=()))
    with pytest.raises(Error, match="0 MLA and 2 KDA layers"):
        Layout.of(none, ENGINE, torch.float32)


def pools(host: int = 0) -> Pools:
    return Pools(Layout.of(small_model().config, ENGINE, torch.float32), 12, host, torch.device("cpu"))


def states(layout: Layout, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(seed)
    matrices = [torch.randn(layout.heads, layout.dim, layout.dim) for _ in range(layout.kda_layers)]
    return matrices, [torch.randn(3, layout.channels) for _ in range(layout.kda_layers)]


def test_a_state_comes_back_from_pages_anywhere() -> None:
    memory = pools()
    for page in range(12):
        memory.poison(page)
    need = memory.geometry.state_pages
    pages = [7, 2, 11, 5][:need]
    matrices, windows = states(memory.layout)
    memory.write_state(matrices, windows, pages)
    for given, found in zip((matrices, windows), memory.read_state(pages), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))
    others = [page for page in range(12) if page not in pages]
    assert (memory.bytes_PB[others] == 0xFF).all()  # nothing else was written


def test_a_head_of_a_state_is_one_run_of_bytes() -> None:
    """Matrices head by head, then windows channel by channel, q before k before v."""
    memory = pools()
    matrices, windows = states(memory.layout)
    memory.write_state(matrices, windows, list(range(memory.geometry.state_pages)))
    flat = memory.bytes_PB.flatten().view(torch.float32)
    size, heads = memory.layout.dim**2, memory.layout.heads
    for head in range(heads):
        assert torch.equal(flat[head * size : (head + 1) * size], matrices[0][head].flatten())
    begin = heads * size
    channels = flat[begin : begin + 3 * memory.layout.channels].view(-1, 3)
    assert torch.equal(channels, windows[0].t())


def test_rows_of_a_page_are_those_of_single_layers() -> None:
    memory = pools()
    layers, size, row = memory.layout.mla_layers, memory.layout.page_tokens, memory.layout.row
    rows_PSL = memory.rows_PSL
    assert rows_PSL.shape == (12 * layers, size, row)
    rows_PSL[3 * layers] = 7.0
    assert (memory.bytes_PB[3].view(torch.float32)[: size * row] == 7.0).all()


def test_segments_move_between_the_tiers_whole() -> None:
    memory = pools(host=6)
    memory.bytes_PB[:] = torch.randint(0, 256, memory.bytes_PB.shape, dtype=torch.uint8)
    before = memory.bytes_PB.clone()
    memory.move(Copy(0, 1, ([1, 2], [5, 0]), ([4], [3])))
    memory.bytes_PB[[1, 2, 4]] = 0xFF
    assert memory.fetch([Copy(1, 0, ([5, 0], [8, 9]), ([3], [10]))])()
    assert torch.equal(memory.bytes_PB[[8, 9, 10]], before[[1, 2, 4]])

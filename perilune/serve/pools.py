"""The memory behind the cache's page ids: one byte arena a tier, for KV pages and for cached KDA states alike.

A page holds `page_tokens` rows of every MLA layer, [layers, page_tokens, L]. Kernels see the arena as one contiguous
[pages * layers, page_tokens, L] tensor, in which page p of MLA layer l has the id p * layers + l. A cached state takes
whole pages, as bytes: for each KDA layer the matrix [H, K, V], then the convolution window [C, 3]; so a head's bytes
lie together, and C keeps q, k and v apart. States of running requests lie in slots outside the arena (`runner`).

Legend: P pages, M MLA layers, S page_tokens, L latent row width, H heads, K key and value dim, C = 3 H K channels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import torch

from perilune.config import ModelConfig
from perilune.errors import Error
from perilune.ops.pinned import host_empty
from perilune.ops.upload import upload
from perilune.serve.cache.cache import Copy
from perilune.serve.cache.geometry import Geometry
from perilune.serve.config import EngineConfig

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """What the bytes of pages and states mean; two engines may exchange segments if their digests are equal."""

    version: int
    mla_layers: int
    row: int
    row_dtype: str
    page_tokens: int
    kda_layers: int
    heads: int
    dim: int
    matrix_dtype: str
    window_dtype: str
    match_unit: int

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> Layout:
        """The layout of a model computed in `dtype`. Raises Error for a model without KDA or without MLA layers."""
        mla, kda = len(model.mla.layers), len(model.kda.layers)
        if not mla or not kda:
            raise Error(f"the model has {mla} MLA and {kda} KDA layers; the engine serves hybrids with both")
        wide = torch.promote_types(dtype, torch.float32)
        row = torch.float8_e4m3fn if engine.kv == "fp8" else dtype
        return cls(
            LAYOUT_VERSION,
            mla,
            model.mla.kv_lora_rank + model.mla.qk_rope_head_dim,
            _name(row),
            engine.page_tokens,
            kda,
            model.kda.num_heads,
            model.kda.head_dim,
            _name(wide),
            _name(dtype),
            engine.match_unit,
        )

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def channels(self) -> int:
        return 3 * self.heads * self.dim

    def geometry(self) -> Geometry:
        """The sizes that the cache counts in."""
        row, matrix, window = (
            getattr(torch, n).itemsize for n in (self.row_dtype, self.matrix_dtype, self.window_dtype)
        )
        state = self.heads * self.dim * self.dim * matrix + self.channels * 3 * window
        return Geometry(self.mla_layers * self.row * row, self.kda_layers * state, self.page_tokens, self.match_unit)

    def pack_state(
        self, matrices: Sequence[torch.Tensor] | torch.Tensor, windows: Sequence[torch.Tensor] | torch.Tensor
    ) -> torch.Tensor:
        """The bytes of a state, matrix_HKV and window_3C of each KDA layer; one tensor of all layers, or one each."""
        stacked = [x if isinstance(x, torch.Tensor) else torch.stack(list(x)) for x in (matrices, windows)]
        flat = torch.empty(self.kda_layers * sum(self._sizes), dtype=torch.uint8, device=stacked[0].device)
        for target, source in zip(self.state_parts(flat), stacked, strict=True):
            target.copy_(source)
        return flat

    def state_parts(self, flat_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """matrices [layers, H, K, V] and windows [layers, 3, C] as views of a state's bytes."""
        matrix, window = self._sizes
        layers = flat_B[: self.kda_layers * (matrix + window)].view(self.kda_layers, matrix + window)
        matrices = layers[:, :matrix].view(getattr(torch, self.matrix_dtype))
        windows = layers[:, matrix:].view(getattr(torch, self.window_dtype))
        shape = (self.heads, self.dim, self.dim)
        return matrices.unflatten(1, shape), windows.unflatten(1, (self.channels, 3)).transpose(1, 2)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of a layer's matrix and window."""
        matrix = self.heads * self.dim**2 * getattr(torch, self.matrix_dtype).itemsize
        return matrix, self.channels * 3 * getattr(torch, self.window_dtype).itemsize


class Pools:
    """The arenas of both tiers. device_pages and host_pages are the capacities of the cache's arenas."""

    def __init__(self, layout: Layout, device_pages: int, host_pages: int, device: torch.device) -> None:
        self.layout, self.geometry, self.device = layout, layout.geometry(), device
        self.pages = (device_pages, host_pages)
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.take()

    def take(self) -> None:
        """Allocate both arenas."""
        size, (device_pages, host_pages) = self.geometry.page_bytes, self.pages
        # Not cleared: what was not written is never read, and pages that nobody has used yet cost no memory on a CPU.
        self.bytes_PB = torch.empty(device_pages, size, dtype=torch.uint8, device=self.device)
        self.host_PB = host_empty((host_pages, size), torch.uint8, pin=self.device.type == "cuda")

    def release(self) -> None:
        """Give the arenas' memory back; `take` comes before the next use."""
        self.bytes_PB, self.host_PB = self.bytes_PB[:0].clone(), self.host_PB[:0].clone()

    @property
    def rows_PSL(self) -> torch.Tensor:
        """[P * M, S, L]: the arena as pages of single layers."""
        layout = self.layout
        return self.bytes_PB.view(getattr(torch, layout.row_dtype)).view(-1, layout.page_tokens, layout.row)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole device pages."""
        if sources:
            self.bytes_PB[self._ids(targets)] = self.bytes_PB[self._ids(sources)]

    def write_state(
        self,
        matrices: Sequence[torch.Tensor] | torch.Tensor,
        windows: Sequence[torch.Tensor] | torch.Tensor,
        pages: Sequence[int],
    ) -> None:
        """Put one sequence's state, a matrix_HKV and a window_3C for each KDA layer, into pages."""
        self.scatter_state(pages, self.layout.pack_state(matrices, windows))

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        """The bytes of device pages, [pages, page bytes]."""
        return self.bytes_PB[self._ids(pages)]

    def gather_state(self, pages: Sequence[int]) -> torch.Tensor:
        """The bytes of a state that lies in pages."""
        return self.gather(pages).flatten()[: self.geometry.state_bytes]

    def scatter_state(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
        """Put the bytes of a state into pages."""
        self.scatter(pages, bytes_B)

    def scatter(self, pages: Sequence[int], bytes_B: torch.Tensor) -> None:
        """Fill device pages with bytes, and with zeros after their end."""
        missing = len(pages) * self.geometry.page_bytes - bytes_B.shape[0]
        whole = torch.nn.functional.pad(bytes_B.to(self.device), (0, missing))
        self.bytes_PB[self._ids(pages)] = whole.view(len(pages), -1)

    def read_state(self, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `write_state` put there: matrices [layers, H, K, V] and windows [layers, 3, C], a copy."""
        return self.layout.state_parts(self.gather_state(pages))

    def move(self, copy: Copy) -> None:
        """Write a segment back to the host, KV and state together. Its device pages may be written at once."""
        here = [*copy.pages[0], *copy.state[0]]
        if self.copies is None:
            self._copy(self.bytes_PB[self._ids(here)], copy)
            return
        # Staged by the main stream before anybody reuses the pages; the slow copy runs beside the next steps.
        staged_PB = self.gather(here)
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            self._copy(staged_PB, copy)
        staged_PB.record_stream(self.copies)

    def _copy(self, staged_PB: torch.Tensor, copy: Copy) -> None:
        for row, page in zip(staged_PB, [*copy.pages[1], *copy.state[1]], strict=True):
            self.host_PB[page].copy_(row, non_blocking=True)

    def fetch(self, copies: Sequence[Copy]) -> Callable[[], bool]:
        """Begin to copy segments from the host to device pages; the result says whether they have arrived."""
        if self.copies is not None:
            # Whoever had the device pages before is done with them first.
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):  # None: nothing changes
            for copy in copies:
                for here, there in (copy.pages, copy.state):
                    for page, target in zip(here, there, strict=True):
                        self.bytes_PB[target].copy_(self.host_PB[page], non_blocking=True)
            if self.copies is None:
                return lambda: True
            event = torch.cuda.Event()
            event.record()
            return event.query

    def settle(self) -> None:
        """What comes next on the main stream waits for all copies: pages of a fetch that was given up may be reused."""
        if self.copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.copies)

    def poison(self, page: int) -> None:
        """Fill a device page with bytes that are NaN in every floating-point format."""
        self.bytes_PB[page] = 0xFF

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return upload(list(pages), torch.int64, self.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Layout", "Pools"]

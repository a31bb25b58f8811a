"""The residual stream of one pass through a model: plain, or attention residuals over blocks of layers.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from perilune.config import ModelConfig
from perilune.ops.attnres import Partial, implementation, merge_norm, mix_completed, mix_norm
from perilune.ops.names import keep
from perilune.ops.norm import add_rms_norm, rms_norm

# Without gradients, that many finished blocks or more are mixed ahead, for so many sublayers at once.
AHEAD_BLOCKS, AHEAD_SITES = 4, 8


class Mixer(nn.Module):
    """Learned softmax over residual blocks: one normalised query against each source (Block AttnRes)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm_D = nn.Parameter(torch.empty(config.hidden_size))
        self.query_D = nn.Parameter(torch.empty(config.hidden_size))

    def forward(
        self, sources: Sequence[torch.Tensor], norm_w_D: torch.Tensor, norm_eps: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Sources [T, D] each -> (the RMS norm of their mixture [T, D], the sources for later uses)."""
        return mix_norm(sources, self.norm_D, self.query_D, self.eps, norm_w_D, norm_eps)


@dataclass(frozen=True)
class Site:
    """A place where a sublayer, or the head, takes its input from the stream.

    mixer: None where no block is finished yet, and in a plain model. ends_block: the sum up to here joins the bank.
    """

    mixer: Mixer | None
    norm_w_D: torch.Tensor
    eps: float
    ends_block: bool = False


class Stream:
    """The sums of the finished blocks and of the current one. Sites are entered in order; what a sublayer gives is
    added on the way to the next site, in one pass with what is done there.

    ahead: mix the finished blocks for several sites at once (`ops.attnres.mix_completed`) where that saves reads.
    """

    def __init__(self, embedded_TD: torch.Tensor, sites: Sequence[Site], ahead: bool) -> None:
        self.bank: list[torch.Tensor] = []
        self.live_TD = embedded_TD
        self._added_TD: torch.Tensor | None = None
        self._sites, self._next, self._ahead = sites, 0, ahead
        self._partials: list[Partial] = []

    @property
    def sources(self) -> list[torch.Tensor]:
        """The finished blocks, the embedding first, and the current sum."""
        return [*self.bank, self.live_TD]

    def enter(self) -> torch.Tensor:
        """The next site's normed input x_TD."""
        site = self._sites[self._next]
        x_TD = self._plain(site) if site.mixer is None else self._mixed(site, site.mixer)
        self._next += 1
        if site.ends_block:
            self.bank = self.sources
        return x_TD

    def leave(self, y_TD: torch.Tensor) -> None:
        """Take the output of the sublayer whose site was entered last."""
        if self._sites[self._next - 1].ends_block:
            # A block's sum starts from its first layer's output, not from the stream before it.
            self.live_TD = keep("stream", y_TD)
        else:
            self._added_TD = y_TD

    def finish(self) -> list[torch.Tensor]:
        """The sources after the last sublayer, for layers that lie elsewhere."""
        if self._added_TD is not None:
            self.live_TD, self._added_TD = self.live_TD + self._added_TD, None
        return self.sources

    def _sum(self, site: Site, x_TD: torch.Tensor) -> torch.Tensor:
        """Named: the sums that end a block are used again by all that follows."""
        return keep("block" if site.ends_block else "stream", x_TD)

    def _plain(self, site: Site) -> torch.Tensor:
        if self._added_TD is None:
            x_TD = rms_norm(self.live_TD, site.norm_w_D, site.eps)
        else:
            self.live_TD, x_TD = add_rms_norm(self.live_TD, self._added_TD, site.norm_w_D, site.eps)
            self._added_TD = None
        return keep("norm", x_TD, rms_norm, self._sum(site, self.live_TD), site.norm_w_D, site.eps)

    def _mixed(self, site: Site, mixer: Mixer) -> torch.Tensor:
        if self._added_TD is not None:
            self.live_TD, self._added_TD = self._sum(site, self.live_TD + self._added_TD), None
        if self._ahead and len(self.bank) >= AHEAD_BLOCKS and implementation(self.sources) == "triton":
            partial = self._partial()
            return merge_norm(partial, self.live_TD, mixer.norm_D, mixer.query_D, mixer.eps, site.norm_w_D, site.eps)
        before = self.sources
        x_TD: torch.Tensor
        x_TD, (*self.bank, self.live_TD) = mixer(before, site.norm_w_D, site.eps)
        return keep("norm", x_TD, lambda *sources: mixer(sources, site.norm_w_D, site.eps)[0], *before)

    def _partial(self) -> Partial:
        """The finished blocks' part in this site's mixture; made for the sites that follow on the same bank as well."""
        if not self._partials:
            mixers: list[Mixer] = []
            for site in self._sites[self._next : self._next + AHEAD_SITES]:
                assert site.mixer is not None
                mixers.append(site.mixer)
                if site.ends_block:
                    break
            norms, queries = [m.norm_D for m in mixers], [m.query_D for m in mixers]
            self._partials = mix_completed(self.bank, norms, queries, mixers[0].eps)
        return self._partials.pop(0)


__all__ = ["Mixer", "Site", "Stream"]

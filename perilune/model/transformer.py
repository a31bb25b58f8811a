"""The model: embedding, hybrid KDA/MLA layers with Block Attention Residuals, and the output head.

Legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from perilune.config import ModelConfig, QuantConfig
from perilune.errors import Error
from perilune.model.kda import KdaLayer
from perilune.model.mla import MlaLayer
from perilune.model.moe import DenseMlp, SparseMoe
from perilune.model.parts import DEFAULT, Parts
from perilune.model.residual import Mixer, Site, Stream
from perilune.model.state import LayerState, SequenceState
from perilune.ops.moe import Routing
from perilune.ops.names import layer as name_layer
from perilune.ops.names import region
from perilune.ops.sequences import Sequences


@dataclass
class Stats:
    """Filled by a forward pass that is given one; keys are 0-based layers.

    routing: the experts' routing of sparse layers. max_logit: largest attention logit a head [H] of MLA layers.
    """

    routing: dict[int, Routing] = field(default_factory=dict)
    max_logit: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Hidden:
    """Result of `Transformer.hidden`: the normed last hidden state, and the AttnRes features asked for by `taps`."""

    x_TD: torch.Tensor
    taps: dict[int, torch.Tensor]


# (0-based layer, its attention module, normed x_TD) -> y_TD
Attend = Callable[[int, nn.Module, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """One decoder layer; what it adds to the residual stream is decided by the Transformer."""

    def __init__(self, config: ModelConfig, index: int, packed: bool = False) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.starts_block = config.starts_block(index)
        self.attn_norm_D = nn.Parameter(torch.empty(config.hidden_size))
        self.attn: KdaLayer | MlaLayer = MlaLayer(config) if config.is_mla(index) else KdaLayer(config)
        self.ffn_norm_D = nn.Parameter(torch.empty(config.hidden_size))
        self.ffn: DenseMlp | SparseMoe
        if config.is_sparse(index):
            self.ffn = SparseMoe(config, packed)
        else:
            self.ffn = DenseMlp(config.hidden_size, config.intermediate_size, config.activation)
        if config.attn_res is not None:
            self.attn_res = Mixer(config)
            self.ffn_res = Mixer(config)


class Transformer(nn.Module):
    """A Kimi-K3-shaped or Kimi-Linear-shaped language model over packed tokens.

    parts: the callables its layers use (`perilune.model.parts`); see `with_parts`.
    packed: the routed experts are kept as MXFP4 codes, for inference; config.quant must be set.
    A new model's weights are unset until `perilune.model.initialize` or a checkpoint fills them.
    """

    def __init__(self, config: ModelConfig, parts: Parts = DEFAULT, packed: bool = False) -> None:
        if packed and config.quant is None:
            raise Error("packed is true but config.quant is None; only quantised experts can be kept packed")
        super().__init__()
        self.config, self.parts = config, parts
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, index, packed) for index in range(config.num_layers)])
        if config.attn_res is not None:
            self.output_res = Mixer(config)
        self.norm_D = nn.Parameter(torch.empty(config.hidden_size))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def set_quant(self, quant: QuantConfig | None) -> None:
        """Change what the experts' numbers are from now on; weights stay as they are. Not for a packed model."""
        self.config = dataclasses.replace(self.config, quant=quant)
        for module in self.modules():
            if isinstance(module, SparseMoe):
                assert not module.packed
                module.quant = quant

    def with_parts(self, parts: Parts) -> Transformer:
        """The same weights run through other callables."""
        twin = copy.copy(self)
        twin.parts = parts
        return twin

    def forward(
        self, tokens_T: torch.Tensor, sequences: Sequences, state: Sequence[SequenceState] | None = None
    ) -> torch.Tensor:
        """Next-token logits of every token.

        tokens_T: integer [T]. state: one SequenceState a sequence, advanced by this call; None computes documents
        from their beginning (or from `sequences.starts`, which then only sets the chunk grid).
        Returns [T, V] in the model's dtype. Raises Error for tokens or states that do not fit `sequences`.
        """
        return self.parts.linear(self.hidden(tokens_T, sequences, state).x_TD, self.lm_head.weight)

    def hidden(
        self,
        tokens_T: torch.Tensor,
        sequences: Sequences,
        state: Sequence[SequenceState] | None = None,
        taps: Sequence[int] = (),
        stats: Stats | None = None,
    ) -> Hidden:
        """The normed hidden state that the head multiplies, [T, D].

        taps: AttnRes sources to return: 0 is the embedding, i the sum of block i, the last one the live sum
        (negative indices count from the end). stats: filled with routings and largest attention logits.
        """
        sequences = self._check(tokens_T, sequences, state)
        after: list[list[LayerState]] = [[] for _ in range(sequences.count)]

        def attend(index: int, attn: nn.Module, x_TD: torch.Tensor) -> torch.Tensor:
            before = None if state is None else [s.layers[index] for s in state]
            y_TD, successors, *rest = region("attn", lambda x_TD: attn(x_TD, sequences, self.parts, before), x_TD)
            for mine, successor in zip(after, successors or (), strict=False):
                mine.append(successor)
            if stats is not None and rest:
                stats.max_logit[index] = rest[0]
            attended: torch.Tensor = y_TD
            return attended

        hidden = self.run(tokens_T, attend, taps, stats)
        for sequence_state, layers in zip(state or (), after, strict=False):
            sequence_state.advance(layers)
        return hidden

    def run(
        self, tokens_T: torch.Tensor, attend: Attend, taps: Sequence[int] = (), stats: Stats | None = None
    ) -> Hidden:
        """`hidden` with the token mixing left to `attend`, whoever keeps its state."""
        ahead = self.parts.mix_ahead and not torch.is_grad_enabled()
        stream = Stream(self.embed(tokens_T), self._sites(), ahead)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            name_layer(index)
            stream.leave(attend(index, layer.attn, stream.enter()))
            x_TD = stream.enter()
            if isinstance(layer.ffn, SparseMoe):
                y_TD, routing = region("ffn", layer.ffn, x_TD, self.parts)
                if stats is not None:
                    stats.routing[index] = routing
            else:
                y_TD = region("ffn", layer.ffn, x_TD, self.parts)
            stream.leave(y_TD)
        name_layer(None)
        return Hidden(stream.enter(), self._taps(stream.sources, taps))

    def _sites(self) -> list[Site]:
        """Where sublayers and the head enter the stream, in order."""
        sites, blocks = [], 0
        for layer in self.layers:
            assert isinstance(layer, Layer)
            sites.append(Site(layer.attn_res if blocks else None, layer.attn_norm_D, layer.eps, layer.starts_block))
            blocks += layer.starts_block
            sites.append(Site(layer.ffn_res if blocks else None, layer.ffn_norm_D, layer.eps))
        return [*sites, Site(self.output_res if blocks else None, self.norm_D, self.config.rms_norm_eps)]

    def _taps(self, sources: list[torch.Tensor], taps: Sequence[int]) -> dict[int, torch.Tensor]:
        for tap in taps:
            if not -len(sources) <= tap < len(sources):
                raise Error(f"taps holds {tap}; this model has sources 0..{len(sources) - 1}")
        return {tap: sources[tap] for tap in taps}

    def _check(self, tokens_T: torch.Tensor, sequences: Sequences, state: Sequence[SequenceState] | None) -> Sequences:
        if tokens_T.dim() != 1 or tokens_T.is_floating_point():
            raise Error(f"tokens has shape {tuple(tokens_T.shape)} and dtype {tokens_T.dtype}; must be integers [T]")
        sequences.check_total("tokens", tokens_T.shape[0])
        # On a GPU this would wait for the device.
        if tokens_T.device.type == "cpu" and tokens_T.numel():
            low, high = int(tokens_T.min()), int(tokens_T.max())
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise Error(f"tokens holds id {bad}; the vocabulary is 0..{self.config.vocab_size - 1}")
        sequences = sequences.to(tokens_T.device)
        if state is None:
            return sequences
        if len(state) != sequences.count:
            raise Error(f"state holds {len(state)} sequences; must be {sequences.count}, as in sequences")
        if len({id(s) for s in state}) < len(state):
            raise Error("state holds the same SequenceState twice; a second continuation needs state.fork()")
        lengths = tuple(s.length for s in state)
        if any(sequences.starts) and sequences.starts != lengths:
            raise Error(f"sequences.starts is {sequences.starts} but the states are at {lengths}; must be equal")
        return Sequences.from_lengths(sequences.lengths, lengths, tokens_T.device)

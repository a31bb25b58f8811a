"""The model room: modules over `perilune.ops`, explicit decoding state, checkpoints, sampling."""

from perilune.model.checkpoint import load, save
from perilune.model.generate import Sampling, generate
from perilune.model.initialize import initialize, muon_heads
from perilune.model.names import quantized_parameters
from perilune.model.parts import DEFAULT, EXACT, Parts
from perilune.model.quantize import Rounding, quantize
from perilune.model.state import KdaState, LayerState, MlaState, SequenceState
from perilune.model.transformer import Hidden, Stats, Transformer

__all__ = [
    "DEFAULT",
    "EXACT",
    "Hidden",
    "KdaState",
    "LayerState",
    "MlaState",
    "Parts",
    "Rounding",
    "Sampling",
    "SequenceState",
    "Stats",
    "Transformer",
    "generate",
    "initialize",
    "load",
    "muon_heads",
    "quantize",
    "quantized_parameters",
    "save",
]

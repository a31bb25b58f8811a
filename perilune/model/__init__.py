"""The model room: modules over `perilune.ops`, explicit decoding state, checkpoints, sampling."""

from perilune.model.checkpoint import load, save
from perilune.model.generate import Sampling, generate
from perilune.model.initialize import initial_values, initialize, muon_heads
from perilune.model.names import quantized_parameters
from perilune.model.parts import DEFAULT, EXACT, Parts
from perilune.model.quantize import Rounding, quantize
from perilune.model.reading import Checkpoint, Piece, Reader, Share, open_checkpoint, places_of
from perilune.model.state import KdaState, LayerState, MlaState, SequenceState
from perilune.model.transformer import Hidden, Stats, Transformer
from perilune.model.unset import give_memory_inplace, outline

__all__ = [
    "DEFAULT",
    "EXACT",
    "Checkpoint",
    "Hidden",
    "KdaState",
    "LayerState",
    "MlaState",
    "Parts",
    "Piece",
    "Reader",
    "Rounding",
    "Sampling",
    "SequenceState",
    "Share",
    "Stats",
    "Transformer",
    "generate",
    "give_memory_inplace",
    "initial_values",
    "initialize",
    "load",
    "muon_heads",
    "open_checkpoint",
    "outline",
    "places_of",
    "quantize",
    "quantized_parameters",
    "save",
]

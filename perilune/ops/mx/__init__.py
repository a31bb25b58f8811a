"""Microscaling formats: MXFP4 and MXFP8 with one power-of-two scale per 32 values."""

from perilune.ops.mx.reference import BLOCK, RULES, decode_mxfp4, decode_mxfp8, encode_mxfp4, encode_mxfp8

__all__ = ["BLOCK", "RULES", "decode_mxfp4", "decode_mxfp8", "encode_mxfp4", "encode_mxfp8"]

"""(I + L)^-1 on Hopper in Gluon, for `triton_prepare_hopper`: substitution in 32-row blocks, products to merge them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

# Two blocks; a group of eight rows lies on two lanes, a column on 16.
COLUMN = gl.constexpr(gl.BlockedLayout([1, 4, 1], [1, 2, 16], [2, 1, 2], [2, 1, 0]))
SMALL = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))


@gluon.jit
def tf32(x):
    """Round to nearest before the tensor core cuts the low 13 bits off."""
    return (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def row_of(X, r: gl.constexpr):
    """Row r of a group of eight; integers, so that the compiler sees a plain pick."""
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    return gl.sum(gl.where(j == r, X.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)


@gluon.jit
def eliminate(X, x, Lt, r: gl.constexpr, g: gl.constexpr):
    """Take L[8g .. 8g+7, r] times the finished row x = X[r] from the eight rows of group g."""
    column = Lt.index(r).slice(8 * g, 8, dim=1).load(gl.SliceLayout(2, COLUMN))
    return X - column[:, :, None] * x[:, None, :]


@gluon.jit
def identity_rows(g: gl.constexpr):
    j = 8 * g + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    return gl.where(j == c, 1.0, 0.0) + gl.full([2, 8, 32], 0.0, gl.float32, COLUMN)


@gluon.jit
def unit_inverse(Lt, out):
    """(I + L)^-1 of two strictly lower [32, 32] blocks by forward substitution. Lt [j, block, i], out [block, i, c]."""
    X0 = identity_rows(0)
    X1 = identity_rows(1)
    X2 = identity_rows(2)
    X3 = identity_rows(3)
    for r in gl.static_range(8):
        x = row_of(X0, r)
        X0 = eliminate(X0, x, Lt, r, 0)
        X1 = eliminate(X1, x, Lt, r, 1)
        X2 = eliminate(X2, x, Lt, r, 2)
        X3 = eliminate(X3, x, Lt, r, 3)
    out.slice(0, 8, dim=1).store(X0)
    for r in gl.static_range(8):
        x = row_of(X1, r)
        X1 = eliminate(X1, x, Lt, 8 + r, 1)
        X2 = eliminate(X2, x, Lt, 8 + r, 2)
        X3 = eliminate(X3, x, Lt, 8 + r, 3)
    out.slice(8, 8, dim=1).store(X1)
    for r in gl.static_range(8):
        x = row_of(X2, r)
        X2 = eliminate(X2, x, Lt, 16 + r, 2)
        X3 = eliminate(X3, x, Lt, 16 + r, 3)
    out.slice(16, 8, dim=1).store(X2)
    for r in gl.static_range(7):
        X3 = eliminate(X3, row_of(X3, r), Lt, 24 + r, 3)
    out.slice(24, 8, dim=1).store(X3)


@gluon.jit
def small_dot(a, b):
    """[32, 32] times [32, 32], both in shared memory, tf32."""
    x = tf32(a.load(gl.DotOperandLayout(0, SMALL, 1)))
    y = tf32(b.load(gl.DotOperandLayout(1, SMALL, 1)))
    return mma_v2(x, y, gl.full([32, 32], 0.0, gl.float32, SMALL), input_precision="tf32")


__all__ = ["small_dot", "tf32", "unit_inverse"]

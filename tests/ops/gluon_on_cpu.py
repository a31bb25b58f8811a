"""Gluon sources on a CPU: one program after the other, whole tensors at a time, in float32 as the GPU counts.

Layouts are ignored: what a thread owns changes no value. Shared memory starts as NaN, and views of it share it. An
asynchronous product reads its operands when it is waited for, the latest moment that a GPU may, so that overwriting
them too early shows. Operands of tf32 products lose their low 13 bits; sums are rounded once, to float32.
Races between warps do not show.

Only what the sources in `MODULES` use is here.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from functools import lru_cache
from types import ModuleType, SimpleNamespace

import torch

MODULES = ("triton_inverse_hopper", "triton_decay_hopper", "triton_prepare_hopper")
ROOM = "perilune.ops.kda."


def plain(x):
    return x.x if isinstance(x, Value) else x


class Value:
    """A tensor of a program, or a number."""

    def __init__(self, x):
        self.x = x if isinstance(x, torch.Tensor) else torch.tensor(x)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return Value(self.x.contiguous().view(dtype))
        return Value(self.x.trunc().nan_to_num(0, 0, 0).to(dtype) if not dtype.is_floating_point else self.x.to(dtype))

    def __getitem__(self, key):
        return Value(self.x[key])

    def __index__(self):
        return int(self.x)

    def __bool__(self):
        return bool(self.x)

    def __neg__(self):
        return Value(-self.x)


def _operator(name):
    def forward(a, b):
        if isinstance(b, Pointer):
            return NotImplemented
        a, b = plain(a), plain(b)
        if isinstance(b, float):
            b = torch.tensor(b, dtype=a.dtype if a.dtype.is_floating_point else torch.float32)
        return Value(getattr(a, name)(b))

    return forward


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "lt", "le", "gt", "ge", "eq"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__hash__ = None


class Pointer:
    """An address of each element of a tensor of offsets."""

    def __init__(self, memory, at):
        self.memory, self.at = memory, at

    @classmethod
    def to(cls, x):
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return cls(memory, torch.tensor(x.storage_offset()))

    def __add__(self, offset):
        return Pointer(self.memory, self.at + plain(offset))

    def load(self, mask=None, other=None):
        if mask is None:
            return Value(self.memory[self.at])
        at, mask = torch.broadcast_tensors(self.at, plain(mask))
        assert other is not None
        return Value(
            torch.where(mask, self.memory[torch.where(mask, at, 0)], torch.tensor(other).to(self.memory.dtype))
        )

    def store(self, value):
        x = plain(value).to(self.memory.dtype)
        at, x = torch.broadcast_tensors(self.at, x)
        self.memory[at] = x


class Shared:
    """A view of shared memory."""

    def __init__(self, x):
        self.x = x

    def index(self, i):
        return Shared(self.x[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, start, length))

    def permute(self, dims):
        return Shared(self.x.permute(dims))

    def reshape(self, shape):
        return Shared(self.x.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        assert self.x.is_contiguous()
        x = self.x.view(-1).view(dtype)
        assert x.numel() == torch.Size(shape).numel()
        return Shared(x.view(shape))

    def load(self, layout):
        return Value(self.x.clone())

    def store(self, value):
        self.x.copy_(plain(value).expand(self.x.shape))


def _allocate(dtype, shape, layout, value=None):
    shared = Shared(torch.full(shape, torch.nan, dtype=dtype))
    if value is not None:
        shared.store(value)
    return shared


def _operand(x):
    """As the tensor cores read it."""
    x = x.x
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x.float()


def _product(a, b, acc, **_):
    return Value((acc.x.double() + _operand(a).double() @ _operand(b).double()).float())


class Pending:
    """A product in flight: its value is not there before it is waited for."""

    def __init__(self, a, b, acc):
        self.parts = (a, b, acc)


def _issue(a, b, acc, is_async):
    assert is_async
    return Pending(a, b, acc)


def _wait(count, pending):
    assert count == 0
    return _product(*pending[0].parts)


def flushed(x):
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x)


ASSEMBLY = {
    "ex2.approx.ftz.f32 $0, $1;": lambda x: flushed(torch.exp2(flushed(x).double()).float()),
    "rcp.approx.ftz.f32 $0, $1;": lambda x: flushed(flushed(x).reciprocal()),
    "{.reg .b32 t; mov.b32 t, 0x06000600; mul.rn.bf16x2 $0, $1, t;}": lambda x: (x.float() * 2.0**-115).bfloat16(),
}


def _assembly(text, constraints, args, dtype, is_pure, pack):
    result = ASSEMBLY[text](args[0].x)
    assert result.dtype == dtype
    return Value(result)


def _extreme(pick):
    def call(a, b, propagate_nan=None):
        a, b = plain(a), plain(b)
        a = a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=b.dtype)
        b = b if isinstance(b, torch.Tensor) else torch.tensor(b, dtype=a.dtype)
        if propagate_nan is not None or not a.dtype.is_floating_point:
            return Value(pick(a, b))
        a, b = torch.broadcast_tensors(a, b)
        return Value(torch.where(a.isnan(), b, torch.where(b.isnan(), a, pick(a, b))))

    return call


def _where(condition, a, b):
    a, b = plain(a), plain(b)
    kind = (
        next(y.dtype for y in (a, b) if isinstance(y, torch.Tensor))
        if not (isinstance(a, float) and isinstance(b, float))
        else torch.float32
    )
    a, b = (y if isinstance(y, torch.Tensor) else torch.tensor(y, dtype=kind) for y in (a, b))
    return Value(torch.where(plain(condition), a, b))


def _scan(x, axis, function):
    parts = [Value(y) for y in x.x.unbind(axis)]
    for i in builtins.range(1, len(parts)):
        parts[i] = function(parts[i - 1], parts[i])
    return Value(torch.stack([y.x for y in parts], axis))


def _range(*bounds):
    return (Value(i) for i in builtins.range(*(int(b) for b in bounds)))


class _Layouts(SimpleNamespace):
    def __call__(self, *_, **__):
        return None


program = Value(0)


def _language():
    layout = _Layouts(with_identity_for=lambda *_: None)
    names = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout")
    names += ("SwizzledSharedLayout", "PaddedSharedLayout")
    return dict.fromkeys(names, layout) | {
        "constexpr": lambda x: x,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "int32": torch.int32,
        "int64": torch.int64,
        "program_id": lambda axis: program,
        "load": lambda p, mask=None, other=None: p.load(mask, other),
        "store": lambda p, value: p.store(value),
        "allocate_shared_memory": _allocate,
        "thread_barrier": lambda: None,
        "arange": lambda a, b, layout: Value(torch.arange(a, b)),
        "full": lambda shape, value, dtype, layout: Value(torch.full(shape, float(value), dtype=dtype)),
        "reshape": lambda x, shape: Value(x.x.reshape(shape)),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "static_range": builtins.range,
        "where": _where,
        "sum": lambda x, axis: Value(x.x.sum(axis, dtype=x.x.dtype)),
        "max": lambda x, axis: Value(x.x.amax(axis)),
        "maximum": _extreme(torch.maximum),
        "minimum": _extreme(torch.minimum),
        "abs": lambda x: Value(x.x.abs()),
        "fma": lambda a, b, c: Value((a.x.double() * plain(b) + plain(c)).float()),
        "rsqrt": lambda x: Value(x.x.rsqrt()),
        "associative_scan": _scan,
        "inline_asm_elementwise": _assembly,
    }


def _module(name, **values):
    module = ModuleType(name)
    for key, value in values.items():
        setattr(module, key, value)
    return module


@lru_cache
def sources():
    """The modules, by name, with Gluon's words as they are here."""
    copies = SimpleNamespace(
        async_copy_global_to_shared=lambda tile, x: tile.store(x.load()),
        commit_group=lambda: None,
        wait_group=lambda n: None,
    )
    hopper = {"async_copy": copies, "fence_async_shared": lambda: None, "mma_v2": _product}
    hopper |= {"warpgroup_mma": _issue, "warpgroup_mma_wait": _wait}
    base = "triton.experimental.gluon"
    language = _module(f"{base}.language", **_language())
    fakes = {
        base: _module(base, jit=lambda f: f, language=language),
        f"{base}.language": language,
        f"{base}.language.nvidia": _module(f"{base}.language.nvidia"),
        f"{base}.language.nvidia.hopper": _module(f"{base}.language.nvidia.hopper", **hopper),
    }
    kept = {name: sys.modules.get(name) for name in (*fakes, *(ROOM + m for m in MODULES))}
    found = {}
    # `from triton.experimental import gluon` finds the real one there, where anything has imported it before.
    parent = importlib.import_module("triton.experimental")
    real = getattr(parent, "gluon", None)
    try:
        sys.modules.update(fakes)
        parent.gluon = fakes[base]
        for name in MODULES:
            spec = importlib.util.find_spec(ROOM + name)
            module = importlib.util.module_from_spec(spec)
            module.range = _range
            sys.modules[ROOM + name] = found[name] = module
            spec.loader.exec_module(module)
    finally:
        del parent.gluon
        if real is not None:
            parent.gluon = real
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    return found


def launch(kernel, grid, *args, **constants):
    """`kernel` (module and name) of the sources, programs in order; tensors become pointers."""
    module, name = kernel
    call = getattr(sources()[module], name)
    for i in builtins.range(grid):
        program.x = torch.tensor(i)
        call(*(Pointer.to(a) if isinstance(a, torch.Tensor) else a for a in args), **constants)


__all__ = ["launch", "sources"]

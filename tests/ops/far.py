"""Every launch a second time, far away: the same rows behind so many others that 32-bit offsets would not reach them.

Inside `everything_again` a launch in Triton's interpreter runs as always, and then again with program numbers, and the
indices in its tables, moved on by what `far_places.PLACES` says for the kernel. Its tensors then are stretches of an
address space that is reserved but not filled, up to terabytes of it, with the same rows put where the moved indices
point. The same bits must come out. The interpreter refuses a 32-bit product or sum that overflows; an address that has
been cut down reads zeros, or writes where nobody looks.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
BEFORE = 1 << 34  # bytes in front of a stretch: an offset cut down to a negative number must not leave it


@dataclass(frozen=True)
class Far:
    """Where a launch lies the second time.

    program: added to the program numbers. at: of a tensor, by its argument's name, how many elements further on it
    lies, or the pieces (first, elements, where) it falls into. add: to index tensors and to numbers. real: to index
    tensors where they are not negative, which stands for none. stored: to what the kernel stores into a tensor.
    skip: tensors that only the first program writes.
    """

    program: tuple[int, int, int]
    at: dict[str, int | list[tuple[int, int, int]]]
    add: dict[str, Any] = field(default_factory=dict)
    real: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


def stretch(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Zeros that take memory where they are touched; `BEFORE` bytes in front of the tensor are there too."""
    size = torch.empty(0, dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, 2 * BEFORE + elements * size, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space to reserve: {error}")
    return torch.frombuffer(memory, dtype=dtype)[BEFORE // size :]


def _pieces(x: torch.Tensor, at: int | list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(0, x.numel(), at)] if isinstance(at, int) else at


def _moved(far: Far, name: str, x: torch.Tensor) -> torch.Tensor:
    """An index tensor's indices moved on."""
    if name in far.real:
        return torch.where(x >= 0, x + far.real[name], x)
    return x + torch.as_tensor(far.add[name]).to(x.dtype) if name in far.add else x


def _away(x: torch.Tensor, at: int | list[tuple[int, int, int]]) -> torch.Tensor:
    assert x.is_contiguous()
    pieces = _pieces(x, at)
    far = stretch(x.dtype, max(where + count for _, count, where in pieces))
    for first, count, where in pieces:
        far[where : where + count] = x.reshape(-1)[first : first + count]
    return far


def _back(far: torch.Tensor, x: torch.Tensor, at: int | list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.cat([far[where : where + count] for _, count, where in _pieces(x, at)])


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).flatten()


def _tensor(value: Any) -> torch.Tensor | None:
    base = value.base if isinstance(value, TensorDescriptor) else value
    return base if isinstance(base, torch.Tensor) else None


def _with(value: Any, tensor: torch.Tensor, at: int) -> Any:
    """The argument over another tensor; rows of a descriptor end where the moved ones do."""
    if not isinstance(value, TensorDescriptor):
        return tensor
    shape = [value.shape[0] + at // value.strides[0], *value.shape[1:]]
    return TensorDescriptor(tensor, shape, value.strides, value.block_shape, value.padding)


def _range(*bounds: Any, **_: Any) -> Iterator[tl.tensor]:
    """`tl.range` with loop variables of the type that they have on a GPU, where the interpreter has Python's ints."""
    wide = any(isinstance(x, tl.tensor) and x.dtype == tl.int64 for x in bounds)
    kind, dtype = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for i in range(*(int(x) for x in bounds)):
        yield tl.tensor(interpreter.TensorHandle(np.array([i], dtype=dtype), kind), kind)


@contextlib.contextmanager
def programs(by: tuple[int, int, int]) -> Iterator[None]:
    """Program numbers moved on; tensors stay where they are, as they are on the host."""
    builder, patch_language = interpreter.interpreter_builder, interpreter._patch_lang
    patch = pytest.MonkeyPatch()

    def place(*index: int) -> None:
        builder.grid_idx = tuple(i + d for i, d in zip(index, by, strict=True))

    def patched(function: Any) -> Any:
        scope = patch_language(function)
        scope.set_attr(tl, "range", _range)
        return scope

    patch.setattr(interpreter, "_patch_lang", patched)
    patch.setattr(builder, "set_grid_idx", place)
    patch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True))  # refuse overflows
    patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    try:
        yield
    finally:
        patch.undo()


def key(function: Any) -> str:
    """A kernel's name: of its module in `perilune.ops`, and its own."""
    return f"{function.__globals__['__name__'].removeprefix('perilune.ops.')}.{function.__name__}"


@contextlib.contextmanager
def everything_again(places: dict[str, Any], seen: set[str]) -> Iterator[None]:
    """Runs launches twice; adds the kernels' names to `seen`."""
    call = interpreter.GridExecutor.__call__

    def twice(self: Any, *given: Any, **options: Any) -> None:
        known = {name: value for name, value in options.items() if name in inspect.getfullargspec(self.fn).args}
        args = inspect.getcallargs(self.fn, *given, **known)
        name = key(self.fn)
        if name not in places:
            return call(self, *given, **options)
        far = places[name](args)
        copies = {
            n: tuple(None if _tensor(x) is None else _tensor(x).clone() for x in _each(v)) for n, v in args.items()
        }
        call(self, *given, **options)
        moved, holds = {}, {}
        for n, value in args.items():
            at, items = far.at.get(n, 0), []
            for x, copy in zip(_each(value), copies[n], strict=True):
                if copy is None:
                    items.append(x + far.add.get(n, 0) if isinstance(x, int) and n in far.add else x)
                    continue
                copy = _moved(far, n, copy)
                there = _away(copy, at) if at else copy
                holds.setdefault(n, []).append((there, copy))
                items.append(_with(x, there, at if isinstance(at, int) else 0))
            moved[n] = tuple(items) if isinstance(value, tuple) else items[0]
        with programs(far.program):
            call(self, **moved)
        for n, pairs in holds.items():
            if n in far.skip:
                continue
            results = [_tensor(x) for x in _each(args[n]) if _tensor(x) is not None]
            for (there, copy), result in zip(pairs, results, strict=True):
                after = _back(there, copy, far.at[n]) if far.at.get(n, 0) else there
                want = _moved(far, n, result)
                want = want + far.stored[n] if n in far.stored else want
                assert torch.equal(_bits(after), _bits(want)), f"{name}: {n} differs"
        seen.add(name)

    patch = pytest.MonkeyPatch()
    patch.setattr(interpreter.GridExecutor, "__call__", twice)
    try:
        yield
    finally:
        patch.undo()


__all__ = ["Far", "everything_again", "key", "programs", "stretch"]

"""`TensorArray`: a numpy array that also takes the calls that code written for a tensor makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class ValuesIndices(NamedTuple):
    """What `topk`, `sort`, `max` and `min` along a dimension of a tensor return."""

    values: Any
    indices: Any


def _takes_dim(method: Callable[..., Any]) -> Any:
    """Return the array's method, which then also takes `dim` for `axis`, `keepdim` for its own."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return method(self, *args, **{_NUMPY_NAMES.get(name, name): value for name, value in options.items()})

    return call


_NUMPY_NAMES = {"dim": "axis", "keepdim": "keepdims"}


class TensorArray(np.ndarray[Any, Any]):
    """An array with the methods that callers use of a tensor; functions of torch take it, too.

    Where a tensor's method has the name of an array's, its own arguments choose it:
    `sort(descending=True)`, `max(dim=1)` or, as numpy calls it by `axis`, `max(1)`. All other
    methods of a tensor are there as soon as the caller has imported torch. Nothing here does.

    >>> scores = TensorArray.of(np.array([[0.1, 0.9, 0.5]]))
    >>> scores.topk(2).indices.tolist()
    [[1, 2]]
    """

    @classmethod
    def of(cls, array: npt.ArrayLike) -> TensorArray:
        """Return `array` as one; they share their memory."""
        return np.asarray(array).view(cls)

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """Return the plain array, which shares its memory."""
        return self.view(np.ndarray)

    def detach(self) -> TensorArray:
        """Return the array itself: it has no gradient, and is on the CPU."""
        return self

    cpu = detach

    def to(self, *args: Any, **options: Any) -> Any:
        """Return a tensor, moved or cast; without torch, the array itself for the CPU."""
        if "torch" not in sys.modules and not options and [str(each) for each in args] == ["cpu"]:
            return self
        return _tensor(self).to(*args, **options)

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesIndices:
        """Return the `k` largest (or smallest) values along a dimension, and their indices."""
        if not 0 <= k <= self.shape[dim]:
            raise ValueError(f"topk: k must be at most {self.shape[dim]}, got {k}")
        values = -self.numpy() if largest else self.numpy()
        first = np.take(np.argpartition(values, max(k - 1, 0), axis=dim), np.arange(k), axis=dim)
        order = np.argsort(np.take_along_axis(values, first, dim), axis=dim)
        return self._at(np.take_along_axis(first, order, dim), dim)

    def argsort(self, *args: Any, **options: Any) -> Any:
        """Return the order of the values: a tensor's with `dim` or `descending`, or an array's."""
        if not options.keys() & {"dim", "descending"}:
            return super().argsort(*args, **options)
        values = -self.numpy() if options.get("descending") else self.numpy()
        stable = bool(options.get("stable"))
        return TensorArray.of(np.argsort(values, axis=_dim(args, options), kind="stable" if stable else None))

    def sort(self, *args: Any, **options: Any) -> Any:
        """Return values and indices with `dim` or `descending`; sort in place as an array does."""
        if not options.keys() & {"dim", "descending"}:
            return super().sort(*args, **options)
        return self._at(self.argsort(*args, **options), _dim(args, options))

    def max(self, *args: Any, **options: Any) -> Any:
        """Return values and indices along `dim`, or an array's maximum."""
        return self._extreme(super().max, np.argmax, *args, **options)

    def min(self, *args: Any, **options: Any) -> Any:
        """Return values and indices along `dim`, or an array's minimum."""
        return self._extreme(super().min, np.argmin, *args, **options)

    sum: Any = _takes_dim(np.ndarray.sum)
    mean: Any = _takes_dim(np.ndarray.mean)
    argmax: Any = _takes_dim(np.ndarray.argmax)
    argmin: Any = _takes_dim(np.ndarray.argmin)
    any: Any = _takes_dim(np.ndarray.any)
    all: Any = _takes_dim(np.ndarray.all)
    prod: Any = _takes_dim(np.ndarray.prod)
    cumsum: Any = _takes_dim(np.ndarray.cumsum)

    def std(self, *args: Any, **options: Any) -> Any:
        """Return a tensor's with `dim`, which divides by one less, or an array's."""
        return _tensor(self).std(*args, **options) if "dim" in options else super().std(*args, **options)

    def var(self, *args: Any, **options: Any) -> Any:
        """Return a tensor's with `dim`, which divides by one less, or an array's."""
        return _tensor(self).var(*args, **options) if "dim" in options else super().var(*args, **options)

    def _extreme(self, own: Callable[..., Any], indices: Any, *args: Any, **options: Any) -> Any:
        if args in ((), (None,)) and "dim" not in options:
            return own(**options)
        dim = options.pop("dim", *args[:1])
        found = self._at(indices(self.numpy(), axis=dim, keepdims=True), dim)
        keepdim = options.pop("keepdim", *args[1:] or (False,))
        return found if keepdim else ValuesIndices(*(np.squeeze(each, dim) for each in found))

    def _at(self, indices: npt.NDArray[Any], dim: int) -> ValuesIndices:
        values = np.take_along_axis(self.numpy(), np.asarray(indices), dim)
        return ValuesIndices(TensorArray.of(values), TensorArray.of(indices))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "torch" not in sys.modules:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(_tensor(self), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch's functions take the array as a tensor."""
        return function(*_tensors(args), **{name: _tensors(value) for name, value in (kwargs or {}).items()})


def _dim(args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return the dimension to sort along, given by position or by name; the last by default."""
    return int(args[0] if args else options.get("dim", -1))


def _tensor(array: TensorArray) -> Any:
    import torch

    return torch.from_numpy(array.numpy())


def _tensors(value: Any) -> Any:
    """Return the value with each `TensorArray` in it as a tensor."""
    if isinstance(value, TensorArray):
        return _tensor(value)
    return type(value)(map(_tensors, value)) if type(value) in (list, tuple) else value

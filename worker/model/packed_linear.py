"""Linear layers in the layout that matrix products in C or oneDNN's want, made once after loading.

The default product (MKL's) is 2 to 5 times off the machine's roof at the 2 to 64 rows of a decode step, and rounds a
row by how many others there are. A packed weight is read in the order in which it lies, and a row's result does not
depend by one bit on its batch: a request's tokens stay the same whoever shares its steps.

What is packed is found by watching one forward: layers that are called, and whose weights nobody else reads. Layers
that are called one after the other on the same input (queries, keys, values; gate and up) become one product.
"""

import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kernels.packed_product import Arena, PackedWeight

# oneDNN packs for a number of rows. What it packs for 16 serves all others, one row excepted: see PackedLinear.
_ROWS = 16
# Smaller layers gain nothing, and padding to whole registers could double them.
_LEAST_FEATURES = 32
# A tied output head is packed beside the embedding that it shares: at most this part of all weights more.
MAX_COPIED_SHARE = 0.25
_MADV_DONTNEED = 4  # Linux


class PackedLinear(nn.Module):
    """x [..., in_features] -> [..., out_features], as nn.Linear. oneDNN multiplies."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out_features, in_features] is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != self.in_features:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        # One row alone would be summed in another order than the same row beside others.
        rows = x.reshape(-1, self.in_features).repeat(2, 1)
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out[:1].reshape(*x.shape[:-1], self.out_features)


class NativeLinear(nn.Module):
    """x [..., in_features] -> [..., out_features], as nn.Linear. Our library in C multiplies (`kernels/native`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena):
        """weight [out_features, in_features] is copied."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = PackedWeight(weight, bias, arena)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed.multiply(x)


class _Stack:
    """Layers that are called in turn on the same input, computed together when the first is."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]):
        self.linear = linear
        self.sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, x: Tensor) -> Tensor:
        if self._input is not x:
            self._input, self._outputs = x, self.linear(x).split(self.sizes, dim=-1)
        out = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return out


class StackedLinear(nn.Module):
    """One of the layers of a stack."""

    def __init__(self, stack: _Stack, index: int):
        super().__init__()
        self._stack = stack
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._stack.output(self._index, x)

    def stacked_with(self, *others: object) -> nn.Module | None:
        """The product that consists of this layer and `others`, in that order, if there is one."""
        layers, stack = (self, *others), self._stack
        is_whole = len(layers) == len(stack.sizes) and all(
            isinstance(layer, StackedLinear) and layer._stack is stack and layer._index == i
            for i, layer in enumerate(layers)
        )
        return stack.linear if is_whole else None


Make = Callable[[Tensor, Tensor | None], nn.Module]  # (weight, bias) -> what takes the layer's place


@dataclass(slots=True)
class _Watched:
    """What a forward did with the linear layers of a model."""

    calls: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # with their inputs, in order
    read: set[nn.Module] = field(default_factory=set)  # whose weights were used from outside


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that become one product, and where the model keeps them."""

    linears: tuple[nn.Module, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the product."""
        shapes = [weight_of(linear).shape for linear in self.linears]
        return sum(out for out, _ in shapes), shapes[0][1]

    @property
    def name(self) -> str:
        """Its shape."""
        return "{}x{}".format(*self.shape)


def weight_of(linear: nn.Module) -> Tensor:
    """[out_features, in_features]; a Conv1D of transformers keeps it the other way round."""
    return linear.weight.t() if isinstance(linear, Conv1D) else linear.weight


def onednn_serves(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of that dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    return {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }.get(dtype, False)


def find_groups(
    model: PreTrainedModel, forward: Callable[[], object], serves: Callable[[torch.dtype], object] = onednn_serves
) -> list[Group]:
    """The layers of `model` that may be packed, found by `forward()`, which runs it once. Changes nothing.

    serves: whether weights of a dtype can be packed.
    """
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    total = sum(p.nbytes for p in model.parameters())
    copied = MAX_COPIED_SHARE * total
    with _watching(model) as watched:
        forward()
    usable = set()
    for linear in {id(m): m for m, _ in watched.calls}.values():
        if linear in watched.read or min(linear.weight.shape) < _LEAST_FEATURES or not serves(linear.weight.dtype):
            continue
        if users[id(linear.weight)] > 1:
            copied -= linear.weight.nbytes
            if copied < 0:
                continue
        usable.add(linear)
    return _groups(model, watched, usable)


def _groups(model: PreTrainedModel, watched: _Watched, usable: set[nn.Module]) -> list[Group]:
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    times = Counter(linear for linear, _ in watched.calls)
    groups: list[list[nn.Module]] = []
    last_input = None
    for linear, x in watched.calls:
        if linear in usable and times[linear] == 1:
            previous = groups[-1][-1] if groups and x is last_input else None
            if previous is not None and _fit_together(previous, linear, parents):
                groups[-1].append(linear)
            else:
                groups.append([linear])
            last_input = x
        else:
            last_input = None
    # Layers that run several times (models that loop over theirs) stay apart.
    groups += [[linear] for linear in times if linear in usable and times[linear] > 1]
    return [Group(tuple(group)) for group in groups]


def _fit_together(first: nn.Module, second: nn.Module, parents: dict[nn.Module, nn.Module]) -> bool:
    return (
        parents[first] is parents[second]
        and first.weight.dtype == second.weight.dtype
        and weight_of(first).shape[1] == weight_of(second).shape[1]
    )


@contextmanager
def _watching(model: PreTrainedModel) -> Iterator[_Watched]:
    """Records which linear layers are called, on what, and whose weights are read otherwise."""
    watched, computing = _Watched(), []

    def watcher(kind: type) -> type:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            watched.calls.append((self, x))
            computing.append(self)
            try:
                return kind.forward(self, x)
            finally:
                computing.pop()

        def get(self: nn.Module, name: str) -> object:
            if name == "weight" and self not in computing:
                watched.read.add(self)
            return kind.__getattr__(self, name)

        return type(kind.__name__, (kind,), {"forward": forward, "__getattr__": get})

    watchers = {kind: watcher(kind) for kind in (nn.Linear, Conv1D)}
    linears = [m for m in model.modules() if type(m) in watchers and not m._forward_hooks and not m._forward_pre_hooks]
    kinds = [type(linear) for linear in linears]
    for linear, kind in zip(linears, kinds, strict=True):
        linear.__class__ = watchers[kind]
    try:
        yield watched
    finally:
        for linear, kind in zip(linears, kinds, strict=True):
            linear.__class__ = kind


def pack(model: PreTrainedModel, groups: Sequence[Group], make: Make) -> None:
    """Puts what `make` makes of a group's weights in the place of its layers, and drops these, group by group."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    mapped = _mapped_files()
    for group in groups:
        for linear, packed in zip(group.linears, _packed(group, make), strict=True):
            for parent, name in places.pop(linear):
                setattr(parent, name, packed)
            _forget_pages(linear.weight, mapped)
            linear._parameters.clear()  # who holds the layer does not hold its weights


def _packed(group: Group, make: Make) -> list[nn.Module]:
    biases = [linear.bias for linear in group.linears]
    weights = [weight_of(linear) for linear in group.linears]
    if len(weights) == 1:
        return [make(weights[0].contiguous(), biases[0])]
    bias = None
    if any(b is not None for b in biases):
        zeros = (w.new_zeros(len(w)) for w in weights)
        bias = torch.cat([z if b is None else b for z, b in zip(zeros, biases, strict=True)])
    stack = _Stack(make(torch.cat(weights), bias), [len(weight) for weight in weights])
    return [StackedLinear(stack, i) for i in range(len(weights))]


def _mapped_files() -> list[tuple[int, int]]:
    """Addresses [begin, end) at which this process has files mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    fields = (line.split() for line in maps.read_text().splitlines())
    return [tuple(int(end, 16) for end in f[0].split("-")) for f in fields if f[4] != "0"]


def _forget_pages(weight: Tensor, mapped: Sequence[tuple[int, int]]) -> None:
    """Takes the pages of a weight that is mapped from a file out of this process: it would be in memory twice.

    Nothing is lost: who reads them (an embedding that shares the weight) gets them from the file again.
    """
    begin = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and any(low <= begin and end <= high for low, high in mapped):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)

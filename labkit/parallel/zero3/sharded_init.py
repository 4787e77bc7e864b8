"""Sharded construction: builds a model that never exists in full on any rank.

    with ZeRO3.init(comm):
        model = GPT(...)             # unmodified code, including initialization
    model = ZeRO3(model, comm)

Each registered parameter becomes a `ShardedParameter` with 1/n of its elements. A parameter is
*open* (gathered) only while it is the newest one or the last operation used it.

    weight = empty(...)       register      normal_(weight)      bias = empty(...)   register
    rank 0   [whole      ]    open          open, filled         [0   ] closed       bias is open
    rank 1   [whole      ]    open          open, filled         [   1] closed       bias is open

    each rank holds   P/n of closed parameters, and the whole open parameter
    traffic           (n-1)/n of a parameter's bytes each time it closes (rank 0 scatters the
                      values) or reopens (all-gather; none before an overwrite such as `normal_`)

Source: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, section 7.2; DeepSpeed's `zero.Init`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.comm import Comm

aten = torch.ops.aten
OVERWRITES = {  # the first argument is overwritten in full, so it is not gathered
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.copy_.default,
    aten.fill_.Scalar, aten.fill_.Tensor, aten.exponential_.default, aten.random_.default,
    aten.bernoulli_.float,
}  # fmt: skip


@contextmanager
def sharded_init(comm: Comm | None = None) -> Iterator[None]:
    """Shards, over the ranks of `comm` (default: all), the parameters that modules register in this
    block, which all ranks must run; buffers, lazy and meta parameters are not sharded. With the
    same seed, weights match a single process bitwise. Views such as `weight[0]` are writable
    until a different parameter is created or used."""
    construction = Construction(Comm.of(comm))
    register = nn.Module.register_parameter

    def register_sharded(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)  # raises torch's errors
        if parameter is None or isinstance(parameter, ShardedParameter):
            return
        if not (nn.parameter.is_lazy(parameter) or parameter.is_meta):
            what = f"{type(module).__name__}.{name}"
            module._parameters[name] = construction.shard(what, parameter)  # type: ignore[assignment]

    with patch.object(nn.Module, "register_parameter", register_sharded):
        try:
            with _CloseBeforeFactory(construction):
                yield
            construction.open_only([])
        finally:
            construction.is_done = True


class _CloseBeforeFactory(TorchDispatchMode):
    """Closes the open parameter before a factory such as `torch.empty` allocates another tensor."""

    def __init__(self, construction: "Construction"):
        super().__init__()
        self._construction = construction

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # saves 3 s of importing torch._dynamo
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            self._construction.open_only([])
        return func(*args, **(kwargs or {}))


class Elements:
    """This rank's share of a parameter, common to its aliases; `full` is set only while open."""

    def __init__(self, what: str, full: Tensor, construction: "Construction"):
        self.what, self.construction = what, construction
        self.shape, self.stride = full.shape, full.stride()
        self.share = full.new_empty(0)
        self.full: Tensor | None = full

    def close(self) -> None:
        assert self.full is not None
        comm, full, self.full = self.construction.comm, self.full, None
        parts = full.reshape(-1).tensor_split(comm.size)
        self.share = torch.empty_like(parts[comm.rank])
        if full.numel():
            comm.scatter(self.share, list(parts) if comm.rank == 0 else None, src=0)

    def gathered(self) -> Tensor:
        comm, whole = self.construction.comm, self.empty_whole()
        flat = whole.view(-1) if whole.is_contiguous() else whole.new_empty(whole.numel())
        if flat.numel():
            comm.all_gather(list(flat.tensor_split(comm.size)), self.share)
        return whole if whole.is_contiguous() else whole.copy_(flat.view(self.shape))

    def empty_whole(self) -> Tensor:
        return self.share.new_empty_strided(self.shape, self.stride)

    def with_share(self, share: Tensor) -> "Elements":
        other = Elements(self.what, share.new_empty(0), self.construction)
        other.shape, other.stride, other.share, other.full = self.shape, self.stride, share, None
        return other


class Construction:
    """Shards the parameters of a model while its code creates and initializes them."""

    def __init__(self, comm: Comm):
        self.comm, self.is_done = comm, False
        # Not weakrefs: ranks must close the same parameters but collect garbage at different times.
        self._open: list[Elements] = []

    def shard(self, what: str, parameter: nn.Parameter) -> "ShardedParameter":
        """Swaps the sharded parameter into `parameter`, to which the module may still write."""
        sharded = ShardedParameter(self.new(what, parameter.detach()), parameter.requires_grad)
        sharded.__dict__.update(parameter.__dict__)
        try:
            torch.utils.swap_tensors(parameter, sharded)
        except RuntimeError:  # a fake tensor, without data to write to
            return parameter.__dict__.setdefault("_sharded", sharded)
        return parameter  # type: ignore[return-value]

    def new(self, what: str, full: Tensor) -> Elements:
        self.open_only([])
        self._open = [Elements(what, full, self)]
        return self._open[0]

    def open_only(self, wanted: list[Elements], overwritten: Elements | None = None) -> None:
        closing = [x for x in self._open if x not in wanted]
        self._open = [x for x in self._open if x in wanted]
        for x in closing:
            x.close()
        for x in wanted:
            if x.full is None:
                x.full = x.empty_whole() if x is overwritten else x.gathered()
                self._open.append(x)


class ShardedParameter(Tensor):
    """Looks like an `nn.Parameter` but holds only this rank's share. Operations gather the whole
    parameter while the model is built, and raise ValueError afterward."""

    elements: Elements
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elements: Elements, requires_grad: bool) -> "ShardedParameter":
        like = elements.share
        self: ShardedParameter = Tensor._make_wrapper_subclass(
            cls, elements.shape, strides=elements.stride, dtype=like.dtype, device=like.device,
            requires_grad=requires_grad, storage_size=0,
        )  # fmt: skip
        self.elements = elements
        self._is_param = True  # so that torch treats a subclass as an nn.Parameter
        return self

    def whole(self) -> Tensor:
        """Returns the gathered parameter. Collective: call on every rank."""
        full = self.elements.full
        return self.elements.gathered() if full is None else full

    @property
    def data(self) -> "ShardedParameter":
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, new: Tensor) -> None:
        """Supports initialization code such as `layer.weight.data = torch.zeros(3, 5)`."""
        old = self.elements
        if not isinstance(new, ShardedParameter):
            new = ShardedParameter(old.construction.new(old.what, new.detach()), False)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.elements = new.elements

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return cls(args[0].elements, requires_grad=False)
        sharded = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        elements = [x.elements for x in sharded]
        construction = elements[0].construction
        if func is aten._to_copy.default:  # dtype or device changes by `module.to`
            construction.open_only([])
            kwargs = {name: x for name, x in kwargs.items() if name != "memory_format"}
            return cls(elements[0].with_share(func(elements[0].share, **kwargs)), False)
        if construction.is_done:
            raise ValueError(
                f"{func.overloadpacket.__name__} on {elements[0].what} {list(elements[0].shape)}: "
                f"the parameter is sharded (this rank holds 1/{construction.comm.size}); wrap the "
                "module in ZeRO3 before it computes, or call parameter.whole() on every rank"
            )
        unique = list(dict.fromkeys(elements))
        construction.open_only(unique, elements[0] if func in OVERWRITES else None)
        args, kwargs = tree_map_only(cls, lambda x: x.elements.full, (args, kwargs))
        result = func(*args, **kwargs)
        return next((x for x in sharded if x.elements.full is result), result)  # in-place: x

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        self.elements.construction.open_only([])
        elements = self.elements.with_share(self.elements.share.clone())
        memo[id(self)] = copied = ShardedParameter(elements, self.requires_grad)
        return copied

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["share"], None  # so that `nn.Module.to` swaps the whole object

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Tensor:
        raise NotImplementedError(
            "a sharded parameter cannot be compiled; wrap its module in ZeRO3"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        x = self.elements
        return (
            f"ShardedParameter({x.what} {list(x.shape)}, {self.dtype}, rank "
            f"{x.construction.comm.rank} has {x.share.numel()} of {self.numel()} elements)"
        )

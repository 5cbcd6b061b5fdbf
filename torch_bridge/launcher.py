"""One kernel on one device: what it takes, checked once for every form of it, and its launch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jkv.errors import JkvError
from pallas_kernels.bundle.format import ALIGNMENT, Argument, Extent, Kernel
from torch_bridge.function import Function
from torch_bridge.ready import Ready

_KEPT = 1024  # forms of operands that a kernel remembers
_FORM = operator.attrgetter("dtype", "device", "shape")
_MOST = 65535  # programs along the second and third axis of a grid
Plan = tuple[Function | None, tuple[int, int, int]]


class Launcher:
    """One kernel on one device. ``names`` are the tensors that a launch takes, those that are not bound.

    Operands are checked when a form of them (dtypes, devices, shapes, sizes) is first seen; later launches only see
    that they are contiguous and aligned. Launches are safe in any thread and in a CUDA graph.
    """

    def __init__(self, kernel: Kernel, functions: Sequence[Function], device: torch.device):
        self.kernel, self.device = kernel, device
        self._functions = functions
        self._arguments = {argument.name: argument for argument in kernel.arguments}
        self._bound: dict[str, Tensor] = {}
        self._order()

    def bind(self, tensors: Mapping[str, Tensor]) -> Launcher:
        """The kernel with some tensors given for good: a cache, its calibration. They are kept, and checked now.

        Raises:
          JkvError: for a name that the kernel has not, or a tensor that does not fit.
        """
        made = Launcher.__new__(Launcher)
        made.__dict__.update(self.__dict__)
        for name, tensor in tensors.items():
            if name not in self._arguments:
                raise JkvError(f"{self.kernel.op!r} takes no {name!r}; it takes {', '.join(self._arguments)}")
            self._check(self._arguments[name], tensor, {})
            if tensor.data_ptr() % ALIGNMENT:
                raise self._misaligned(name, tensor)
        made._bound = {**self._bound, **tensors}
        made._order()
        return made

    def launch(self, sizes: Mapping[str, int], *tensors: Tensor) -> None:
        """Queue one launch. ``sizes`` are those that its grid and operands depend on: of ``batch``, ``splits``,
        ``tokens``, ``pages``, ``width`` and ``blocks``.

        Raises:
          JkvError: for tensors that do not fit, naming the first.
        """
        form = (*sizes.items(), *map(_FORM, tensors))
        plan = self._plans.get(form)
        if plan is None:
            plan = self._plan(form, sizes, tensors)
        addresses = [*map(Tensor.data_ptr, tensors)]
        if not all(map(Tensor.is_contiguous, tensors)) or functools.reduce(operator.or_, addresses, 0) % ALIGNMENT:
            self._refuse_memory(tensors)
        function, grid = plan
        if function is not None:
            function(grid, self._arrange((*addresses, *self._fixed)))

    def ready(self, sizes: Mapping[str, int], *tensors: Tensor) -> Ready | None:
        """The launch of these tensors, to be queued again with others that differ only in where they are.

        Its calls take addresses that nobody looks at any more, of its own ``names``. None where there is nothing to do.

        Raises:
          JkvError: as :meth:`launch`.
        """
        function, grid = self._plan((*sizes.items(), *map(_FORM, tensors)), sizes, tensors)
        self._refuse_memory(tensors)
        if function is None:
            return None
        arguments = enumerate(argument.name for argument in self.kernel.arguments)
        addresses = self._arrange((*map(Tensor.data_ptr, tensors), *self._fixed))
        return Ready(function, grid, addresses, {at: name for at, name in arguments if name not in self._bound}, self)

    def elements(self, name: str, sizes: Mapping[str, int]) -> int:
        """How many elements of an argument a launch reads or writes."""
        return self._arguments[name].elements.of(sizes)

    def empty(self, name: str, sizes: Mapping[str, int]) -> Tensor:
        """Memory for a result, without a shape."""
        dtype = getattr(torch, self._arguments[name].dtype)
        return torch.empty(self.elements(name, sizes), dtype=dtype, device=self.device)

    def _order(self) -> None:
        """Where every pointer of the kernel comes from: tensors of a launch, then those that are bound."""
        self.names = tuple(name for name in self._arguments if name not in self._bound)
        fixed = tuple(self._bound)
        places = {name: at for at, name in enumerate((*self.names, *fixed))}
        order = [places[argument.name] for argument in self.kernel.arguments]
        self._fixed = tuple(self._bound[name].data_ptr() for name in fixed)
        # With one index itemgetter gives no tuple; kernels have more.
        self._arrange = operator.itemgetter(*order)
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def _plan(self, form: tuple[Any, ...], sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> Plan:
        """The checks of a form of operands, and how it is launched."""
        if len(tensors) != len(self.names):
            raise JkvError(
                f"{self.kernel.op!r} takes {len(self.names)} tensors, not {len(tensors)}: {', '.join(self.names)}"
            )
        for name, tensor in zip(self.names, tensors, strict=True):
            self._check(self._arguments[name], tensor, sizes)
        for name, tensor in self._bound.items():
            self._check(self._arguments[name], tensor, sizes)
        number = self._chosen(sizes)
        try:
            x, y, z = (extent.of(sizes) for extent in self.kernel.variants[number].grid)
        except KeyError as error:
            raise JkvError(
                f"sizes {dict(sizes)} lack {error}, which the grid of {self.kernel.op!r} depends on"
            ) from None
        for argument in self.kernel.arguments:
            for name in argument.elements.sizes:
                if name not in sizes:
                    raise JkvError(
                        f"sizes {dict(sizes)} lack {name!r}, which {argument.name} of {self.kernel.op!r} depends on"
                    )
        if max(y, z) > _MOST:
            raise JkvError(f"{self.kernel.op!r} with sizes {dict(sizes)} is a grid of {(x, y, z)}, more than a GPU has")
        plan = (self._functions[number] if x * y * z else None, (x, y, z))
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        self._plans[form] = plan
        return plan

    def _chosen(self, sizes: Mapping[str, int]) -> int:
        """The first variant whose limits allow these sizes."""
        for number, variant in enumerate(self.kernel.variants):
            if _within(sizes, variant.limits):
                return number
        shown = ", ".join(f"{name} up to {limit}" for name, limit in self.kernel.variants[-1].limits.items())
        raise JkvError(f"{self.kernel.op!r} does not take sizes {dict(sizes)}; it takes {shown}")

    def _check(self, argument: Argument, tensor: Tensor, sizes: Mapping[str, int]) -> None:
        dtype = getattr(torch, argument.dtype)
        allowed = (dtype, torch.int32) if dtype == torch.uint32 else (dtype,)
        if tensor.dtype not in allowed:
            raise self._unfit(argument, f"is {tensor.dtype}", f"it must be {dtype}")
        if tensor.device != self.device:
            raise self._unfit(argument, f"is on {tensor.device}", f"it must be on {self.device}")
        if not tensor.is_contiguous():
            raise self._unfit(argument, f"has strides {tensor.stride()}", "it must be contiguous")
        least, exact = _known(argument.elements, sizes)
        if tensor.numel() != least if exact else tensor.numel() % least:
            wanted = f"{least}" if exact else f"a multiple of {least}"
            raise self._unfit(
                argument, f"of shape {tuple(tensor.shape)} has {tensor.numel()} elements", f"it must have {wanted}"
            )

    def _refuse_memory(self, tensors: Sequence[Tensor]) -> None:
        for name, tensor in zip(self.names, tensors, strict=True):
            self._check(self._arguments[name], tensor, {})
            if tensor.data_ptr() % ALIGNMENT:
                raise self._misaligned(name, tensor)

    def _misaligned(self, name: str, tensor: Tensor) -> JkvError:
        return self._unfit(
            self._arguments[name], f"starts at address {tensor.data_ptr():#x}", f"it must be a multiple of {ALIGNMENT}"
        )

    def _unfit(self, argument: Argument, what: str, wanted: str) -> JkvError:
        return JkvError(f"{argument.name} of {self.kernel.op!r} {what}; {wanted}")


def _known(extent: Extent, sizes: Mapping[str, int]) -> tuple[int, bool]:
    """How many elements there are of what is known; whether that is all of them."""
    there = tuple(name for name in extent.sizes if name in sizes)
    return Extent(extent.factor, there, extent.divisor).of(sizes), len(there) == len(extent.sizes)


def _within(sizes: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    return all(sizes.get(name, 0) <= limit for name, limit in limits.items())

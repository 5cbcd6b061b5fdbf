"""Where the operands of a launch come from: followed back through a trace, so that nobody has to list them twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

# What passes elements on as they lie in memory.
_VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p")
_CALLS = ("pjit", "jit", "closed_call")


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand or result of a launch. ``name`` is the argument (or result) that it is a view of; ``value`` is a
    constant's. Neither is known of what was computed on the way."""

    name: str | None
    value: np.ndarray | None
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The one launch of a function: its grid, operands, results, and which operand a result is written over."""

    grid: tuple[int, ...]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    aliases: Mapping[int, int]


def launch_of(function: Callable[..., Any], named: Mapping[str, Any]) -> Launch:
    """The launch inside ``function(named)``, which maps names of arrays to names of results.

    Raises:
      ValueError: unless there is exactly one.
    """
    traced = jax.jit(function).trace(dict(named))
    inputs = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(dict(named))]
    outputs = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
    walk = _Walk()
    closed = traced.jaxpr
    results = walk.run(closed.jaxpr, closed.consts, inputs)
    if walk.found is None:
        raise ValueError("there is no launch to describe")
    names = {position: name for name, position in zip(outputs, results, strict=True) if isinstance(position, int)}
    equation, operands = walk.found
    grid = tuple(equation.params["grid_mapping"].grid)
    made = tuple(
        Operand(names.get(i), None, np.dtype(v.aval.dtype), v.aval.shape) for i, v in enumerate(equation.outvars)
    )
    return Launch(grid, operands, made, dict(equation.params["input_output_aliases"]))


class _Walk:
    """Origins of variables: the name of an input, a constant, the position of a result, or None."""

    def __init__(self) -> None:
        self.found: tuple[Any, tuple[Operand, ...]] | None = None

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        origin: dict[Any, Any] = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        origin |= zip(jaxpr.invars, inputs, strict=True)

        def of(atom: Any) -> Any:
            return np.asarray(atom.val) if isinstance(atom, Literal) else origin.get(atom)

        for equation in jaxpr.eqns:
            name, sources = equation.primitive.name, [of(atom) for atom in equation.invars]
            if name == "pallas_call":
                self._launch(equation, sources)
                origin |= {v: i for i, v in enumerate(equation.outvars)}
            elif name in _CALLS:
                inner = equation.params["jaxpr"]
                origin |= zip(equation.outvars, self.run(inner.jaxpr, inner.consts, sources), strict=True)
            elif name in _VIEWS and equation.invars[0].aval.size == equation.outvars[0].aval.size:
                origin[equation.outvars[0]] = sources[0]
        return [of(atom) for atom in jaxpr.outvars]

    def _launch(self, equation: Any, sources: list[Any]) -> None:
        if self.found is not None:
            raise ValueError("there is more than one launch to describe")
        operands = (
            Operand(
                source if isinstance(source, str) else None,
                source if isinstance(source, np.ndarray) else None,
                np.dtype(atom.aval.dtype),
                atom.aval.shape,
            )
            for source, atom in zip(sources, equation.invars, strict=True)
        )
        self.found = equation, tuple(operands)

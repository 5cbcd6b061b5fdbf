"""One operation as an entry of a bundle: its texts, and how to launch them for sizes that are not known yet."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from jkv import page as pages
from pallas_kernels import build, compat
from pallas_kernels.bundle.facts import Attention, Facts, Reading, Writing, layout_digest
from pallas_kernels.bundle.format import Argument, Extent, Kernel, Role, Variant
from pallas_kernels.bundle.ops import parts_of
from pallas_kernels.bundle.origins import Launch, Operand, launch_of
from pallas_kernels.bundle.parts import PRIMES, Part, scheme_of
from pallas_kernels.lowered import Lowered

_TOKENS_A_PROGRAM = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Made:
    """A kernel, and what its entry names: texts by file, and tables."""

    kernel: Kernel
    texts: Mapping[str, Lowered]
    tables: Mapping[str, np.ndarray]


def make(op: str, facts: Facts, target: str) -> Made:
    """Lower one operation for a target.

    Raises:
      JkvError: for facts that the scheme or its kernels do not allow, or an unknown target.
    """
    platform = build.platform_of(target)
    parts = parts_of(op, facts, target)
    # The last one has no limits, or the widest ones: there every size is its prime.
    launch = launch_of(parts[-1].function, parts[-1].arrays)
    arguments, tables = _arguments(parts[-1], launch)
    texts: dict[str, Lowered] = {}
    variants: dict[str, Variant] = {}
    for part in reversed(parts):
        (lowered,) = compat.lower(part.function, part.arrays, platform=platform)
        file = f"ir/{op}-{_digest(lowered.text.encode())}.ttir"
        x, y, z = map(_extent, lowered.grid)
        texts[file] = lowered
        # A text with limits that is also the one without them is not needed.
        variants.setdefault(
            file, Variant(file, (x, y, z), lowered.num_warps, lowered.num_stages, limits=dict(part.limits))
        )
    kernel = Kernel(
        op=op,
        name=lowered.name,
        targets=(target,),
        facts=dataclasses.asdict(facts),
        layout=_layout(facts),
        arguments=arguments,
        variants=tuple(variants.values())[::-1],
    )
    return Made(kernel, texts, tables)


def _layout(facts: Facts) -> str:
    """The digest of the pages that a kernel reads or writes; empty where it has none."""
    if isinstance(facts, Attention | Writing | Reading):
        return layout_digest(pages.layout(scheme_of(facts), facts.head_dim))
    return ""


def _arguments(part: Part, launch: Launch) -> tuple[tuple[Argument, ...], dict[str, np.ndarray]]:
    """The pointers of a launch in order, operands and then results, and the tables among them."""
    computed, dropped = iter(part.computed), iter(part.dropped)
    tables: dict[str, np.ndarray] = {}
    names: list[str] = []
    roles: list[Role] = []
    for operand in launch.operands:
        name, role = operand.name or "sizes", "in"
        if operand.value is not None and not _is_sizes(operand):
            name, role = f"table-{_digest(operand.value.tobytes() + str(operand.value.dtype).encode())}", "table"
            tables[name] = operand.value
        elif operand.name is None and operand.value is None:
            name = next(computed)
        names.append(name)
        roles.append(role)  # type: ignore[arg-type]
    for before, after in launch.aliases.items():
        assert names[before] == launch.results[after].name, "what is updated in place has one name"
        roles[before] = "inout"
    for position, result in enumerate(launch.results):
        names.append(result.name or next(dropped))
        roles.append("inout" if position in launch.aliases.values() else "out")
    assert next(computed, None) is None and next(dropped, None) is None, "every name belongs to something"
    arrays = _dtypes_and_elements((*launch.operands, *launch.results))
    return tuple(Argument(n, d, e, r) for n, (d, e), r in zip(names, arrays, roles, strict=True)), tables


def _dtypes_and_elements(arrays: Iterable[Operand]) -> Iterator[tuple[str, Extent]]:
    for array in arrays:
        yield array.dtype.name, _extent(array.elements)


def _is_sizes(operand: Operand) -> bool:
    """Whether a constant is the operand of sizes, which holds those that kernels are lowered with."""
    value = operand.value
    return value is not None and value.dtype == np.int32 and bool(np.isin(value, [*PRIMES.values()]).any())


def _extent(number: int) -> Extent:
    """A number as sizes have made it."""
    for divisor in _TOKENS_A_PROGRAM[1:]:
        if number == -(-PRIMES["tokens"] // divisor):
            return Extent(1, ("tokens",), divisor)
    sizes: list[str] = []
    for name, prime in PRIMES.items():
        while number % prime == 0:
            sizes.append(name)
            number //= prime
    return Extent(number, tuple(sizes))


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]

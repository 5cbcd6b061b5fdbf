"""How much BF16 memory stands beside an engine's pages, and for what there is none.

Needs nothing: commands ask before torch is installed.
"""

from __future__ import annotations

from jkv.errors import JkvError
from jkv.units import PAGE_TOKENS, Windows


def check_windows(windows: Windows, spec: str) -> None:
    """Refuse windows that an engine has no memory for.

    Raises:
      JkvError: naming the window.
    """
    for name in ("sink", "recent"):
        if getattr(windows, name):
            raise JkvError(
                f"{name}={getattr(windows, name)} in {spec!r} cannot be served by vLLM, which has no memory for it "
                f"beside its pages; leave {name} out"
            )


def slots_for(rows: int) -> int:
    """Slots for ``rows`` running requests: those of some that ended may be younger than that of one that waits."""
    return rows + max(16, rows // 8)


def places_for(rows: int, depth: int) -> int:
    """BF16 pages of ``depth`` a slot, and those that take what padding writes."""
    return (slots_for(rows) + 1) * depth


def waiting_bytes(rows: int, depth: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one layer's BF16 pages, K and V."""
    return places_for(rows, depth) * num_kv_heads * PAGE_TOKENS * head_dim * 2 * 2

"""What some models ask of attention beyond softmax(q k) v, for JAX and torch alike; imports neither."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jkv.errors import JkvError

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention layer. JAX has them as a pytree (:mod:`pallas_kernels.options`), static but for one.

    ``softcap`` c turns a score s into ``c tanh(s / c)``. ``window`` w lets a query at position p see positions
    ``p - w + 1 .. p`` only. ``sink_logits: [Hq]`` (an array or a tensor) is one learned logit a query head that takes
    part in the softmax and has no value. ``scale`` multiplies scores; None is ``head_dim ** -0.5``.
    """

    softcap: float | None = None
    window: int | None = None
    sink_logits: Any = None
    scale: float | None = None

    def score_scale(self, head_dim: int) -> float:
        """What multiplies ``q . k``."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def query_factor(self, head_dim: int) -> float:
        """What prepared query copies are multiplied by: scores are base 2, and capped ones get log2(e) afterwards."""
        return self.score_scale(head_dim) * (1.0 if self.softcap else LOG2_E)


class _Centred(Protocol):
    @property
    def spec(self) -> str: ...

    @property
    def center(self) -> Any: ...


def check_range(options: AttentionOptions) -> None:
    """Refuse options that are out of range.

    Raises:
      JkvError: naming the option.
    """
    for name in ("softcap", "scale", "window"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise JkvError(f"{name}={value} is not allowed; {name} must be above 0, or None")


def check_center(options: AttentionOptions, scheme: _Centred) -> None:
    """Refuse options that the keys of a scheme, or of its description, do not allow.

    Raises:
      JkvError: naming the option and the scheme.
    """
    for name in ("softcap", "sink_logits"):
        if getattr(options, name) is not None and scheme.center != "off":
            raise JkvError(
                f"{name} is not possible with scheme {scheme.spec!r}: centring keys moves all scores of a query by "
                f"one number, and {name} does not ignore that; use center=off"
            )

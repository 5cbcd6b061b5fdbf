"""What some models ask of attention beyond softmax(q k) v: :mod:`pallas_kernels.options` for torch."""

from __future__ import annotations

import dataclasses

from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention layer.

    ``softcap`` c turns a score s into ``c tanh(s / c)``. ``window`` w lets a query at position p see positions
    ``p - w + 1 .. p`` only. ``sink_logits: [Hq]`` is one learned logit a query head that takes part in the softmax and
    has no value. ``scale`` multiplies scores; None is ``head_dim ** -0.5``.
    """

    softcap: float | None = None
    window: int | None = None
    sink_logits: Tensor | None = None
    scale: float | None = None

    def score_scale(self, head_dim: int) -> float:
        """What multiplies ``q . k``."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def query_factor(self, head_dim: int) -> float:
        """What prepared query copies are multiplied by: scores are base 2, and capped ones get log2(e) afterwards."""
        return self.score_scale(head_dim) * (1.0 if self.softcap else LOG2_E)

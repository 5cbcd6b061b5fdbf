"""Options of attention as a pytree, and what the kernels refuse of them."""

from __future__ import annotations

import jax

from jkv.core import Scheme
from jkv.errors import JkvError
from jkv.options import LOG2_E as LOG2_E
from jkv.options import AttentionOptions as AttentionOptions
from jkv.options import check_center, check_range

jax.tree_util.register_dataclass(
    AttentionOptions, data_fields=["sink_logits"], meta_fields=["softcap", "window", "scale"]
)


def check_options(options: AttentionOptions, scheme: Scheme, num_q_heads: int) -> None:
    """Refuse options that are out of range, or that the scheme's keys do not allow.

    Raises:
      JkvError: naming the option and, where that is the reason, the scheme.
    """
    check_range(options)
    logits = options.sink_logits
    if logits is not None and tuple(logits.shape) != (num_q_heads,):
        raise JkvError(
            f"sink_logits of shape {tuple(logits.shape)} do not fit; give one a query head, ({num_q_heads},)"
        )
    check_center(options, scheme)

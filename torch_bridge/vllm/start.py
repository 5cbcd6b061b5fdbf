"""What happens to a configuration that asks for jkv, in the process that the user started."""

from __future__ import annotations

from typing import Any

from jkv.errors import JkvError
from torch_bridge.vllm.config import check_config
from torch_bridge.vllm.versions import adapter_name


def prepare(config: Any) -> None:
    """Check a ``VllmConfig`` and have it use jkv's backend.

    Raises:
      JkvError: naming the option that cannot be served.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    adapter_name(vllm.__version__)
    check_config(config)
    if current_platform.is_cpu():
        return
    chosen = config.attention_config.backend
    if chosen not in (None, AttentionBackendEnum.CUSTOM):
        raise JkvError(f"attention_backend={chosen.name} is not allowed with jkv; use CUSTOM, or leave it out")
    config.attention_config.backend = AttentionBackendEnum.CUSTOM

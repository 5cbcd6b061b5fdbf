"""Methods for a worker of a server (``--worker-extension-cls``): what jkv did there."""

from __future__ import annotations

from typing import Any


class Counts:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def jkv_counts(self) -> dict[str, Any]:
        """Calls of every layer, and the state of slots."""
        runner = self.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context
        served = [getattr(layer.impl, "served", None) for layer in layers.values()]
        # One a format and KV cache group.
        builders = [group.get_metadata_builder() for groups in runner.attn_groups for group in groups]
        slots = [builder.slots for builder in builders if getattr(builder, "slots", None) is not None]
        return {
            "served": sum(x is not None for x in served),
            "layers": len(served),
            "writes": sorted({x.writes for x in served if x is not None}),
            "reads": sorted({x.reads for x in served if x is not None}),
            "nonfinite": sum(int(x.nonfinite) for x in served if x is not None),
            "lost": [int(x.lost) for x in slots],
            "owned": [int((x.owner >= 0).sum()) for x in slots],
            "places": [x.places for x in slots],
        }

"""Calibration arrays of every layer of a model, checked against it, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jkv.calibration import Calibration, bind, check_model
from jkv.models.load import Model
from jkv.plan import Plan


def check_calibration(model: Model, calibration: Calibration | None) -> None:
    """Refuse a calibration that was made for another model; None is no calibration.

    Raises:
      JkvError: with both sides named.
    """
    config = model.config
    if calibration is not None:
        check_model(
            calibration,
            fingerprint=model.fingerprint,
            name=model.name,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )


def bind_layers(plan: Plan, model: Model, calibration: Calibration | None) -> list[Any]:
    """What the cache functions take as ``calib``: one entry a layer, leaves ``[num_kv_heads, ...]``.

    Raises:
      JkvError: for a calibration that lacks what a layer's scheme needs.
    """
    heads, head_dim = model.config.num_kv_heads, model.config.head_dim
    layers = enumerate(plan.layers)
    return [jax.tree.map(jnp.asarray, bind(part, calibration, layer, heads, head_dim)) for layer, part in layers]

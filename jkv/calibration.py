"""The calibration file: what was measured on calibration text, for one model, in one self-describing safetensors file.

Arrays (L layers, H KV heads, D channels, S segments, N stored queries per KV head):

=====================  ==============  =========================================================================
``mean``               [L, H, D]       mean key after RoPE
``w``                  [L, H, D, D]    ``E[q q^T]`` over the queries that read this KV head
``queries``, ``logz``  [L, H, N, (D)]  stored queries (float16) and the log of their softmax denominators
``k_absmax``           [L, H]          largest magnitude of raw keys; ``v_absmax`` of values
``k_reach``            [L, H]          the same over raw, centred and rotated keys; ``v_reach`` over rotated values
``mean_before_rope``   [L, H, D]       mean key with RoPE taken off again
``rope_frequencies``   [L, D / 2]      radians per position of each channel pair
``levels/...``         [L, 16]         Lloyd-Max tables fitted per layer, ``levels_mse/...`` [L, 3] what they gain
``choice/SPEC``        [L, H, S + 1]   fixed rotation choices decided for that scheme
``center/SPEC``        [L]             whether centering helps that scheme in that layer
=====================  ==============  =========================================================================

Nothing here needs JAX, so a process that serves without it reads the same file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jkv.errors import JkvError
from jkv.units import SEGMENT

FORMAT = "jkv-calibration"  # the one metadata entry: several would be written in random order
VERSION = 1
_META_KEYS = ("model", "fingerprint", "num_layers", "num_heads", "num_kv_heads", "head_dim", "text_sha256", "tokens")
_ARRAYS = ("mean", "w", "queries", "logz", "k_absmax", "v_absmax", "k_reach", "v_reach")


class Bindable(Protocol):
    """What a calibration looks at of a scheme: :class:`jkv.core.Scheme`, or a plain description of one."""

    @property
    def spec(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def k_needs(self) -> frozenset[str]: ...
    @property
    def v_needs(self) -> frozenset[str]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def v_options(self) -> Mapping[str, Any] | None: ...
    @property
    def tables(self) -> Callable[[int], Mapping[str, Mapping[str, Any]]]: ...
    @property
    def mix(self) -> tuple[tuple[str, Bindable], ...]: ...


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured arrays by name, and where they come from."""

    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return self.meta["num_layers"]

    @property
    def head_dim(self) -> int:
        return self.meta["head_dim"]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; a file that is there already is replaced only when the new one is complete."""
        from safetensors.numpy import save_file

        target = Path(path)
        if not target.parent.is_dir():
            raise JkvError(f"output={str(target)!r}: folder {str(target.parent)!r} does not exist")
        arrays = {key: np.ascontiguousarray(a) for key, a in sorted(self.arrays.items())}
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
        os.close(handle)
        try:
            save_file(arrays, name, metadata={FORMAT: json.dumps(self.meta, sort_keys=True)})
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return target


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file.

    Raises:
      JkvError: where the file is missing, truncated, not a calibration, or of a newer format.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise JkvError(f"calib={str(file)!r}: no such file; make one with `jkv calibrate MODEL -o {file.name}`")
    try:
        with safe_open(str(file), framework="np") as opened:
            header = opened.metadata() or {}
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise JkvError(f"calib={str(file)!r} is damaged or no safetensors file: {error}") from None
    if FORMAT not in header:
        raise JkvError(f"calib={str(file)!r} is a safetensors file but no jkv calibration")
    try:
        meta = json.loads(header[FORMAT])
    except ValueError as error:
        raise JkvError(f"calib={str(file)!r} has a damaged header: {error}") from None
    if meta.get("version", 0) > VERSION:
        raise JkvError(
            f"calib={str(file)!r} has format version {meta['version']}; this jkv reads up to {VERSION}: "
            "upgrade jkv-cache"
        )
    missing = [key for key in _META_KEYS if key not in meta]
    if missing:
        raise JkvError(f"calib={str(file)!r} lacks {', '.join(missing)} in its header")
    absent = [key for key in _ARRAYS if key not in arrays]
    if absent:
        raise JkvError(f"calib={str(file)!r} lacks the arrays {', '.join(absent)}")
    return Calibration(arrays, meta)


def decision_key(scheme: Bindable) -> str:
    """The spec of the scheme's keys without its windows: what decisions, which concern keys alone, are filed under."""
    name, _, tail = scheme.spec.split(";")[0].split("/")[0].partition(":")
    window = ("tail=", "sink=", "recent=", "boundary=")
    kept = [part for part in tail.split(",") if part and not part.startswith(window)]
    return name + (":" + ",".join(kept) if kept else "")


def check_model(
    calibration: Calibration, *, fingerprint: str, name: str, num_layers: int, num_kv_heads: int, head_dim: int
) -> None:
    """Refuse a calibration made for another model.

    Raises:
      JkvError: with both sides named.
    """
    meta = calibration.meta
    shape = (meta["num_layers"], meta["num_kv_heads"], meta["head_dim"])
    if shape != (num_layers, num_kv_heads, head_dim):
        raise JkvError(
            f"this calibration is for {meta['model']} with (layers, KV heads, head_dim) = {shape}, but the model "
            f"{name} has {(num_layers, num_kv_heads, head_dim)}"
        )
    if meta["fingerprint"] != fingerprint:
        raise JkvError(
            f"this calibration was made on {meta['model']} (weights {meta['fingerprint'][:12]}), but the model in use "
            f"is {name} (weights {fingerprint[:12]}); calibrate again with `jkv calibrate`"
        )


def check_scheme(calibration: Calibration | None, scheme: Bindable) -> None:
    """Refuse a scheme whose needs the calibration does not meet.

    Raises:
      JkvError: naming the scheme, what it needs, and what the calibration holds.
    """
    for _, part in scheme.mix:
        check_scheme(calibration, part)
    if not scheme.needs:
        return
    if calibration is None:
        raise JkvError(
            f"scheme {scheme.spec!r} needs a calibration ({', '.join(sorted(scheme.needs))}); make one with "
            "`jkv calibrate MODEL --text FILE -o calib.safetensors`"
        )
    key = decision_key(scheme)
    decided = {"choice", "center"}
    for need in sorted(scheme.needs):
        wanted = f"{need}/{key}" if need in decided else _ENTRY.get(need, need)
        if wanted not in calibration.arrays:
            made = sorted({name.split("/", 1)[1] for name in calibration.arrays if name.split("/")[0] in decided})
            raise JkvError(
                f"scheme {scheme.spec!r} needs {need!r} of its calibration, and this one (for "
                f"{calibration.meta['model']}) has decided only for: {', '.join(made) or 'no scheme'}; "
                f"calibrate again with --scheme {key}"
            )


_ENTRY = {"absmax": "k_absmax", "levels": "levels/k_token", "rope": "rope_frequencies"}


def multiplier(reach: np.ndarray) -> np.ndarray:
    """The power of two that puts the largest magnitude seen between 64 and 128 of E4M3's 448: room above, 13 octaves
    of normal numbers below."""
    safe = np.where(reach > 0, reach, 1.0)
    return np.exp2(np.ceil(np.log2(safe / 128.0))).astype(np.float32)


def _root(w: np.ndarray) -> np.ndarray:
    """Symmetric square root of positive semidefinite ``[..., D, D]``."""
    value, vector = np.linalg.eigh(w.astype(np.float64))
    scaled = vector * np.sqrt(np.maximum(value, 0.0))[..., None, :]
    return (scaled @ np.swapaxes(vector, -1, -2)).astype(np.float32)


def _levels(
    calibration: Calibration, layer: int, side: str, options: Mapping[str, Any], default: np.ndarray
) -> np.ndarray:
    """The fitted table where this layer is among the worst ``refit`` fraction and the fit held on unseen tokens."""
    name = f"{side}_{options['scaling']}"
    mse = calibration.arrays[f"levels_mse/{name}"]  # [L, 3]: theory, then theory and fit on held-out tokens
    count = int(np.ceil(options["refit"] * len(mse)))
    chosen = np.argsort(-mse[:, 0], kind="stable")[:count]
    accepted = layer in chosen and mse[layer, 2] < mse[layer, 1]
    return calibration.arrays[f"levels/{name}"][layer].astype(np.float32) if accepted else np.asarray(default)


def bind(
    scheme: Bindable, calibration: Calibration | None, layer: int, num_kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """The arrays that ``scheme``'s codecs read in one layer: ``{"k": {...}, "v": {...}}``, each leaf ``[H, ...]``.

    Without a calibration every array has its default. vmap the codecs over the first axis.

    Raises:
      JkvError: where the scheme needs what the calibration does not hold (:func:`check_scheme`).
    """
    check_scheme(calibration, scheme)
    tables = scheme.tables(head_dim)
    bound: dict[str, dict[str, np.ndarray]] = {}
    for side, table in tables.items():
        entries = {key: np.broadcast_to(np.asarray(a), (num_kv_heads, *np.shape(a))) for key, a in table.items()}
        if calibration is not None:
            entries |= _calibrated(scheme, calibration, layer, side, entries)
        bound[side] = entries
    return bound


def _calibrated(
    scheme: Bindable, calibration: Calibration, layer: int, side: str, entries: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    arrays, needs = calibration.arrays, scheme.k_needs if side == "k" else scheme.v_needs
    options = scheme.options if side == "k" or scheme.v_options is None else scheme.v_options
    new: dict[str, np.ndarray] = {}
    for key in ("scale_mult", "zero_mult"):
        if key in entries:
            new[key] = multiplier(arrays[f"{side}_reach"][layer])
    if "mean" in entries:
        on = arrays[f"center/{decision_key(scheme)}"][layer] if "center" in needs else True
        new["mean"] = arrays["mean"][layer] * np.float32(on)
    if "fp8_scale" in entries:
        largest = arrays[f"{side}_absmax"][layer]
        largest = largest if options["scale"] == "head" else np.full_like(largest, largest.max())
        new["fp8_scale"] = np.where(largest > 0, largest / 448.0, 1.0).astype(np.float32)
        new["fp8_inverse"] = (1.0 / new["fp8_scale"]).astype(np.float32)
    if "levels" in entries and "levels" in needs:
        fitted = _levels(calibration, layer, side, options, entries["levels"][0])
        new["levels"] = np.broadcast_to(fitted, entries["levels"].shape)
    if "w" in needs:
        new["w_root"] = _root(arrays["w"][layer])
    if "queries" in needs:
        queries = arrays["queries"][layer]
        new["queries"] = queries
        new["logz"] = arrays["logz"][layer]
        if "mean" in new:  # codecs see centred keys: the denominators lose the same shift
            shift = np.einsum("hnd,hd->hn", queries.astype(np.float32), new["mean"])
            new["logz"] = new["logz"] - shift * calibration.head_dim**-0.5
    if "rope" in needs:
        from jkv.evaluate.rotatekv import channel_order, heads_together  # evaluation only, and it needs JAX

        before = arrays["mean_before_rope"][layer]
        new["channel_order"] = np.repeat(channel_order(before), heads_together(len(before)), axis=0)
        new["rope_frequencies"] = np.broadcast_to(
            arrays["rope_frequencies"][layer], (len(before), calibration.head_dim // 2)
        )
    if "choice" in needs:
        new["choice"] = arrays[f"choice/{decision_key(scheme)}"][layer]
        assert new["choice"].shape[-1] == calibration.head_dim // SEGMENT + 1
    return new

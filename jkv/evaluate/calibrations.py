"""The calibration a comparison runs with: the user's file, or one made on the shipped text and kept for next time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence

from jkv import texts
from jkv._version import __version__
from jkv.binding import check_calibration
from jkv.calibrate import DEFAULT_QUERIES, calibrate
from jkv.calibration import Calibration, check_scheme, decision_key, load
from jkv.core import Scheme
from jkv.errors import JkvError
from jkv.models.demo import default_cache_dir
from jkv.models.load import Model
from jkv.plan import components

SEQUENCES, TOKENS = 4, 2048


def calibration_for(
    model: Model,
    schemes: Sequence[Scheme],
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    only_needed: bool = False,
) -> Calibration | None:
    """Load ``path``, or calibrate ``model`` on the shipped text (4 x 2048 tokens) for what ``schemes`` need.

    None where the schemes read nothing that a calibration would change; with ``only_needed``, also where they can run
    without one. Without a path the result is kept in the user's cache directory under the model's fingerprint and the
    schemes, and read from there the next time; a damaged copy is made again.

    Raises:
      JkvError: for a file that is damaged, was made for another model, or lacks what a scheme needs; for a model
        without a tokenizer.
    """
    if path is not None:
        given = load(path)
        check_calibration(model, given)
        for scheme in schemes:
            check_scheme(given, scheme)
        return given
    if not any(scheme.needs if only_needed else _reads_calibration(scheme) for scheme in schemes):
        return None
    parts = list(dict.fromkeys(part for scheme in schemes for part in components(scheme)))
    decided = sorted({decision_key(s) for s in parts if s.needs & {"choice", "center", "levels"}})
    what = json.dumps([__version__, model.fingerprint, decided, SEQUENCES, TOKENS, DEFAULT_QUERIES])
    kept = default_cache_dir() / f"calibration-{hashlib.sha256(what.encode()).hexdigest()[:16]}.safetensors"
    if kept.is_file():
        try:
            return load(kept)
        except JkvError:
            pass  # a damaged copy in our own cache is simply made again
    if model.tokenizer is None:
        raise JkvError(f"the model {model.name} has no tokenizer, so text cannot calibrate it; give --calib FILE")
    length = min(TOKENS, model.config.max_position_embeddings // 32 * 32)
    ids, _ = texts.sequences(model.tokenizer, {"calibration": texts.calibration_text()}, SEQUENCES, length)
    made = calibrate(model, ids, [s for s in parts if decision_key(s) in decided], progress=progress)
    kept.parent.mkdir(parents=True, exist_ok=True)
    made.save(kept)
    return made


def _reads_calibration(scheme: Scheme) -> bool:
    """Whether any part of the scheme reads an array that a calibration sets."""
    set_by_calibration = {"scale_mult", "zero_mult", "mean", "fp8_scale"}
    tables = [table for part in components(scheme) for table in part.tables(64).values()]
    return bool(scheme.needs) or any(set_by_calibration & table.keys() for table in tables)

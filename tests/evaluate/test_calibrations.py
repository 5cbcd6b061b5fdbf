"""The calibration behind a comparison: only where something reads it, kept once made, made again when damaged."""

import dataclasses

import pytest

from jkv.errors import JkvError
from jkv.evaluate import calibrations
from jkv.evaluate.calibrations import calibration_for
from jkv.models import Model, random_decoder
from jkv.registry import parse
from tests.models.checkpoints import TINY


@pytest.fixture
def model(monkeypatch, tmp_path) -> Model:
    monkeypatch.setattr(calibrations, "default_cache_dir", lambda: tmp_path / "kept")
    monkeypatch.setattr(calibrations, "TOKENS", 64)
    monkeypatch.setattr(calibrations, "SEQUENCES", 2)
    config = dataclasses.replace(TINY, head_dim=32, num_layers=2, max_position_embeddings=256)
    return Model(random_decoder(config, seed=1, scale=0.3), config, Bytes(), "f" * 64, "tiny")


class Bytes:
    """Ids below the tiny vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [byte % TINY.vocab_size for byte in text.encode()]


def test_schemes_that_read_nothing_get_none(model):
    assert calibration_for(model, [parse("bf16"), parse("fp8"), parse("ultraquant")]) is None
    assert calibration_for(model, [parse("kivi")], only_needed=True) is None


def test_it_is_kept_and_a_damaged_copy_is_made_again(model, tmp_path, monkeypatch):
    schemes = [parse("kivi:bits=2"), parse("flagrot-kivi:bits=2,mode=fixed")]
    first = calibration_for(model, schemes)
    (kept,) = (tmp_path / "kept").iterdir()
    assert "choice/flagrot-kivi:bits=2,mode=fixed" in first.arrays
    monkeypatch.setattr(calibrations, "calibrate", None)  # may not be called
    again = calibration_for(model, schemes)
    assert again.meta == first.meta
    monkeypatch.undo()
    monkeypatch.setattr(calibrations, "default_cache_dir", lambda: tmp_path / "kept")
    monkeypatch.setattr(calibrations, "TOKENS", 64)
    monkeypatch.setattr(calibrations, "SEQUENCES", 2)
    kept.write_bytes(kept.read_bytes()[:1000])
    assert calibration_for(model, schemes).meta == first.meta


def test_a_file_for_another_model_is_refused(model, tmp_path):
    path = calibration_for(model, [parse("kivi:bits=2")]).save(tmp_path / "calib.safetensors")
    other = dataclasses.replace(model, fingerprint="e" * 64, name="another")
    with pytest.raises(JkvError, match=r"made on tiny .*but the model in use is another"):
        calibration_for(other, [parse("kivi:bits=2")], path)


def test_text_needs_a_tokenizer(model):
    bare = dataclasses.replace(model, tokenizer=None, fingerprint="d" * 64)
    with pytest.raises(JkvError, match="has no tokenizer"):
        calibration_for(bare, [parse("kivi:bits=2")])

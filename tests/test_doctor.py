"""The doctor's report: complete, JSON-safe, right about what is missing, and never an exception."""

import io
import json
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from jkv import doctor
from jkv.models import demo


def shown(found: dict) -> str:
    out = io.StringIO()
    doctor.render(found, Console(file=out, width=200))
    return out.getvalue()


@pytest.fixture
def versions(monkeypatch):
    """Pretend that these versions are installed; None is a missing package."""

    def pretend(**wanted):
        real, importable = doctor._version, doctor._importable
        monkeypatch.setattr(doctor, "_version", lambda name: wanted[name] if name in wanted else real(name))
        monkeypatch.setattr(doctor, "_importable", lambda name: name not in wanted and importable(name))

    return pretend


def test_the_report_survives_json_and_names_this_machine():
    found = doctor.report()
    assert json.loads(json.dumps(found)) == found
    assert found["devices"][0]["platform"] == jax.devices()[0].platform
    assert {p["name"]: p["version"] for p in found["packages"]}["jax"] == jax.__version__
    assert shown(found).count("jax") >= 2


def test_supported_ranges_are_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert declared == {r.name: r.specifier for r in (Requirement(n + v) for n, v in doctor.REQUIRED.items())}
    assert project["requires-python"] == doctor.PYTHON


@pytest.mark.parametrize("version, ok", [("0.10.2", True), ("0.12.9", True), ("0.13.0", False), ("0.9.0", False)])
def test_a_version_outside_the_range_is_a_problem_with_its_cure(versions, version, ok):
    versions(jax=version)
    found = doctor.report()
    complaints = [p for p in found["problems"] if p.startswith(f"jax {version} is outside >=0.10.2,<0.13")]
    assert bool(complaints) is not ok
    assert all("pip install 'jax>=0.10.2,<0.13'" in c for c in complaints)
    assert ok or (not found["ok"] and complaints[0] in shown(found))


def test_a_missing_dependency_is_a_problem_a_missing_option_is_not(versions):
    before = doctor.report()["problems"]
    versions(gguf=None, torch=None, triton=None, vllm=None, transformers=None)
    found = doctor.report()
    assert [p for p in found["problems"] if p not in before] == ["gguf is missing: pip install 'gguf>=0.17'"]
    cures = {p["name"]: p["get"] for p in found["optional"] if p["version"] is None}
    assert cures["torch"] == "pip install 'jkv-cache[torch]'"
    assert cures["vllm"] == "pip install 'jkv-cache[vllm]'"
    assert all(cure in shown(found) for cure in cures.values())
    assert "pip install jkv\n" not in shown(found) and "install 'jkv[" not in shown(found)


def test_without_the_kernel_package_the_doctor_says_so(versions):
    versions(pallas_kernels=None)
    assert doctor.report()["kernels"] == {"pallas_kernels": False, "summary": doctor.NO_KERNELS}
    assert "reference only (jax.numpy); GPU kernels are not in this version" in shown(doctor.report())


def test_a_broken_backend_is_reported_not_raised(monkeypatch):
    def broken(*_):
        raise RuntimeError("Unable to initialize backend 'cuda': no driver\nlong trace")

    monkeypatch.setattr(jax, "devices", broken)
    found = doctor.report()
    assert found["devices"] == [] and not found["ok"]
    assert "jax finds no device: Unable to initialize backend 'cuda': no driver" in found["problems"]
    assert "no driver" in shown(found)


def test_the_demo_model_is_either_cached_or_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "default_cache_dir", lambda: tmp_path)
    found = doctor.report()["demo_model"]
    assert not found["cached"] and found["path"] is None and "fetches it once" in found["get"]
    (tmp_path / demo.FILE_NAME).write_bytes(b"GGUF")
    found = doctor.report()["demo_model"]
    assert found["cached"] and Path(found["path"]) == tmp_path / demo.FILE_NAME
    assert str(tmp_path) in shown(doctor.report()).replace("\n", "")

"""``jkv schemes``: every scheme with its options, defaults, bits and when to use it."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from jkv.commands._shared import JsonFlag, console, print_json

NAME = "schemes"
HELP = "List every scheme: options, bits, when to use it. Options come with defaults and allowed values."
EXAMPLE = ("jkv schemes", "jkv schemes --json")
HEAD_DIM = 128  # bits per value are stated at this head_dim


def command(as_json: JsonFlag = False) -> None:
    found = describe()
    if as_json:
        print_json(found)
    else:
        _render(found)


def describe() -> dict[str, Any]:
    """All schemes as plain data. ``windows`` are the options that every spec takes."""
    from jkv import registry
    from jkv.core import Windows

    windows = get_type_hints(Windows)
    return {
        "head_dim": HEAD_DIM,
        "schemes": [_scheme(name) for name in registry.names()],
        "windows": {key: _option(getattr(Windows(), key), kind) for key, kind in windows.items()},
    }


def _scheme(name: str) -> dict[str, Any]:
    from jkv import registry

    kinds = registry.option_types(name)
    options = {key: _option(default, kinds[key]) for key, default in registry.options(name).items()}
    widths = options.get("bits", {"allowed": []})["allowed"]
    specs = [f"{name}:bits={bits}" for bits in widths] or [name]
    return {
        "name": name,
        "when": registry.describe(name),
        "options": options,
        "bits_per_value": {spec: registry.parse(spec).bits(HEAD_DIM) for spec in specs},
        "needs_calibration": bool(registry.parse(name).needs),
    }


def _option(default: Any, annotation: Any) -> dict[str, Any]:
    """Values as a spec writes them; ``allowed`` is a list, or the kind of number."""
    if isinstance(default, bool):
        return {"default": "on" if default else "off", "allowed": ["on", "off"]}
    allowed = list(get_args(annotation))
    return {"default": default, "allowed": allowed or {int: "integer", float: "number"}[type(default)]}


def _render(found: dict[str, Any]) -> None:
    from rich.markup import escape

    out = console()
    for scheme in found["schemes"]:
        bits = ", ".join(f"{bits:g}" for bits in scheme["bits_per_value"].values())
        calibration = ", calibrated" if scheme["needs_calibration"] else ""
        out.print(f"[bold]{scheme['name']}[/]  {bits} bits a value{calibration}")
        out.print(f"  {escape(scheme['when'])}")
        for key, option in scheme["options"].items():
            out.print(f"  [cyan]{key}[/]={escape(_values(option))}")
        out.print()
    out.print(f"Bits a value are at head_dim {found['head_dim']}, metadata included. Every spec also takes")
    for key, option in found["windows"].items():
        out.print(f"  [cyan]{key}[/]={escape(_values(option))}")
    out.print("A/B stores K as A and V as B: fp8/rtn:bits=4.")


def _values(option: dict[str, Any]) -> str:
    """``2 (or 3, 4)``, ``0.1 (number)``."""
    if isinstance(option["allowed"], str):
        return f"{option['default']} ({option['allowed']})"
    others = [str(value) for value in option["allowed"] if value != option["default"]]
    return f"{option['default']} (or {', '.join(others)})" if others else str(option["default"])

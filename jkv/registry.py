"""Spec strings: ``name:key=value,...`` to a scheme and back. The only place that knows every scheme.

``kivi:bits=2``, ``flagrot-auto:bits=4,mode=fixed``, ``ultraquant:c=0.195``; ``A/B`` takes K from A and V from B
(``fp8/rtn:bits=4``). Every spec also takes ``tail=page|0``, ``sink=n``, ``recent=n`` and ``boundary=n``. The canonical
form states bits and mode and leaves other options out where they are at their defaults, so equal schemes have equal
specs.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from jkv.core import PAGE_TOKENS, SEGMENT, Scheme, Windows
from jkv.errors import JkvError
from jkv.plan import check_range

Factory = Callable[..., Scheme]
_FACTORIES: dict[str, Factory] = {}
_WHEN: dict[str, str] = {}
_ALWAYS = ("bits", "mode")  # stated in every canonical spec
_WINDOW_KEYS = {f.name: f.default for f in dataclasses.fields(Windows)}


def register(name: str, when: str) -> Callable[[Factory], Factory]:
    """Register a factory of schemes; ``when`` is the one line of ``jkv schemes`` on when to use it.

    The factory's keyword arguments, with defaults, are the options of the spec. It returns a :class:`Scheme` whose
    ``spec`` and ``windows`` are filled in here.
    """

    def add(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"scheme {name!r} is registered twice")
        _FACTORIES[name] = factory
        _WHEN[name] = when
        return factory

    return add


def names() -> list[str]:
    """Names of all registered schemes, in the order of registration."""
    import jkv.schemes  # noqa: F401  (importing registers them)

    return list(_FACTORIES)


def options(name: str) -> dict[str, Any]:
    """Options of one scheme with their defaults."""
    names()
    return {key: p.default for key, p in inspect.signature(_FACTORIES[name]).parameters.items()}


def option_types(name: str) -> dict[str, Any]:
    """Annotations of one scheme's options; a Literal lists the values that are allowed."""
    names()
    return {key: p.annotation for key, p in inspect.signature(_FACTORIES[name], eval_str=True).parameters.items()}


def describe(name: str) -> str:
    """One line on when to use the scheme."""
    names()
    return _WHEN[name]


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return close[0] if close else ""


def _value(spec: str, key: str, text: str, default: Any, annotation: Any) -> Any:
    """Parse ``text`` as the type of the option's default; refuse what is not among its literals."""
    allowed = [str(value) for value in get_args(annotation)]
    if allowed and text not in allowed:
        hint = _nearest(text, allowed)
        raise JkvError(
            f"{key}={text!r} in {spec!r} is not allowed; {key} must be one of {', '.join(allowed)} (nearest: {hint})"
        )
    try:
        if isinstance(default, bool):
            return {"on": True, "off": False}[text]
        return type(default)(text)
    except (ValueError, KeyError):
        kind = {bool: "on or off", int: "an integer", float: "a number"}[type(default)]
        raise JkvError(f"{key}={text!r} in {spec!r} is not allowed; {key} must be {kind}") from None


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value) if isinstance(value, float) else str(value)


def _parse_one(spec: str) -> tuple[str, dict[str, Any]]:
    name, _, tail = spec.strip().partition(":")
    known = names()
    if name not in known:
        hint = _nearest(name, known)
        raise JkvError(f"scheme {name!r} is unknown; nearest is {hint!r} (schemes: {', '.join(known)})")
    parameters = inspect.signature(_FACTORIES[name], eval_str=True).parameters
    defaults = {key: p.default for key, p in parameters.items()} | _WINDOW_KEYS
    annotations = {key: p.annotation for key, p in parameters.items()} | get_type_hints(Windows)
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in tail.split(","))):
        key, equals, text = item.partition("=")
        if key not in defaults:
            hint = _nearest(key, list(defaults))
            raise JkvError(
                f"option {key!r} of scheme {name!r} is unknown; nearest is {hint!r} (options: {', '.join(defaults)})"
            )
        if not equals or not text:
            raise JkvError(f"option {item!r} in {spec!r} has no value; write {key}=VALUE")
        if key in given:
            raise JkvError(f"option {key!r} appears twice in {spec!r}")
        given[key] = _value(spec, key, text, defaults[key], annotations[key])
    return name, given


def _windows(spec: str, scheme: Scheme, given: dict[str, Any]) -> Windows:
    windows = Windows(**given)
    for key in ("sink", "recent", "boundary"):
        if getattr(windows, key) < 0:
            raise JkvError(f"{key}={getattr(windows, key)} in {spec!r} is negative; {key} must be 0 or more")
    if windows.tail == "0" and scheme.granularity == "group":
        raise JkvError(
            f"tail=0 in {spec!r} is not possible: {scheme.name} shares metadata along {PAGE_TOKENS} tokens, so a page "
            "is encoded when it is full; use tail=page"
        )
    if windows.tail == "0" and windows.recent:
        raise JkvError(f"recent={windows.recent} in {spec!r} needs tail=page; tail=0 quantizes each token as it comes")
    return windows


@functools.cache
def parse(spec: str) -> Scheme:
    """The scheme of a spec string.

    Raises:
      JkvError: for an unknown name or option (with the nearest valid spelling) or a value out of range.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise JkvError(f"scheme spec {spec!r} is empty; write NAME or NAME:key=value,... (see jkv schemes)")
    if ";" in spec:
        return _mixed(spec)
    if "/" in spec:
        return _asymmetric(spec)
    name, given = _parse_one(spec)
    scheme_options = {key: value for key, value in given.items() if key not in _WINDOW_KEYS}
    scheme = _FACTORIES[name](**scheme_options)
    scheme = dataclasses.replace(scheme, name=name)
    windows = _windows(spec, scheme, {key: value for key, value in given.items() if key in _WINDOW_KEYS})
    defaults = options(name) | _WINDOW_KEYS
    full = defaults | given
    kept = [key for key, value in full.items() if value != defaults[key] or key in _ALWAYS]
    tail = ",".join(f"{key}={_format(full[key])}" for key in kept)
    return dataclasses.replace(scheme, spec=name + (":" + tail if tail else ""), windows=windows)


def _asymmetric(spec: str) -> Scheme:
    """``A/B``: the K codec of A and the V codec of B; windows must agree."""
    parts = spec.split("/")
    if len(parts) != 2:
        raise JkvError(f"spec {spec!r} has {len(parts) - 1} slashes; write K-SPEC/V-SPEC")
    key, value = (parse(part) for part in parts)
    if key.simulate or value.simulate:
        raise JkvError(f"spec {spec!r} mixes an evaluation-only scheme; K and V must both have a page")
    if key.windows != value.windows:
        raise JkvError(f"spec {spec!r} gives K {key.windows} and V {value.windows}; both sides must state the same")
    if key.flags == "token" and not value.signed_v:
        raise JkvError(f"spec {spec!r}: the head flag of {key.name} rides in V scales, and {value.name} stores none")
    return dataclasses.replace(
        key,
        spec=f"{key.spec}/{value.spec}",
        name=f"{key.name}/{value.name}",
        v=value.v,
        granularity="group" if "group" in (key.granularity, value.granularity) else "token",
        v_needs=value.v_needs,
        v_options=value.options,
        signed_v=value.signed_v,
        tables=lambda head_dim: {"k": key.tables(head_dim)["k"], "v": value.tables(head_dim)["v"]},
    )


def _mixed(spec: str) -> Scheme:
    """``A;0-1=B;-1=C``: A in all layers but those named."""
    first, *rest = (part.strip() for part in spec.split(";"))
    base, mix = parse(first), []
    for part in rest:
        layers, equals, text = part.partition("=")
        if not equals:
            raise JkvError(f"{part!r} in {spec!r} names no scheme; write LAYERS=SPEC, as in 0-1=fp8")
        for piece in layers.split(","):
            check_range(piece, spec)
        scheme = parse(text)
        if scheme.windows != Windows():
            raise JkvError(
                f"{part!r} in {spec!r} states windows; tail, sink, recent and boundary belong to the first spec"
            )
        mix.append((layers, scheme))
    canonical = ";".join([base.spec, *(f"{layers}={scheme.spec}" for layers, scheme in mix)])
    if base.windows.tail == "0" and any(scheme.granularity == "group" for _, scheme in mix):
        raise JkvError(
            f"tail=0 in {spec!r} is not possible: one of its layers shares metadata along {PAGE_TOKENS} tokens"
        )
    return dataclasses.replace(base, spec=canonical, mix=tuple(mix))


def check_head_dim(scheme: Scheme, head_dim: int) -> None:
    """Refuse a head_dim that the scheme cannot store.

    Raises:
      JkvError: naming head_dim and the scheme.
    """
    if head_dim <= 0 or head_dim % SEGMENT:
        raise JkvError(
            f"head_dim={head_dim} is not supported by {scheme.spec!r}: head_dim must be a positive multiple of "
            f"{SEGMENT}, the number of channels that share a scale"
        )

"""A comparison in its JSON form, with the figures of a plausible run."""

from typing import Any

EXACT_BYTES = 23040


def row(scheme: str, bits: float, kl: float, **changed: Any) -> dict[str, Any]:
    found = {
        "scheme": scheme,
        "bits_per_value": bits,
        "bytes_per_token": EXACT_BYTES * bits / 16,
        "compression": 16 / bits,
        "kl_x1000": kl,
        "kl_se": kl * 0.08,
        "top1_agreement": 1 - kl / 800,
        "perplexity": 12 * (1 + kl / 1000),
        "perplexity_delta": 12 * kl / 1000,
        "tail": "page",
        "sink": 0,
        "recent": 0,
        "boundary": 0,
        "compressed_tokens": 4096,
    }
    return found | changed


ROWS = [
    ("kivi:bits=2", 2.5, 316.0),
    ("flagrot-kivi:bits=2,mode=group", 2.5, 185.0),
    ("flagrot-auto:bits=2,mode=key", 2.5, 308.0),
    ("rotatekv:bits=2", 2.5, 230.0),
    ("ultraquant", 4.25, 54.0),
    ("ultra-tq:scale=block,v=same", 4.25, 14.5),
    ("turboquant:bits=4", 4.375, 18.4),
    ("rtn:bits=4", 4.5, 18.0),
    ("kivi:bits=4", 4.5, 10.5),
    ("flagrot-auto:bits=4,mode=key", 4.5, 9.2),
    ("flagrot-kivi:bits=4,mode=group", 4.5, 7.4),
    ("fp8", 8.0, 3.1),
    ("bf16", 16.0, 0.04),
]


def comparison(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "Tiny-1M",
        "tokens": 1024,
        "sequences": 5,
        "kinds": ["drama", "code", "drama", "code", "drama"],
        "reference_perplexity": 12.0,
        "versions": {},
        "rows": list(rows) or [row(*each) for each in ROWS],
    }

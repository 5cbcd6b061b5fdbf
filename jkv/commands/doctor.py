"""``jkv doctor``: what this machine can do."""

from __future__ import annotations

from jkv.commands._shared import JsonFlag, console, print_json

NAME = "doctor"
HELP = "Say what this machine can do and how to get what is missing."
EXAMPLE = ("jkv doctor", "jkv doctor --json")


def command(as_json: JsonFlag = False) -> None:
    from jkv.doctor import render, report

    found = report()
    if as_json:
        print_json(found)
    else:
        render(found, console())

"""Bundles: kernels lowered ahead of time, for processes that serve without JAX.

:mod:`.write` makes a folder of them, :mod:`.read` opens one. What reads (:mod:`.facts`, :mod:`.format`, :mod:`.read`)
imports no JAX.
"""

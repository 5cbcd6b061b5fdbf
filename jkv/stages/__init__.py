"""Stages: pairs of pure functions that codecs chain."""

from jkv.stages.codebook import codebook, lloyd_gaussian, lloyd_sphere
from jkv.stages.floats import e4m3, mxfp4
from jkv.stages.groupquant import affine
from jkv.stages.pack import pack
from jkv.stages.turning import center, rotate

__all__ = ["affine", "center", "codebook", "e4m3", "lloyd_gaussian", "lloyd_sphere", "mxfp4", "pack", "rotate"]

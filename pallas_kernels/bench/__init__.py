"""Measuring the kernels: shapes, random caches, timing, what to compare with, tables and pictures (`jkv bench`)."""

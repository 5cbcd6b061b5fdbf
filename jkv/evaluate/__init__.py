"""Evaluation: what a cache scheme costs and saves on a real language model."""

"""Serve with vLLM: an attention backend for every scheme of jkv. ``docs/vllm.md`` says how to use it.

What decides, the modules up to :mod:`torch_bridge.vllm.layer`, imports no vLLM; classes of vLLM's on top of it are thin.
"""

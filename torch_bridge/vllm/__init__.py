"""Serve with vLLM: an attention backend for every scheme of jkv. ``docs/vllm.md`` says how to use it.

What decides imports no vLLM (:mod:`~torch_bridge.vllm.slots`, :mod:`~torch_bridge.vllm.plan`,
:mod:`~torch_bridge.vllm.layer`); the classes that vLLM wants are thin and stand on top of it.
"""

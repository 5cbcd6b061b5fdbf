"""Without torch there is nothing to test here but descriptions; Python 3.12 on CI has none."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["reference/*", "test_binding.py", "test_checks.py", "test_dlpack.py", "test_imports.py"]
    collect_ignore_glob += ["launched/*", "test_launch*.py", "test_lowering_worker.py", "test_ops.py"]
    collect_ignore_glob += ["test_cache.py", "test_hf*.py", "vllm/*"]
else:
    import torch

    torch.set_num_threads(1)  # tensors are small, and threads that wait for each other are slow on busy cores

"""jkv from torch: the same schemes, pages and results, with JAX only where a process wants it."""

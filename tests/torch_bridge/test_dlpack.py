"""Shared memory between torch and JAX, and everything that would be a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jkv.errors import JkvError
from torch_bridge.dlpack import ALIGNMENT, DTYPES, to_jax, to_torch


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = (torch.arange(torch.Size(shape).numel()) % 100).reshape(shape).to(dtype)
    assert made.data_ptr() % ALIGNMENT == 0
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_shared_both_ways(dtype):
    x = aligned(6, 8, dtype=dtype)
    array = to_jax(x)
    assert (array.dtype, array.shape) == (DTYPES[dtype], (6, 8))
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = to_torch(array)
    assert (back.dtype, back.data_ptr()) == (dtype, x.data_ptr())
    np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), x.to(torch.float32).numpy())
    made = jnp.ones((3, 5), DTYPES[dtype])
    assert to_torch(made).data_ptr() == made.unsafe_buffer_pointer()


def test_transposed_empty_and_single_tensors_are_shared():
    x = aligned(4, 6, 8).permute(2, 0, 1)
    array = to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), x.numpy())
    assert to_jax(torch.zeros(0, 5)).shape == (0, 5)
    assert to_torch(jnp.zeros((0, 5))).shape == (0, 5)
    assert float(to_jax(torch.tensor(3.0))) == 3.0
    assert to_jax(aligned(4, 8)[:1]).shape == (1, 8)


def test_results_of_jitted_functions_come_back():
    x = aligned(8, 16)
    out = to_torch(jax.jit(lambda a: a * 2 + 1)(to_jax(x)))
    torch.testing.assert_close(out, x * 2 + 1)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: aligned(256)[1:65], "starts at 0x.* must be a multiple of 64; give q.clone"),
        (lambda: aligned(8, 32)[:, :16], "without gaps or repeats; give q.contiguous"),
        (lambda: aligned(1, 16).expand(4, 16), "without gaps or repeats"),
        (lambda: aligned(8, 16)[::2], "without gaps or repeats"),
        (lambda: aligned(4, dtype=torch.int64), "dtype int64, .* must be one of bfloat16, float16, float32"),
        (lambda: aligned(4, dtype=torch.float64), "dtype float64"),
        (lambda: aligned(4).requires_grad_(), "requires a gradient.* give q.detach"),
        (lambda: torch._neg_view(aligned(4)), "lazy negative"),
        (lambda: aligned(4, 4).to_sparse(), "layout torch.sparse_coo; it must be strided"),
        (lambda: torch.zeros(4, device="meta"), "on device meta; it must be on a CPU or a GPU"),
        (lambda: [1.0], "is a list; it must be a torch.Tensor"),
    ],
)
def test_what_jax_would_copy_is_refused(make, words):
    with pytest.raises(JkvError, match=rf"^q (.* )?{words}"):
        to_jax(make(), "q")


def test_a_copy_that_jax_makes_all_the_same_is_refused(monkeypatch):
    real = jax.dlpack.from_dlpack
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda x, copy: jnp.array(real(x), copy=True))
    with pytest.raises(JkvError, match=r"^q .* it was copied instead"):
        to_jax(aligned(4), "q")


def test_arrays_without_memory_of_their_own_are_refused():
    gone = jnp.zeros((8, 16))
    gone.delete()
    with pytest.raises(JkvError, match=r"^o was deleted or donated"):
        to_torch(gone, "o")
    with pytest.raises(JkvError, match=r"^o is traced by JAX"):
        jax.jit(lambda x: to_torch(x, "o"))(jnp.zeros(3))
    with pytest.raises(JkvError, match=r"^o of dtype int8 cannot be shared with torch"):
        to_torch(jnp.zeros(3, jnp.int8), "o")
    with pytest.raises(JkvError, match=r"^o is a ndarray; it must be a jax.Array"):
        to_torch(np.zeros(3), "o")

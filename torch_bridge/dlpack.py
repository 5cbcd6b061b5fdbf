"""Tensors to JAX and arrays to torch without a copy; what cannot be shared is refused, never copied in silence.

Shared memory has two readers and no writer: JAX takes its arrays for constant, and a jitted function that is given an
imported array to reuse puts its result elsewhere, so JAX cannot update a torch tensor through here.

On a GPU both sides work ahead of the host, each on its own stream. An import makes JAX's stream wait for torch's
current one, an export makes torch's current stream wait for the array. So a tensor may be written again once a result
of what JAX read it for has come back through :func:`to_torch`, and JAX may reuse an array's memory for work on tensors
that went through :func:`to_jax` afterwards.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from jkv.errors import JkvError

ALIGNMENT = 64  # JAX copies what is less aligned on a CPU; on a GPU its kernels load 32 bytes at a time

DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.float32: jnp.float32,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.uint8: jnp.uint8,
    torch.int32: jnp.int32,
    torch.bool: jnp.bool_,
}
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def to_jax(tensor: Tensor, name: str = "tensor") -> jax.Array:
    """``tensor`` as a JAX array on the same memory; a transposed tensor is fine, a slice of a larger one is not.

    Raises:
      JkvError: naming ``name``, where JAX cannot read that memory as it is.
    """
    _check_tensor(tensor, name)
    on_gpu = tensor.device.type == "cuda"
    try:
        with torch.cuda.device(tensor.device) if on_gpu else contextlib.nullcontext():
            array = jax.dlpack.from_dlpack(tensor, copy=False)
    except (RuntimeError, ValueError, BufferError) as error:
        raise JkvError(
            f"{name} {_shown(tensor)} cannot be shared with JAX, whose devices are {jax.devices()}: {error}"
        ) from error
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise JkvError(f"{name} {_shown(tensor)} cannot be shared with JAX: it was copied instead")
    if on_gpu:
        _hold(tensor, array)
    return array


def to_torch(array: jax.Array, name: str = "array") -> Tensor:
    """``array`` as a torch tensor on the same memory, which must not be written to: JAX takes arrays for constant.

    Raises:
      JkvError: naming ``name``, where torch cannot read that memory as it is.
    """
    _check_array(array, name)
    try:
        tensor = torch.from_dlpack(array)
    except (RuntimeError, ValueError, BufferError) as error:
        raise JkvError(f"{name} on {array.device} cannot be shared with torch: {error}") from error
    if array.size and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise JkvError(f"{name} on {array.device} cannot be shared with torch: it was copied instead")
    return tensor


def _shown(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"of dtype {kind}, shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"


def _check_tensor(tensor: Tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise JkvError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout != torch.strided:
        raise JkvError(f"{name} has layout {tensor.layout}; it must be strided")
    if tensor.device.type not in ("cpu", "cuda"):
        raise JkvError(f"{name} is on device {tensor.device}; it must be on a CPU or a GPU")
    if tensor.dtype not in DTYPES:
        raise JkvError(f"{name} {_shown(tensor)} cannot be shared with JAX; its dtype must be one of {_NAMES}")
    if tensor.requires_grad:
        raise JkvError(f"{name} requires a gradient, which JAX would not record; give {name}.detach()")
    if tensor.is_neg() or tensor.is_conj():
        raise JkvError(f"{name} is a lazy negative or conjugate of its memory; give {name}.resolve_neg()")
    if not _compact(tensor):
        raise JkvError(
            f"{name} {_shown(tensor)} cannot be shared with JAX: its elements must fill their memory without gaps or "
            f"repeats; give {name}.contiguous()"
        )
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        raise JkvError(
            f"{name} {_shown(tensor)} cannot be shared with JAX: it starts at {tensor.data_ptr():#x}, and its address "
            f"must be a multiple of {ALIGNMENT}; give {name}.clone()"
        )


def _compact(tensor: Tensor) -> bool:
    """Whether the elements are one run of memory, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return not tensor.numel()
        expected *= max(size, 1)
    return True


def _check_array(array: jax.Array, name: str) -> None:
    if not isinstance(array, jax.Array):
        raise JkvError(f"{name} is a {type(array).__name__}; it must be a jax.Array")
    if isinstance(array, jax.core.Tracer):
        raise JkvError(f"{name} is traced by JAX and has no memory yet; convert the result of the jitted function")
    if array.is_deleted():
        raise JkvError(f"{name} was deleted or donated; it has no memory any more")
    if len(array.sharding.device_set) != 1:
        raise JkvError(f"{name} is spread over {len(array.sharding.device_set)} devices; it must be on one")
    if array.dtype not in DTYPES.values():
        raise JkvError(f"{name} of dtype {array.dtype} cannot be shared with torch; it must be one of {_NAMES}")


def _hold(tensor: Tensor, array: jax.Array) -> None:
    """Keep torch's allocator from giving the memory away before JAX's stream has passed."""
    (device,) = array.devices()
    stream = device.get_stream_for_external_ready_events()
    tensor.record_stream(torch.cuda.ExternalStream(stream, device=tensor.device))

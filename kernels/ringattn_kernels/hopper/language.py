"""One name for each Gluon operation whose name differs between versions of Triton, or that Gluon does not expose."""

import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

# all threads of a partition wait for each other (3.6: thread_barrier)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# the copy engine loads a block of global memory to shared memory (up to 3.7: async_copy_global_to_shared)
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# and stores it (up to 3.7: async_copy_shared_to_global)
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory in another shape (up to 3.8: _reinterpret)."""
    method = buffer.reinterpret if hasattr(buffer, "reinterpret") else buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def async_add_shared_to_global(descriptor, coordinates, source, _semantic=None):
    """The copy engine adds a block of shared memory to global memory. Gluon's builder has this in every version, its language does not."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle)


@builtin
def wait_for_products(outstanding, products, _semantic=None):
    """The tuple of products, once at most `outstanding` of all products are under way."""
    results = warpgroup_mma_wait(outstanding, deps=list(products), _semantic=_semantic)
    return tl.tuple([results] if len(products) == 1 else results)

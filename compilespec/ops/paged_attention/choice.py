"""The choice of the kernel for an attention call on CUDA: FlashAttention-3 if it can, else our
own.
"""

from __future__ import annotations

import functools

import torch

from compilespec.ops.device import traits_of
from compilespec.ops.paged_attention.form import Form

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256
ACTIVATE = 'torch.nn.attention.activate_flash_attention_impl("FA3")'


@functools.cache
def why_not_flash(form: Form, device: torch.device) -> str:
    """The reason why FlashAttention-3 does not serve a form on a device; "" if it does.

    Asked first while compiling, and answered once for the whole process: a graph that was captured
    with one kernel never meets another.  If the library accepts the form, its result must equal the
    reference's in a small case; so the first answer launches kernels and waits for them.
    """
    if why := _why_not_this(form) or _why_not_here(device):
        return why
    from compilespec.ops.paged_attention import flash

    return flash.why_wrong(form, device)


def _why_not_this(form: Form) -> str:
    """The part of a form that torch's entry does not support."""
    if form.is_latent:
        return "values are the beginning of their keys"
    if form.has_paths:
        return "its tokens are a chain, not a tree"
    if form.has_sinks:
        return "its softmax has no sinks"
    if form.softcap:
        return "its scores are not capped"
    if form.head_dim != form.value_dim:
        return f"keys are {form.head_dim} wide and values {form.value_dim}"
    if form.head_dim % 8 or form.head_dim > _MOST_HEAD_DIM:
        return f"heads are {form.head_dim} wide: no multiple of 8 up to {_MOST_HEAD_DIM}"
    if form.dtype not in _DTYPES:
        return f"{str(form.dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    return ""


def _why_not_here(device: torch.device) -> str:
    from torch.nn.attention import current_flash_attention_impl

    if not traits_of(device).is_cuda:
        return f"it runs on {traits_of(device).kind}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the GPU is sm_{major}{minor}, not sm_90"
    if current_flash_attention_impl() != "FA3":
        return f"it is not active: {ACTIVATE} before compile() makes it so, where it is installed"
    return ""

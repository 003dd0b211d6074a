"""What some tests need of the processor, and what others emulate of one that they do not have."""

import os
from collections.abc import Callable
from typing import Any

import torch

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_AVX512_BF16 = torch.cpu._is_avx512_bf16_supported()  # as vLLM asks
HAS_AMX = torch.cpu._is_amx_tile_supported()  # likewise


def emulate_avx512_bf16() -> None:
    """Let vLLM lay out convolutions in this process as where a processor has avx512_bf16.

    vLLM's build for other processors lacks the three functions that pack and read this layout. They
    are made here of torch and of vLLM's functions for the layout that is not packed.
    """
    if HAS_AVX512_BF16:
        return
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as plain

    def pack(weight: torch.Tensor) -> torch.Tensor:
        """[rows, taps] to [rows / 32, taps / 2, 32, 2], in a tensor of the first shape."""
        assert weight.dtype == torch.bfloat16 and weight.shape[1] == 4, (weight.dtype, weight.shape)
        return _in_pairs(weight, 32)

    def forward(x, weight, bias, states, starts, slots, has_state, silu, *_):  # type: ignore[no-untyped-def]
        return plain.causal_conv1d_torch(
            x=x,
            weight=_out_of_pairs(weight, 32),
            bias=bias,
            conv_states=states,
            query_start_loc=starts,
            cache_indices=slots,
            has_initial_state=has_state,
            activation="silu" if silu else None,
        )

    def update(x, states, weight, bias, silu, _accepted, slots, *_):  # type: ignore[no-untyped-def]
        return plain.causal_conv1d_update_cpu(
            x=x,
            conv_state=states,
            weight=_out_of_pairs(weight, 32),
            bias=bias,
            activation="silu" if silu else None,
            conv_state_indices=slots,
        )

    _replace(
        causal_conv1d_weight_pack=pack,
        causal_conv1d_fwd_cpu=forward,
        causal_conv1d_update_cpu=update,
    )
    torch.cpu._is_avx512_bf16_supported = lambda: True


def emulate_amx() -> None:
    """Let vLLM lay out small linear layers and experts in this process as where there is AMX.

    vLLM's build for other processors has the function that packs experts so, and lacks the product
    with them and both functions for linear layers; these are made here of torch and of vLLM's
    functions for other layouts. Attention is left as it is.
    """
    if HAS_AMX:
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def pack(weight: torch.Tensor) -> torch.Tensor:
        """[rows, columns] to [rows / 16, columns / 2, 16, 2]; few rows transposed in float32."""
        return weight.float().t().contiguous() if len(weight) < 16 else _in_pairs(weight, 16)

    def product(out, x, weight, bias, is_packed):  # type: ignore[no-untyped-def]
        assert is_packed and (bias is None or bias.dtype == torch.float32)
        few = weight.dtype == torch.float32
        rows = weight.t() if few else _out_of_pairs(weight, 16).float()
        out.copy_(torch.nn.functional.linear(x.float(), rows, bias))

    _replace(convert_weight_packed=pack, weight_packed_linear=product)
    fits, kernel = utils.check_cpu_sgl_kernel, cpu_moe.cpu_fused_moe

    def is_packed(rows: int, columns: int, dtype: torch.dtype) -> bool:
        here, torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_tile_supported, lambda: True
        try:
            return fits(rows, columns, dtype)
        finally:
            torch.cpu._is_amx_tile_supported = here

    def experts(out, x, w13, w2, *more):  # type: ignore[no-untyped-def]
        *biases_and_routes, isa, skips = more
        if isa == "amx":
            w13, w2 = (_repacked(each, "amx", "vec") for each in (w13, w2))
        kernel(out, x, w13, w2, *biases_and_routes, "vec", skips)

    utils.check_cpu_sgl_kernel, cpu_moe.cpu_fused_moe = is_packed, experts
    cpu_moe.X86CPUUnquantizedExperts._supports_current_device = staticmethod(lambda: True)


def without_onednn() -> None:
    """Let vLLM compute linear layers in this process as where oneDNN takes none."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def few_instructions() -> None:
    """Let oneDNN choose layouts and kernels in this process as for a processor of 2009."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"


PROCESSORS = {
    "as it is": lambda: None,
    "avx512_bf16": emulate_avx512_bf16,
    "amx": emulate_amx,
    "without oneDNN": without_onednn,
    "sse41": few_instructions,
}
"""What is done to a process that is to take the way of another processor."""


def _replace(**functions: Callable[..., Any]) -> None:
    """Put functions in the place of those of vLLM's build, or beside them."""
    for name, function in functions.items():
        setattr(torch.ops._C, name, function)


def _in_pairs(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Lay `rows` rows side by side in pairs of columns; the shape stays."""
    columns = weight.shape[1]
    return weight.view(-1, rows, columns // 2, 2).transpose(1, 2).reshape(weight.shape)


def _out_of_pairs(weight: torch.Tensor, rows: int) -> torch.Tensor:
    columns = weight.shape[1]
    return weight.view(-1, columns // 2, rows, 2).transpose(1, 2).reshape(weight.shape)


def _repacked(weight: torch.Tensor, isa: str, other: str) -> torch.Tensor:
    """Pack experts for another kernel. Packing moves each number; numbers show where to."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    order = torch.arange(weight[0].numel(), dtype=torch.int32).to(torch.int16)
    assert len(order) <= 2**16, "a number of 16 bits for each place"
    probe = order.view(weight.dtype).view(weight[:1].shape)
    places = cpu_prepack_moe_weight(probe, isa).view(torch.int16).flatten().long() % 2**16
    plain = torch.empty_like(weight).flatten(1)
    plain[:, places] = weight.flatten(1)
    return cpu_prepack_moe_weight(plain.view(weight.shape), other)

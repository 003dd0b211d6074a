"""What some tests need of the processor, and what others emulate of one that they do not have."""

from __future__ import annotations

import torch

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_AVX512_BF16 = torch.cpu._is_avx512_bf16_supported()  # as vLLM asks
HAS_AMX = torch.cpu._is_amx_tile_supported()  # likewise

_BLOCK = 32  # rows that a packed convolution keeps together


def pack_convolutions() -> None:
    """Let vLLM lay out convolutions in this process as on a processor with avx512_bf16.

    vLLM's build for other processors lacks the three functions that pack and read this layout. They
    are made here of torch and of vLLM's functions for the layout that is not packed.
    """
    if HAS_AVX512_BF16:
        return
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as plain
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # those of the real processor

    def pack(weight: torch.Tensor) -> torch.Tensor:
        """[rows, taps] to [rows / 32, taps / 2, 32, 2], in a tensor of the first shape."""
        assert weight.dtype in (torch.bfloat16, torch.float16), weight.dtype
        rows, taps = weight.shape
        assert rows % _BLOCK == 0 and taps == 4, weight.shape
        return weight.view(-1, _BLOCK, 2, 2).transpose(1, 2).reshape(rows, taps)

    def unpacked(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(-1, 2, _BLOCK, 2).transpose(1, 2).reshape(weight.shape)

    def forward(x, weight, bias, states, starts, slots, has_state, silu, *_):  # type: ignore[no-untyped-def]
        return plain.causal_conv1d_torch(
            x=x,
            weight=unpacked(weight),
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
            weight=unpacked(weight),
            bias=bias,
            activation="silu" if silu else None,
            conv_state_indices=slots,
        )

    library = torch.library.Library("_C", "FRAGMENT")
    for name, function, signature in (
        ("weight_pack", pack, "(Tensor weight) -> Tensor"),
        (
            "fwd_cpu",
            forward,
            "(Tensor x, Tensor weight, Tensor? bias, Tensor? conv_states, Tensor? query_start_loc, "
            "Tensor? cache_indices, Tensor? has_initial_state, bool silu_activation, "
            "int pad_slot_id, bool is_vnni) -> Tensor",
        ),
        (
            "update_cpu",
            update,
            "(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu_activation, "
            "Tensor? num_accepted_tokens, Tensor? conv_state_indices, int pad_slot_id, "
            "bool is_vnni) -> Tensor",
        ),
    ):
        library.define(f"causal_conv1d_{name}{signature}")
        library.impl(f"causal_conv1d_{name}", function, "CompositeExplicitAutograd")
    _kept.append(library)
    torch.cpu._is_avx512_bf16_supported = lambda: True


_kept: list[torch.library.Library] = []  # functions live as long as their library

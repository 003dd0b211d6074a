"""What some tests need of the processor."""

from __future__ import annotations

import torch

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_AMX = torch.cpu._is_amx_tile_supported()  # as vLLM asks

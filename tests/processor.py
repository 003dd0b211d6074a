"""What some tests need of the processor."""

from __future__ import annotations

import pytest
import torch

from r3.kernels.tiles import IS_USED

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_AMX = torch.cpu._is_amx_tile_supported()  # as vLLM asks

needs_tiles = pytest.mark.skipif(not IS_USED, reason="needs AVX-512 or AVX2, used by torch")

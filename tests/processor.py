"""What some tests need of the processor."""

from __future__ import annotations

import pytest
import torch

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs AVX-512"
)

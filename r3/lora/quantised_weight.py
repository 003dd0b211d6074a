"""A weight in one byte per value, with one factor per block of 128 values (`model.base`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from r3.lora.plan import BLOCK

_TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """Values and factors of a weight.

    Blocks lie along the dimension that ranks do not share, so that every layout has the same ones.

    Attributes:
        values: [..., blocks, 128], one byte each; the last block of a row is padded with zeros.
        scales: [..., blocks, 1], float32.
        width: values per row, without padding.
        by_columns: rows here are columns of the weight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    width: int
    by_columns: bool

    @classmethod
    def of(
        cls, weight: torch.Tensor, kind: Literal["int8", "fp8"], *, by_columns: bool
    ) -> QuantisedWeight:
        """Quantise [..., rows, columns]: the largest value of a block is the type's largest."""
        dtype, largest = _TYPES[kind]
        rows = weight.detach().mT if by_columns else weight.detach()
        width = rows.shape[-1]
        blocks = F.pad(rows.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True) / largest
        scales.masked_fill_(scales == 0, 1.0)
        blocks = blocks / scales
        return cls(
            values=(blocks.round() if kind == "int8" else blocks).to(dtype),
            scales=scales,
            width=width,
            by_columns=by_columns,
        )

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, [..., rows, columns], rounded once from float32."""
        blocks = self.values.float().mul_(self.scales).to(dtype)
        rows = blocks.flatten(-2)[..., : self.width]
        return rows.mT if self.by_columns else rows

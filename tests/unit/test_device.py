"""What can be asked of the device file without ranks."""

from __future__ import annotations

import os

import pytest
import torch

from r3.runtime.device import seed_everything

pytestmark = pytest.mark.unit


def test_deterministic_mode_reaches_torch_and_warns_of_what_has_no_deterministic_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seed_everything(3, deterministic=False)
    first = torch.rand(4)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        seed_everything(3, deterministic=True)
        assert torch.equal(first, torch.rand(4))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    finally:
        torch.use_deterministic_algorithms(False)

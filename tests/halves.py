"""Gradients of a float32 output layer by two halves in bfloat16, against float64."""

import torch

from r3.layers.kernels import halves_of
from r3.policy.logprobs import _float32_product, product_of_halves


def errors(device: str) -> dict[str, list[float]]:
    """Relative errors of both products: by halves, and by the first half alone."""
    generator = torch.Generator().manual_seed(1)
    tokens, vocabulary, width = 96, 3001, 64
    logits_NV = torch.randn(tokens, vocabulary, generator=generator) * 3
    # The gradient of a log-probability: values of all sizes, and one large one per row.
    grad_NV = -logits_NV.softmax(-1)
    grad_NV[torch.arange(tokens), logits_NV.argmax(-1)] += 1.0
    weight_VD = torch.randn(vocabulary, width, generator=generator).bfloat16()
    hidden_ND = torch.randn(tokens, width, generator=generator).bfloat16()
    exact = (grad_NV.double() @ weight_VD.double(), grad_NV.double().t() @ hidden_ND.double())
    rounded_NV = grad_NV.bfloat16().double()
    rounded = (rounded_NV @ weight_VD.double(), rounded_NV.t() @ hidden_ND.double())
    grad_NV, weight_VD, hidden_ND = (each.to(device) for each in (grad_NV, weight_VD, hidden_ND))
    halves_NV = halves_of(grad_NV)
    of_halves = (
        product_of_halves(halves_NV, weight_VD),
        _float32_product(halves_NV.t(), hidden_ND.repeat(2, 1)),
    )
    halves = [each.cpu().double() for each in of_halves]
    return {
        name: [float((a - b).norm() / b.norm()) for a, b in zip(each, exact, strict=True)]
        for name, each in {"halves": halves, "rounded": rounded}.items()
    }

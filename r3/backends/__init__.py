"""What makes a device exact or fast, and layers of some models and layouts. The core reaches it
through r3/extras.py.
"""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    attention="Attention Flash Plain",
    delta="CHUNK causal_convolution gated_delta unit",
    stages="KnownShapes",
)

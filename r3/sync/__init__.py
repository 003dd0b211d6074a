"""Transfer between engine and policy: weights, rollouts, device memory."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    residency="Residency ResidencyError State",
    rollouts="PackingSpec Received distribute find_damage gather_lengths pack_for send_samples",
    weights="SyncError WeightStream export gather sync_weights",
)

"""LoRA: adapters of the policy, the quantised base they train on, PEFT files."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    adapters="Adapter QuantisedWeight factors",
    freeze="frozen_tensors",
    peft="adapter_config adapter_notes adapter_reader joined_in lost_in_peft write_adapter",
    plan="adapted_tensors adapter_fault matrices other_base quantised_tensors scale_in",
)

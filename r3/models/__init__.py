"""Checkpoints: config.json as a `ModelShape`, and safetensors files."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    families="FAMILIES PROOFS implied_keys",
    files="checkpoint_faults checkpoint_tensors text_name weight_files",
    hf_checkpoint=("CheckpointReader joined read_small_files with_end_tokens write_checkpoint"),
    tensors="Experts Kind Shard ShardId SyncPlan collect",
)

"""Tools around a run: plan, dry run, check, viewers, report. The core does not need them."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    contract=(
        "ADVANTAGE_CHECKS ADVICE LOSS_CHECKS check_advantage check_loss example_inputs "
        "example_rewards loss_fault"
    ),
    coded_routes="CheckFailed coded_experts read_back_coded_routes",
    dumps=(
        "TrainedSample join_arrays read_rollouts rollout_facts show_samples trained_samples "
        "write_rollouts"
    ),
    health="Facts findings measure",
    proof="prove_sync prove_weights sample_single_turn turned",
    **{
        "beside.header": "adapter_text frozen_lines",
        "beside.lines": "fitted",
        "beside.step_notes": "StepNotes constant_layers limit_notes",
        "mismatch.shadow": "part_of shadow",
        "mismatch.jumps": "MismatchWatch growth",
        "rows.sources": "files_of",
        "view.runs": "read_run",
    },
)

"""One run: its start, its folder, its checkpoints."""

from r3 import names_of

__getattr__ = names_of(
    __name__,
    checkpoint="CheckpointFiles KEYS PIECE UnsoundError gathered_state load_checkpoint",
    checkpointer="Checkpointer Copy SaveError",
    due="Saver export_last is_checkpoint_due",
    ends="FailureReport REQUEUE StopRequest StoppedEarly failure_text resume_command",
    folder=(
        "RunDir read_jsonl read_metrics replacing step_folders truncate_metrics write_eval "
        "write_json write_text"
    ),
    goal="Goal best_step",
    lock="hold require_free",
    manifest="RunState damage_of measure measure_durably read_manifest write_manifest",
    open="Opened ResumeError newest_whole open_run",
    session="Phases RankError Session build_run require_one_start",
)

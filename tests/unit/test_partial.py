"""Partial rollouts between two steps: who resumes them, their age, and their checkpoint file."""

import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3.algo.packing import pack
from r3.data import Dataset, prompts_from
from r3.models.shape import ModelShape
from r3.partial import (
    PartialRollouts,
    assign_engines,
    budgeted,
    from_state_dict,
    num_stale_tokens,
    resumable,
    source,
    state_dict,
)
from r3.routing import admit
from r3.run import CheckpointFiles, RunDir, RunState, damage_of, measure_durably, write_manifest
from r3.sync import send_samples
from r3.tools import TrainedSample, join_arrays, read_rollouts, rollout_facts, write_rollouts
from r3.types import Prompt, Rollout, RouteError, Sample
from tests.errors import Patch
from tests.tiny import ALONE, QUESTION, prompts_of_step, random_rollouts, tiny_config

SHAPE = ModelShape.read(tiny_config().model.path)


def prompt(name: str) -> Prompt:
    return replace(QUESTION, id=name, tokens_T=(3, 4, 5))


PROMPTS = [prompt(f"random:{i}") for i in range(4)]


def rollout_of(
    group: int, sample_index: int, policy_version: int, *later: tuple[int, int]
) -> Rollout:
    (made,) = random_rollouts(SHAPE, (12,), group_size=1, seed=10 * group + sample_index)
    segments = ((0, policy_version), *later)
    place = {"prompt_id": f"random:{group}", "group": group, "sample_index": sample_index}
    return replace(made, **place, policy_version=policy_version, segments=segments)


def suspended(
    group: int, sample_index: int, policy_version: int = 3, *later: tuple[int, int]
) -> source.SuspendedConversation:
    turns: dict[str, Any] = dict(turns=2, turns_requested=3, last_turn=6, mid_turn=True)
    origin = (policy_version + 1, group)
    return source.SuspendedConversation(
        prompt=PROMPTS[group],
        rollout=rollout_of(group, sample_index, policy_version, *later),
        progress=budgeted.Progress(
            seed_origin=origin, max_tokens_total=60, pending_observation=(7, 8), **turns
        ),
        environment=b"\x80state",
    )


def partial_rollouts() -> PartialRollouts:
    """Groups 1 and 3 wait; one conversation of group 1 is finished."""
    return PartialRollouts(
        suspended=(suspended(1, 0, 2, (8, 3)), suspended(3, 0), suspended(3, 1)),
        finished=(Sample(rollout=rollout_of(1, 1, 2), reward=0.1, parts={"gsm8k": 0.1}),),
        prompts_taken=17,
    )


def held(partial: PartialRollouts) -> list[Any]:
    """What a checkpoint holds, to be compared bit for bit."""
    finished = partial.finished
    rollouts = [each.rollout for each in (*partial.suspended, *finished)]
    return [
        [(each.prompt, each.progress, each.environment) for each in partial.suspended],
        list(map(rollout_facts, rollouts)),
        {name: array.tobytes() for name, array in join_arrays(rollouts).items()},
        [(each.reward, each.parts) for each in finished],
        partial.prompts_taken,
    ]


def saved(folder: Path) -> Path:
    for name, content in state_dict(partial_rollouts(), 0, is_leader=True).items():
        (folder / name).write_bytes(content)
    return folder


def restored(folder: Path, engine: int, engines: int, *, is_leader: bool = True) -> PartialRollouts:
    files = CheckpointFiles(folder)
    return from_state_dict(files, engine=engine, engines=engines, is_leader=is_leader)


def test_new_prompts_go_to_the_engines_with_the_fewest_groups() -> None:
    assert assign_engines([0, 0, 0], 6) == [0, 1, 2, 0, 1, 2], "as without partial rollouts"
    assert assign_engines([3, 0, 1], 5) == [1, 1, 2, 1, 2]
    assert assign_engines([2, 2], 0) == []


def test_only_young_conversations_are_resumed() -> None:
    young, old = suspended(0, 0, 3), suspended(1, 0, 2, (8, 3))
    # The next step samples with version 4.
    assert resumable([young, old], step=4, max_staleness=2) == (young, old)
    assert resumable([young, old], step=4, max_staleness=1) == (young,)
    assert resumable([young, old], step=4, max_staleness=0) == ()


def test_renumbering_changes_only_group_numbers() -> None:
    renumbered = partial_rollouts().renumbered({1: 0, 3: 1})
    assert partial_rollouts().groups == [1, 3] and renumbered.groups == [0, 1]
    assert [each.rollout.group for each in renumbered.suspended] == [0, 1, 1]
    (finished,) = renumbered.finished
    assert finished.rollout.key == (0, 1, 0) and finished.parts == {"gsm8k": 0.1}
    origins = [each.progress.seed_origin for each in renumbered.suspended]
    assert origins == [(3, 1), (4, 3), (4, 3)], "random streams keep their names"
    assert held(renumbered.renumbered({0: 1, 1: 3})) == held(partial_rollouts())


def test_a_checkpoint_restores_partial_rollouts_bit_for_bit(tmp_path: Path) -> None:
    again = restored(saved(tmp_path), 0, 1)
    assert held(again) == held(partial_rollouts())
    assert again.suspended[0].rollout.segments == ((0, 2), (8, 3)) and again.prompts_taken == 17


def test_a_checkpoint_of_the_version_before_is_read(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its classes were in other modules, rewards stood beside rollouts, and masks did not exist."""
    *fields_then, last = (each.name for each in fields(Rollout))
    assert last == "sampling_mask"
    then = lambda rollout: [getattr(rollout, name) for name in fields_then]  # noqa: E731
    monkeypatch.setattr(Rollout, "__getstate__", then)
    before = source._Before()
    before.rollouts, before.rewards = [rollout_of(1, 1, 2)], [0.1]
    before.parts = {(1, 1): {"gsm8k": 0.1}}
    content = pickle.dumps(replace(partial_rollouts(), finished=before), protocol=2)
    for now, then in (
        (b"r3.partial.source\nPartialRollouts", b"r3.rollout.partial\nPartialRollouts"),
        (b"r3.partial.source\n_Before", b"r3.rollout.collected_rollouts\nCollectedRollouts"),
        (b"r3.partial.budgeted\nS", b"r3.rollout.conversation\nS"),
        (b"r3.partial.budgeted\nP", b"r3.partial.episode\nP"),
    ):
        assert now in content
        content = content.replace(now, then)
    (tmp_path / "partial_rollouts_00000.bin").write_bytes(content)
    assert held(restored(tmp_path, 0, 1)) == held(partial_rollouts())


def test_another_number_of_engines_shares_out_all_groups(tmp_path: Path) -> None:
    first, second = (restored(saved(tmp_path), engine, 2) for engine in range(2))
    assert (first.groups, second.groups) == ([1], [3])
    assert first.prompts_taken == second.prompts_taken == 17
    assert len(first.finished) == 1 and not second.finished


def test_ranks_that_lead_no_engine_keep_no_rollouts(tmp_path: Path) -> None:
    assert restored(saved(tmp_path), 0, 1, is_leader=False) == PartialRollouts(prompts_taken=17)
    assert state_dict(partial_rollouts(), 0, is_leader=False) == {}


def test_a_run_without_budget_writes_and_reads_no_file(tmp_path: Path) -> None:
    assert state_dict(PartialRollouts(), 0, is_leader=True) == {}
    assert restored(tmp_path / "none", 0, 1) == PartialRollouts()
    assert PartialRollouts().groups == []


def test_prompts_are_taken_from_any_place_of_the_same_order() -> None:
    for weights, read in (((), ()), ((3.0, 1.0), (("a", 1), ("b", 3)))):
        data = Dataset(prompts=tuple(PROMPTS), read=read, weights=weights)
        steps = [prompts_of_step(data, seed=1, step=step, count=3) for step in range(5)]
        pieces = [
            prompts_from(data, seed=1, start=start, count=end - start)
            for start, end in ((0, 2), (2, 9), (9, 15))
        ]
        taken, asked = ([p.id for part in parts for p in part] for parts in (pieces, steps))
        assert taken == asked


def test_segments_count_what_is_stale_and_travel(tmp_path: Path) -> None:
    grown = rollout_of(0, 0, 2, (8, 3))  # 12 tokens, the first 4 of them the prompt
    assert grown.policy_versions == (2, 3)
    assert [num_stale_tokens(grown, version) for version in (2, 3, 4)] == [0, 4, 8]
    plain = replace(grown, segments=())
    assert plain.policy_versions == (2,) and [num_stale_tokens(plain, v) for v in (2, 3)] == [0, 8]
    arrived = send_samples([Sample(rollout=grown)], {grown.key: [0]}, ALONE)[grown.key]
    assert arrived.sample.rollout.segments == grown.segments
    trained = TrainedSample(rollout=grown, shaped_reward=0.0, advantage=0.0)
    write_rollouts(RunDir(tmp_path), 1, [trained])
    assert read_rollouts(RunDir(tmp_path).rollouts(1))[0][0].segments == grown.segments


def test_the_ledger_admits_a_range_of_versions_and_nothing_older() -> None:
    def pass_to(versions: range) -> None:
        sizes: dict[str, Any] = {"moe_layers": SHAPE.moe_layers, "num_experts": SHAPE.num_experts}
        rules: dict[str, Any] = {"on_missing": "error", "min_coverage": 1.0}
        admit([rollout_of(0, 0, 2, (8, 3))], ALONE, policy_versions=versions, **sizes, **rules)

    pass_to(range(2, 4))
    with pytest.raises(RouteError, match="of policy version 2, this step trains on range"):
        pass_to(range(3, 4))
    # Its later part is of weights to come
    with pytest.raises(RouteError, match="of policy version 3"):
        pass_to(range(3))


def test_micro_batches_mark_sequences_of_older_versions() -> None:
    rollouts = [rollout_of(0, 0, 2, (8, 3)), rollout_of(1, 0, 3)]
    sizes = {"num_layers": len(SHAPE.moe_layers), "topk": SHAPE.topk}
    sizes["num_experts"] = SHAPE.num_experts
    marked = pack(rollouts, [0, 1], multiple=32, policy_version=3, **sizes)
    assert marked.current_N.tolist() == [False] * 12 + [True] * 20
    assert pack(rollouts, [0, 1], **sizes).current_N.all()
    mask_T = rollouts[0].loss_mask_T[1:]
    assert np.array_equal(marked.loss_mask_N[:11], mask_T), "they are trained on all the same"


def test_conversations_in_a_checkpoint_need_the_signature_of_the_run(tmp_path: Path) -> None:
    """Their environments are pickles: what another may have written is not loaded."""
    owner = RunState.new()
    names = [path.name for path in saved(tmp_path).glob("*.bin")]

    def damage(key: bytes) -> str:
        facts = measure_durably(tmp_path, names)
        write_manifest(tmp_path, run_id=owner.run_id, step=1, files=facts, key=key)
        return "; ".join(damage_of(tmp_path, 1, ALONE, state=owner))

    for key in (b"", RunState.new().key_bytes):
        assert "not signed with the key in run.json" in damage(key)
    assert "signed" not in damage(owner.key_bytes)

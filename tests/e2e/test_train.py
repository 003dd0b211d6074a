"""`train.py`, as a user runs it: learning, being killed, resuming, exporting."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3 import assets
from r3.algo.advantage import reinforce_pp_baseline
from r3.run import read_jsonl
from r3.tools import read_rollouts
from tests.faults.attempts import launch, rows_written
from tests.runs import dumped, program, require_replayed, rows_of, run, timeless_rows, words
from tests.tiny import FEW_ROWS
from tests.warm import interpreter
from tests.world import ROOT

pytestmark = pytest.mark.e2e

FLAGS = ("--checkpoint.every", "2", "--train.warmup_updates", "3", "--train.lr_schedule", "cosine")
FLAGS += ("--eval.max_prompts", "0")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing interrupts."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    debug = ("--debug.profile", "3", "--debug.prove_sync_every", "2")
    output = run(folder, *FLAGS, *debug)
    (folder / "output.txt").write_text(output)
    return folder


def test_model_learns_with_replayed_routes(straight: Path) -> None:
    rows = rows_of(straight)
    assert [row["step"] for row in rows] == list(range(7))
    # Six steps at the smoke rate took it from 0.3 to 0.7-0.9 in every run seen; 0.15 is noise of
    # 256 questions five times over.
    assert rows[-1]["eval/heldout/accuracy"] >= rows[0]["eval/heldout/accuracy"] + 0.15
    for row in rows[1:]:
        require_replayed(row, more_than=1000)
        assert row["routing/rows_live"] == row["routing/rows_last_token"]
        # float32 on both sides: near ties flip once in ten thousand slots at most.
        assert row["routing/agreement"] > 0.999
        assert row["mismatch/abs_max"] <= 1e-4  # rounding of two float32 stacks


def test_first_two_syncs_and_every_second_version_are_proved(straight: Path) -> None:
    # Before training, then versions 1, 2 and 4 in the steps after them, and 6 for the evaluation.
    proved = [row["step"] for row in rows_of(straight) if row.get("time/prove_sync_s", 0) > 0]
    assert proved == [0, 2, 3, 5, 6]


def test_the_trace_of_a_step_names_its_phases(straight: Path) -> None:
    traces = sorted((straight / "traces").iterdir())
    assert [path.name for path in traces] == [
        f"step_000003_rank_0000{rank}.json.gz" for rank in (0, 1)
    ]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        seconds = {event["name"]: event["dur"] / 1e6 for event in events if "dur" in event}
        phases = {f"phase: {name}" for name in ("sync", "generate", "score", "pack", "train")}
        assert phases <= seconds.keys()
        assert "aten::mm" in seconds, "operations are recorded under the phases"


def test_expert_load_is_that_of_the_dumped_routes(straight: Path) -> None:
    """Counted by the routers of two ranks in training, and here from what the engines returned."""
    row = rows_of(straight)[1]
    rollouts, _, _ = read_rollouts(straight / "rollouts" / "step_000001.jsonl")
    layers = [key for key in row if key.startswith("routing/load_max_layer/")]
    experts = json.loads((assets.TINY_MOE / "config.json").read_text())["num_experts"]
    routes = np.concatenate([rollout.routed_experts for rollout in rollouts])
    assert len(layers) == routes.shape[1] > 1
    most, entropies, dead = [], [], 0
    for layer in range(routes.shape[1]):
        load = np.bincount(routes[:, layer].ravel(), minlength=experts)
        shares = load[load > 0] / load.sum()
        most.append(load.max() / load.mean())
        entropies.append(-(shares * np.log(shares)).sum() / math.log(experts))
        dead += int((load == 0).sum())
        assert row[f"routing/load_max_layer/{layer}"] == most[-1]
    assert (row["routing/load_max"], row["routing/load_dead"]) == (max(most), dead)
    # Two orders of float64 sums.
    assert row["routing/load_entropy"] == pytest.approx(np.mean(entropies), rel=1e-12)
    # Gates over all experts: between one expert and an even choice.
    assert 0 < row["routing/router_entropy"] < math.log(experts) and row["routing/router_gap"] > 0


def test_killed_run_goes_on_exactly_where_it_was(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    saved = folder / "checkpoints" / "step_000004"
    attempt = launch(folder, *FLAGS, base=("--data.path", FEW_ROWS), is_warm=True)
    attempt.wait_for("step 5", lambda: saved.exists() and rows_written(folder) > 5)
    attempt.kill()
    assert not (folder / "checkpoints" / "step_000006").exists(), "killed too late to show anything"

    output = run(folder, *FLAGS)
    assert "resuming from" in output and "after step 4" in output
    assert timeless_rows(folder) == timeless_rows(straight)


def test_export_scores_the_same_in_transformers(straight: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight / "hf" / "step_000006"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = dumped(straight, 6, kind="eval")
    questions = [row["question"] for row in read_jsonl(assets.WORD_PROBLEMS_EVAL)]
    same = 0
    for question, answer in list(zip(questions, answers, strict=True))[:48]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        same += tokenizer.decode(tokens, skip_special_tokens=True) == answer["response"]
    assert same >= 47  # greedy in float32: one near tie of two tokens may fall the other way


def test_a_checkpoint_of_two_ranks_is_exported_by_one(straight: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(straight, lost, symlinks=True)
    (lost / "run.json").unlink()
    for run_dir, step, to in ((straight, 6, tmp_path / "six"), (lost, 4, tmp_path / "four")):
        done = program(interpreter(), "-m", "r3.export", run_dir, "--to", to, "--step", step)
        assert done.returncode == 0, done.stderr
        assert ("were not compared" in done.stdout) == (run_dir == lost)
    own, same, earlier = (
        load_file(folder / "model-00001.safetensors")
        for folder in (straight / "hf" / "step_000006", tmp_path / "six", tmp_path / "four")
    )
    assert own.keys() == same.keys() == earlier.keys()
    assert all(torch.equal(own[name], same[name]) for name in own)
    assert not all(torch.equal(own[name], earlier[name]) for name in own)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        exported = straight / "hf" / "step_000006" / name
        assert exported.read_bytes() == (tmp_path / "six" / name).read_bytes()


def test_every_file_of_the_run_folder_is_there(straight: Path) -> None:
    expected = words(
        "config.yaml metrics.jsonl tensorboard rollouts/step_000001.jsonl "
        "rollouts/step_000001.safetensors eval/step_000000.jsonl checkpoints/step_000006 "
        "checkpoints/latest hf/step_000006"
    )
    assert [name for name in expected if not (straight / name).exists()] == []
    assert os.readlink(straight / "checkpoints" / "latest") == "step_000006"
    assert not list(straight.rglob("*.partial"))
    rollouts, rewards, _ = read_rollouts(straight / "rollouts" / "step_000001.jsonl")
    assert [(r.group, r.sample_index) for r in rollouts] == [
        (g, m) for g in range(16) for m in range(8)
    ], "of both ranks"
    row = rows_of(straight)[1]
    assert sum(rewards) / len(rewards) == row["reward/mean"]
    sampled = sum(rollout.num_response_tokens for rollout in rollouts)
    assert row["rollout/sampled_tokens"] == row["rollout/trained_tokens"] == sampled


def test_files_that_may_hold_texts_of_users_are_private(straight: Path) -> None:
    files = [path for name in ("rollouts", "eval") for path in (straight / name).iterdir()]
    files.append(straight / "run.json")
    assert len(files) > 4
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    new = straight / "new"
    new.touch()
    usual = [straight / "run.lock", *(straight / "hf").rglob("*.*")]
    assert {path.stat().st_mode for path in usual if path.is_file()} == {new.stat().st_mode}
    new.unlink()


def test_evaluation_alone_scores_the_newest_checkpoint_and_trains_nothing(
    straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(straight, folder, symlinks=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    held_out = str(assets.WORD_PROBLEMS_EVAL)
    output = run(
        folder,
        *FLAGS,
        *("--eval.only", "--eval.path", held_out, held_out, held_out),
        *words(
            "--eval.name heldout sampled game --eval.env '' '' guess_number "
            "--eval.samples 1 4 1 --eval.temperature 0 1 0 --eval.max_prompts 0 32 4 "
            "--eval.pass_at 1 2 --eval.max_tokens 0 8 40"
        ),
    )
    assert (
        f"evaluating checkpoint {folder}/checkpoints/step_000006, after step 6; no training"
        in output
    )
    answers = folder / "eval" / "step_000006.jsonl"
    changed = {
        path
        for path in folder.rglob("*")
        if path.is_file() and path.read_bytes() != before.get(path)
    }
    assert {path for path in changed if path.parent.name != "heartbeats"} == {
        answers,
        answers.with_name("alone.json"),
    }
    rows = dumped(folder, 6, kind="eval")
    greedy = [row for row in rows if row["set"] == "heldout"]
    assert greedy == dumped(
        straight, 6, kind="eval"
    )  # the weights of the checkpoint are those that were evaluated in training

    assert len([row for row in rows if row["set"] == "game"]) == 4  # in an environment of its own
    sampled = [row for row in rows if row["set"] == "sampled"]
    assert len(sampled) == 32 * 4 and max(row["response_tokens"] for row in sampled) == 8
    right = [[row["reward"] >= 1 for row in sampled[i : i + 4]] for i in range(0, 128, 4)]
    pairs = [1 - math.comb(4 - sum(each), 2) / math.comb(4, 2) for each in right]
    accuracy = sum(map(sum, right)) / 128
    expected = (
        f"sampled {accuracy:.3f}  sampled avg_at_4 {accuracy:.3f}  sampled pass_at_1 {accuracy:.3f}"
    )
    assert f"{expected}  sampled pass_at_2 {sum(pairs) / 32:.3f}" in output
    assert f"answers in {answers}" in output.splitlines()[-1]


def test_a_run_ends_with_what_it_came_to_and_where_that_lies(straight: Path) -> None:
    rows = rows_of(straight)
    first, last = (row["eval/heldout/accuracy"] for row in (rows[0], rows[-1]))
    (line,) = [
        line
        for line in (straight / "output.txt").read_text().splitlines()
        if line.startswith("done ")
    ]
    assert f"6 steps, heldout accuracy {first:.3f} -> {last:.3f}; replay: k3 " in line
    assert f" times; {straight}/hf/step_000006, " in line
    assert line.endswith(f"{straight}/metrics.jsonl, {straight}/tensorboard")


def test_a_launch_with_bad_data_ends_with_2_and_nothing_but_the_message(tmp_path: Path) -> None:
    rows = [
        {"question": "book " * (600 if i == 3 else 2) + str(i), "answer": "#### 1"}
        for i in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = (ROOT / "launch/local.sh", "tiny-smoke", "--data.path", "rows.jsonl")
    environment = {"PYTHON": interpreter(), "NPROC": "2"}
    done = program(*command, "--eval.path", "", cwd=tmp_path, env=environment)
    assert done.returncode == 2
    loading, tokenizers, reading = done.stdout.splitlines()
    assert loading.startswith("importing torch") and reading.startswith("reading model facts")
    assert tokenizers.startswith("importing transformers")
    first, second = done.stderr.splitlines()
    assert first == "data: 1 problem"
    assert second.startswith(
        "  - rows.jsonl: question: 1 of 20 rows is longer than 472 tokens with the chat template; "
        "the longest has 1211 (rows.jsonl:4)"
    )
    assert not (tmp_path / "runs").exists()


def test_several_updates_recorded_routes_reference_and_importance_sampling(tmp_path: Path) -> None:
    run(
        tmp_path / "r2",
        *words(
            "--train.steps 2 --train.updates_per_step 2 --replay.mode r2 "
            "--algo.kl_coef 0.01 --algo.correction token_tis --model.recompute full "
            "--eval.path '' --parallel.ep 1 --algo.aggregation sequence "
            "--rollout.prompts_per_step 8"
        ),
    )
    first, second = rows_of(tmp_path / "r2")
    # The policy leaves the model it started from
    assert first["loss/kl_ref"] < second["loss/kl_ref"]
    # The second update sees ratios other than 1
    assert first["loss/clip_frac"] > 0 or second["loss/clip_frac"] > 0
    assert first["mismatch/abs_max"] <= 1e-4  # measured before any update


@pytest.mark.large
def test_sequence_losses_work_under_context_parallelism(tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        *words(
            "--train.steps 2 --train.updates_per_step 2 --eval.path '' --parallel.ep 1 "
            "--parallel.cp 2 --algo.loss gspo --algo.aggregation sequence "
            "--algo.clip_low 3e-4 --algo.clip_high 4e-4 --algo.correction sequence_mis "
            "--algo.advantage reinforce_pp_baseline --algo.kl_coef 0.01 --algo.kl_in reward "
            "--algo.kl_estimator k1 --algo.overlong_buffer 20 --algo.overlong_filter True "
            "--replay.reference True --log.rollouts_every 1 --rollout.prompts_per_step 8"
        ),
    )
    first, second = rows_of(tmp_path / "run")
    # Before any update policy and reference are one; both pass over the same tokens with the same
    # routes.
    assert abs(first["loss/kl_ref"]) <= 1e-6 < abs(second["loss/kl_ref"])
    # float32 on both sides: products of some 10 weights, each 1 to 1e-5
    assert (
        first["correction/weight_mean"] == pytest.approx(1.0, abs=1e-3)
        and first["correction/cut_frac"] == 0
    )
    assert first["loss/clip_frac"] > 0.01  # the second update has left bounds of 3e-4
    assert first["reward/shaped_mean"] < first["reward/mean"]
    rollouts, rewards, advantages = read_rollouts(
        tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    )
    shaped = [
        reward - min(1.0, max(0.0, (rollout.num_response_tokens - 20) / 20))
        for rollout, reward in zip(rollouts, rewards, strict=True)
    ]
    assert sum(shaped) / len(shaped) == pytest.approx(first["reward/shaped_mean"], abs=1e-9)
    expected = reinforce_pp_baseline(
        torch.tensor(shaped), torch.tensor([r.group for r in rollouts])
    )
    # of the rollouts of both ranks, where half of them have another scale
    assert list(advantages) == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    half = reinforce_pp_baseline(
        torch.tensor(shaped[::2]), torch.tensor([r.group for r in rollouts[::2]])
    )
    assert (half - expected[::2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "parallel",
    [
        ("--parallel.tp", "2", "--parallel.ep", "1", "--parallel.engine_tp", "2"),
        pytest.param(
            ("--parallel.pp", "2", "--parallel.vpp", "2", "--parallel.ep", "1"),
            marks=pytest.mark.large,
        ),
        pytest.param(("--parallel.cp", "2", "--parallel.ep", "2"), marks=pytest.mark.large),
    ],
    ids=["tp2-engine-tp2", "pp2-vpp2", "cp2-ep2"],
)
def test_a_step_is_the_same_under_every_layout(
    parallel: tuple[str, ...], straight: Path, tmp_path: Path
) -> None:
    said = run(tmp_path / "layout", *parallel, "--train.steps", "1", "--eval.path", "")
    assert not re.search("leaked shared_memory|\r|\x1b", said)
    lines = [line for line in said.splitlines() if line]
    assert len(lines) == len(set(lines)), "two ranks say nothing twice"
    (row,) = rows_of(tmp_path / "layout")
    expected = rows_of(straight)[1]
    assert row["reward/mean"] == expected["reward/mean"], "the same answers are sampled"
    assert row["routing/coverage"] == row["routing/agreement"] == 1.0
    assert row["mismatch/abs_max"] <= 1e-4  # rounding of two float32 stacks
    for name in ("loss/total", "optim/grad_norm", "optim/router_grad_norm", "policy/entropy"):
        # float32 sums in another order
        assert row[name] == pytest.approx(expected[name], rel=1e-4), name

"""The cells of the matrix: what a family must do, each as a function that raises.

Runs go through `train.py`, so that what is tested is what users start. The plain run of a family is
made once in a process; several cells look at what it left.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from r3.runtime.device import Device
from r3.tools import read_rollouts
from tests import published
from tests.families import MOE_FAMILIES, ling_model
from tests.published import LAYOUTS
from tests.runs import program, rows_of, run, timeless, torchrun, without_last_checkpoint
from tests.warm import interpreter
from tests.world import run_world

CODE = "tests/matrix/user_code.py"
RL: dict[str, Any] = {
    "parallel.ep": 1,
    "train.steps": 2,
    "train.lr": 1e-3,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_response_tokens": 16,
    "replay.shadow_frac": 1.0,
    "reward.function": f"{CODE}:reward",
    "engine.max_num_seqs": 16,
    "eval.path": "",
    "log.tensorboard": "false",
    # Every weight sync compares all weights of the engine with the policy's.
    "debug.prove_sync_every": 1,
    "checkpoint.export": "false",
    "checkpoint.every": -1,
}
SFT = {"train.objective": "sft", "rollout.prompts_per_step": 4, "data.prompt_key": "messages"}
SAVED = {
    **{"checkpoint.every": 1, "checkpoint.keep": 0, "checkpoint.export": "true"},
    **{"checkpoint.export_every": 1, "log.rollouts_every": 1},
}
EXACT = 1e-9
"""k3 of a float32 engine: 1e-13, with latent attention 1e-10. Live routes leave 1e-6 and more."""
ROUNDED = 2e-3
"""k3 of a bfloat16 engine. Live routes leave several times that."""


# --- folders and runs ---------------------------------------------------------------------------


@cache
def _root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="r3-matrix-")


def _folder(*names: str) -> Path:
    return Path(_root().name).joinpath(*(name.replace("/", "--") for name in names))


@cache
def model_of(name: str) -> Path:
    """The published checkpoint."""
    return published.publish(_folder(name, "model"), name)


@cache
def _dequantised(name: str) -> Path:
    return published.dequantised(_folder(name, "plain"), name)


@cache
def conversations() -> Path:
    """Four rows that every supervised step learns."""
    file = _folder("rows.jsonl")
    file.parent.mkdir(exist_ok=True)
    pairs = ((f"{i}+{i}?", f"It is {2 * i}.") for i in range(1, 5))
    rows = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in pairs
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def _flags(name: str, settings: dict[str, Any]) -> list[str]:
    layout = LAYOUTS[name]
    given = {"model.path": model_of(name), "model.dtype": layout.dtype} | settings
    given["engine.dtype"] = layout.dtype
    if given.get("train.objective") == "sft":
        # One micro-batch: then a step is the same for every order of its rows.
        given |= {"data.path": conversations(), "data.answer_key": ""}
        left_out = ("reward.function", "replay.shadow_frac", "rollout.group_size", "engine.")
        left_out += ("debug.prove_sync_every", "log.rollouts_every", "rollout.max_response")
        given = {k: v for k, v in given.items() if not k.startswith(left_out)}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def _run(
    name: str, cell: str, settings: dict[str, Any], more: tuple[str, ...] = (), *, ranks: int = 1
) -> Path:
    """Make a run; fails with what it printed."""
    folder = _folder(name, cell)
    run(folder, *_flags(name, RL | settings), *more, ranks=ranks)
    return folder


@cache
def _plain_run(name: str) -> Path:
    """Two steps with checkpoints and exports."""
    return _run(name, "rl", SAVED)


def _allowed(name: str) -> float:
    return EXACT if LAYOUTS[name].dtype == "float32" else ROUNDED


def _check_rl(name: str, folder: Path) -> list[dict[str, float]]:
    """The rows of a run whose syncs were proved; replayed log-probabilities are the engine's."""
    rows = [row for row in rows_of(folder) if "optim/grad_norm" in row]
    assert rows
    for row in rows:
        assert row["optim/grad_norm"] > 0, row
        assert row["mismatch/k3"] <= _allowed(name), row["mismatch/k3"]
    return rows


# --- cells --------------------------------------------------------------------------------------


def check(name: str) -> None:
    """`--check` and `--dry-run`."""
    for flag in ("--check", "--dry-run"):
        flags = _flags(name, RL)
        done = program(interpreter(), "train.py", "tiny-smoke", *flags, flag, together=True)
        assert done.returncode == 0, done.stdout[-4000:]


def rl(name: str) -> None:
    """Two steps, every weight of the engine compared with the policy's before each."""
    assert len(_check_rl(name, _plain_run(name))) == 2


def sft(name: str) -> None:
    """Losses of two steps are transformers', on the published values and on step 1's export."""
    folder = _run(name, "sft", SFT | SAVED)
    ours = [row["loss/nll"] for row in rows_of(folder)]
    folders = [str(_dequantised(name)), str(folder / "hf/step_000001")]
    tokenizer = str(folder / "hf/step_000001")
    given = dict(folders=folders, tokenizer=tokenizer, name=name, rows=str(conversations()))
    (theirs,) = run_world(nll, 1, **given)
    # Sums in another order; in bfloat16 rounding.
    tolerance = 1e-5 if LAYOUTS[name].dtype == "float32" else 1e-2
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one - other) < tolerance * other, (ours, theirs)
    assert abs(ours[1] - ours[0]) > 3 * tolerance * ours[0], "weights of another step must show"


def resume(name: str) -> None:
    """The last checkpoint removed and made again: equal metrics and weights, bit for bit."""
    first, again = _plain_run(name), _folder(name, "resumed")
    without_last_checkpoint(shutil.copytree(first, again, symlinks=True), 2)
    shutil.rmtree(again / "hf/step_000002")
    assert "after step 1" in run(again, *_flags(name, RL | SAVED), ranks=1)
    rows, others = ([timeless(row) for row in rows_of(each)] for each in (first, again))
    assert rows == others
    mine, theirs = (_digests(each / "hf/step_000002") for each in (first, again))
    assert mine == theirs
    assert mine != _digests(first / "hf/step_000001"), "the steps must change the weights"


def _digests(folder: Path) -> dict[str, bytes]:
    import hashlib

    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {file.name: hashlib.sha256(file.read_bytes()).digest() for file in files}


def export(name: str) -> None:
    """transformers gives the engine's log-probabilities on the export of the step before."""
    folder, layout = _plain_run(name), LAYOUTS[name]
    config = json.loads((folder / "hf/step_000001/config.json").read_text())
    given = json.loads((model_of(name) / "config.json").read_text())
    given = given.get("text_config", given)
    # The export has none of these layers; its type of data and of files may differ.
    predicting = {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"}
    for key in given.keys() & predicting:
        assert config.get(key) == 0, key
        del given[key]
    assert "auto_map" not in config, "code that the export does not have"
    changed = {"torch_dtype", "dtype", "quantization_config", "auto_map", "transformers_version"}
    for key in given.keys() - changed:
        if key not in ("architectures", "model_type") or not layout.wrapper:
            assert config.get(key) == given[key], key
    file = str(folder / "rollouts/step_000002.jsonl")
    exports = [str(folder / f"hf/step_00000{step}") for step in (1, 2)]
    ((right, wrong),) = run_world(differences, 1, exports=exports, name=name, file=file)
    # float32 sums in another order; vLLM's epsilon of latents leaves 1e-5. In bfloat16 rounding.
    assert right < (1e-4 if layout.dtype == "float32" else 5e-2), right
    assert wrong > 3 * right, "weights of another step must show"


def lora(name: str) -> None:
    """PEFT gives the logits of the merged export, or the export says that it does not."""
    folder = _run(name, "lora", {"lora.rank": 4, "train.lr": 1e-2} | SAVED, _targets(name))
    _check_rl(name, folder)
    adapter = _folder(name, "adapter")
    command = (interpreter(), "-m", "r3.export", folder, "--adapter", "--to", adapter)
    done = program(*command, together=True)
    said = done.stdout
    assert done.returncode == 0 and "PEFT with transformers 5 drops" not in said, said
    merged, base = folder / "hf/step_000002", _dequantised(name)
    given = dict(base=str(base), merged=str(merged), adapter=str(adapter), name=name)
    ((difference, moved),) = run_world(peft, 1, **given)
    assert moved > 1e-2, "the adapter must do something"
    assert difference < 1e-2 * moved, f"{difference} of {moved} is lost in PEFT\n{said}"


def _targets(name: str) -> tuple[str, ...]:
    """What PEFT applies in most families: shared experts and dense layers beside experts not."""
    is_moe = LAYOUTS[name].family in MOE_FAMILIES
    return ("--lora.targets", "attention", "experts" if is_moe else "dense")


def int8(name: str) -> None:
    """Adapters on a frozen base of one byte per value."""
    _check_rl(name, _run(name, "int8", {"lora.rank": 4, "model.base": "int8"}))


def kl(name: str) -> None:
    """A reference policy, and two updates per step."""
    given = {"algo.kl_coef": 0.1, "algo.kl_estimator": "k3", "train.updates_per_step": 2}
    rows = _check_rl(name, _run(name, "kl", given))
    assert rows[1]["loss/kl_ref"] > 1e-9


def streamed(name: str) -> None:
    """The optimizer's state in host memory: the same metrics as without."""
    _same_as_plain(name, "streamed", {"train.optimizer": "streamed"})


def recompute(name: str) -> None:
    """Everything is computed again in the backward pass: the same metrics as without."""
    _same_as_plain(name, "recompute", {"model.recompute": "full"})


def _same_as_plain(name: str, cell: str, settings: dict[str, Any]) -> None:
    mine, plain = (_check_rl(name, each) for each in (_run(name, cell, settings), _plain_run(name)))
    for one, other in zip(mine, plain, strict=True):
        keys = [key for key in one if key.startswith(("loss/", "optim/", "mismatch/"))]
        assert len(keys) > 2
        assert {key: one[key] for key in keys} == {key: other[key] for key in keys}


def tp2(name: str) -> None:
    _two_ranks(name, {"parallel.tp": 2} | ({"parallel.etp": 1} if _is_whole(name) else {}))


def _is_whole(name: str) -> bool:
    """Experts with biases are whole on a rank."""
    return LAYOUTS[name].family == "gpt_oss"


def pp2(name: str) -> None:
    _two_ranks(name, {"parallel.pp": 2})


def ep2(name: str) -> None:
    _two_ranks(name, {"parallel.ep": 2})


def cp2(name: str) -> None:
    _two_ranks(name, {"parallel.cp": 2})


def _two_ranks(name: str, settings: dict[str, Any]) -> None:
    cell = "".join(settings)
    rows = _check_rl(name, _run(name, cell, settings | {"train.steps": 1}, ranks=2))
    (plain, _) = _check_rl(name, _plain_run(name))
    # Both sample the same in float32; sums in another order.
    if LAYOUTS[name].dtype == "float32":
        assert abs(rows[0]["optim/grad_norm"] / plain["optim/grad_norm"] - 1) < 1e-3


def tools(name: str) -> None:
    """Two turns with the reply of a tool between them; its schema is in the prompt."""
    given = {"env.path": f"{CODE}:Echo", "env.max_turns": 2, "env.max_turn_tokens": 8}
    given |= {"rollout.max_response_tokens": 48, "train.steps": 1, "log.rollouts_every": 1}
    folder = _run(name, "tools", given)
    _check_rl(name, folder)
    found = read_rollouts(folder / "rollouts/step_000001.jsonl")[0]
    masks = [rollout.loss_mask_T for rollout in found]
    # A mask that falls and rises again: two messages of the model.
    assert any((mask[1:] > mask[:-1]).sum() == 2 for mask in masks)


def doctor(name: str) -> None:
    """All checks of `r3.doctor`."""
    left_out = ("train.", "debug.", "checkpoint.", "eval.", "reward.", "rollout.", "replay.")
    flags = _flags(name, {k: v for k, v in RL.items() if not k.startswith(left_out)})
    words = ("-m", "r3.doctor", "tiny-smoke", "--log.dir", str(_folder(name, "doctor")))
    done = torchrun(1, *words, *flags)
    passed = re.search(r"(\d+) of (\d+) passed", done.stdout)
    assert passed and passed[1] == passed[2], done.stdout[-4000:]


def rescore(name: str) -> None:
    """A dump scored again gives the run's figures."""
    folder = _plain_run(name)
    done = torchrun(1, "-m", "r3.rescore", str(folder), "--step", "2")
    assert done.returncode == 0, done.stdout[-4000:]
    shown = re.search(r"^k3 +(\S+)", done.stdout, re.MULTILINE)
    assert shown, done.stdout
    assert float(shown[1]) <= _allowed(name), done.stdout


# --- in a forked process ------------------------------------------------------------------------


def _transformers(folder: str, name: str) -> Any:
    """transformers' model of an export in float32; every tensor must be the model's."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if LAYOUTS[name].family == "ling":
        return ling_model(folder).eval()
    config = published.reference(
        json.loads((Path(folder) / "config.json").read_text()), LAYOUTS[name].family
    )
    model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


@torch.no_grad()
def _logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    rows = model(tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    found: torch.Tensor = rows.gather(-1, tokens[1:, None])[:, 0]
    return found


def differences(_device: Device, *, exports: list[str], name: str, file: str) -> list[float]:
    """Mean difference of the engine's log-probabilities from transformers' on each export."""
    found = []
    rollouts = read_rollouts(Path(file))[0]
    for folder in exports:
        model, parts = _transformers(folder, name), []
        for each in rollouts:
            theirs = _logprobs(model, torch.from_numpy(each.tokens_T))
            sampled = torch.from_numpy(each.loss_mask_T[1:]) > 0
            parts.append((theirs - torch.from_numpy(each.logprobs_T[1:]))[sampled].abs())
        found.append(float(torch.cat(parts).mean()))
    return found


def nll(
    _device: Device, *, folders: list[str], tokenizer: str, name: str, rows: str
) -> list[float]:
    """Mean loss of transformers over the tokens of the replies and their ends, for each model."""
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    cases, found = [], []
    for line in Path(rows).read_text().splitlines():
        question, reply = (message["content"] for message in json.loads(line)["messages"])
        given = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        parts = [
            file.encode(text, add_special_tokens=False).ids
            for text in (given, f"{reply}<|im_end|>")
        ]
        cases.append((len(parts[0]), torch.tensor(parts[0] + parts[1])))
    for folder in folders:
        model = _transformers(folder, name)
        losses = [-_logprobs(model, tokens)[count - 1 :] for count, tokens in cases]
        found.append(float(torch.cat(losses).mean()))
    return found


def peft(_device: Device, *, base: str, merged: str, adapter: str, name: str) -> list[float]:
    """Largest difference of logits of base and adapter from the merged export's, and the base's."""
    from peft import PeftModel

    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        plain = _transformers(base, name)(tokens, use_cache=False).logits
        expected = _transformers(merged, name)(tokens, use_cache=False).logits
        model = PeftModel.from_pretrained(_transformers(base, name), adapter)
        if LAYOUTS[name].dtype == "bfloat16":
            # R3 rounds merged weights, and PEFT's products stay as they are: routers may differ.
            model = model.merge_and_unload().bfloat16().float()
        found = model(tokens, use_cache=False).logits
    return [float((found - expected).abs().max()), float((plain - expected).abs().max())]

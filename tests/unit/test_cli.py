"""The command line: help, dry runs, own settings, and one message with exit code 2."""

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.assets import TINY_MOE, TINY_MOE_TIES, WORD_PROBLEMS_EVAL, WORD_PROBLEMS_TRAIN
from r3.cli import parse as cli
from r3.config import SETTINGS, Problem, to_yaml, with_values
from r3.configs import KNOWN_SHAPES, PRESETS
from r3.models import FAMILIES, PROOFS
from r3.models.shape import ModelShape
from r3.rescore import flag_values
from r3.run import RunDir, open_run
from tests.errors import Capsys, Patch, too_wide
from tests.runs import program
from tests.sweeps import sweep
from tests.tables import table

pytestmark = pytest.mark.usefixtures("empty_folder")
# numpy takes a tenth of a second: headers of weights and metrics need it.
HEAVY = ("torch", "vllm", "megatron", "transformers")


def refusal(capsys: Capsys, *argv: str) -> str:
    """The message that refuses a command line; nothing may be written to disk or stdout."""
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(SystemExit) as end:
        cli.parse(argv)
    output = capsys.readouterr()
    assert (end.value.code, output.out, too_wide(output.err)) == (2, "", [])
    assert sorted(Path.cwd().rglob("*")) == before
    return output.err


def printed(capsys: Capsys, *argv: str) -> str:
    """What a command line prints before it ends well."""
    with pytest.raises(SystemExit) as end:
        cli.parse(argv)
    output = capsys.readouterr()
    assert end.value.code == 0, output.err
    assert (output.err, too_wide(output.out)) == ("", [])
    return output.out


# ---- runs


def test_a_preset_with_flags(monkeypatch: Patch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "--train.lr 1e-4 --parallel.ep=1 --log.progress false --eval.max-prompts 8"
    invocation = cli.parse(["tiny", *words.split(), "--engine.sleep_level", "1"])
    expected: dict[str, Any] = {"train.lr": 1e-4, "parallel.ep": 1, "log.progress": False}
    expected |= {"eval.max_prompts": (8,), "engine.sleep_level": 1, "log.dir": "runs/tiny"}
    assert invocation.config == with_values(PRESETS["tiny"](), expected)
    assert (invocation.base, invocation.world_size) == ("tiny", 2)


def test_a_value_may_be_empty_or_hold_spaces_and_equal_signs() -> None:
    words = ["--eval.path", "", "--data.system_prompt", "a = b", "--log.dir", ""]
    config = cli.parse(["tiny", *ONE, *words, "--data.drop_duplicates"]).config
    assert (config.eval.path, config.data.system_prompt) == ((), "a = b")
    assert (config.log.dir, config.data.drop_duplicates) == ("runs/tiny", True)


def test_a_list_field_takes_every_word_up_to_the_next_flag() -> None:
    def weights(*words: str) -> tuple[float, ...]:
        problems: list[Problem] = []
        found = flag_values([*words], problems)["reward.weights"]
        assert problems == []
        return tuple(found)

    assert weights("--reward.weights", "0.5", "-1", "2", "--train.seed", "1") == (0.5, -1.0, 2.0)
    assert weights("--reward.weights=-.5", "1e-3") == (-0.5, 1e-3)
    assert weights("--reward.weights", "3") == (3.0,)
    assert weights("--reward.weights", "", "--train.seed", "1") == ()


def test_check_is_a_run_of_any_number_of_ranks_and_warns_once(
    capsys: Capsys, monkeypatch: Patch
) -> None:
    assert not cli.parse(["tiny", "--parallel.ep", "1"]).check
    argv = ["tiny", "--check", "--world-size", "2", "--train.min_lr", "1e-6"]
    invocation = cli.parse(argv)
    assert (invocation.check, invocation.world_size) == (True, 2)
    assert "warning: train.min_lr = 1e-06 has no effect" in capsys.readouterr().err
    monkeypatch.setenv("R3_RESUME", "a launcher, whose run says it")
    cli.parse(argv)
    assert capsys.readouterr() == ("", "")


def test_a_flag_given_twice_is_a_warning_and_the_last_value_counts(capsys: Capsys) -> None:
    argv = ["tiny", "--parallel.ep", "1", "--train.lr", "1e-3", "--train.lr=1e-5"]
    assert cli.parse(argv).config.train.lr == 1e-5
    said = capsys.readouterr().err
    assert said == "warning: --train.lr is given 2 times: the last value counts, 1e-5\n"
    message = refusal(capsys, "tiny", "--train.lr", "1e-5", "--train.lr", "fast")
    assert "train.lr = 'fast': must be a number" in message


@pytest.mark.parametrize("words", ["--plan-for 1x80", "--train.steps 0 --check", "--from absent"])
def test_what_ends_otherwise_says_a_doubled_flag_too(words: str, capsys: Capsys) -> None:
    base = () if "--from" in words else ("tiny", *ONE)
    with pytest.raises(SystemExit):
        cli.parse([*base, "--train.lr", "1e-4", "--train.lr", "1e-5", *words.split()])
    assert "warning: --train.lr is given 2 times" in capsys.readouterr().err


def test_flags_may_stand_before_the_preset_and_have_dashes() -> None:
    argv = ["--train.lr", "1e-3", "--parallel.ep=1", "--check", "tiny", "--eval.max-prompts", "8"]
    invocation = cli.parse([*argv, "--rollout.group-size", "4"])
    assert (invocation.base, invocation.check) == ("tiny", True)
    assert invocation.config.eval.max_prompts == (8,)
    assert (invocation.config.train.lr, invocation.config.rollout.group_size) == (1e-3, 4)


# ---- own settings in files


def test_a_yaml_file_holds_differences_and_flags_override_them(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "base: tiny\nparallel: {ep: 1}\ntrain: {lr: 1e-4, steps: 3}\neval: {path: []}\n"
    )
    invocation = cli.parse(["my.yaml", "--train.steps", "5"])
    expected: dict[str, Any] = {"parallel.ep": 1, "train.lr": 1e-4, "train.steps": 5}
    expected |= {"eval.path": (), "log.dir": "runs/my"}
    assert invocation.config == with_values(PRESETS["tiny"](), expected)
    assert invocation.differences[0] == "my.yaml, from tiny with 4 differences"
    assert "  train.steps = 5 (tiny: 25)" in invocation.differences


def test_the_overrides_of_a_run_start_another_one_like_it(tmp_path: Path) -> None:
    first = cli.parse(["tiny", "--parallel.ep", "1", "--train.lr", "1e-3", "--env.stop", "a", "b"])
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(first.overrides)
    assert "base: tiny" in first.overrides and "lr: 0.001" in first.overrides
    assert "log:" not in first.overrides and "model:" not in first.overrides
    second = cli.parse([str(folder / "overrides.yaml")])
    assert second.config == with_values(first.config, {"log.dir": "runs/first-overrides"})
    assert second.overrides == first.overrides


def test_a_run_writes_its_overrides_and_from_knows_what_they_differ_from() -> None:
    invocation = cli.parse(["tiny", "--parallel.ep", "1", "--log.dir", "run"])
    config, given = invocation.config, invocation.overrides
    start = open_run(RunDir(Path("run")), config, writes=True, overrides=given)
    assert start.lock is not None
    start.lock.release()
    seen = yaml.safe_load(Path("run/overrides.yaml").read_text())
    assert seen == {"base": "tiny", "parallel": {"ep": 1}}
    resumed = cli.parse(["--from", "run", "--train.steps", "50"])
    assert resumed.differences[0] == "run, from tiny with 2 differences"
    changed = ("  train.steps = 50 (tiny: 25)", "  parallel.ep = 1 (tiny: 2)")
    assert resumed.differences[1:] == changed
    Path("run/overrides.yaml").unlink()  # a run of an earlier version
    resumed = cli.parse(["--from", "run", "--train.steps", "50"])
    assert resumed.differences == ("run with 1 difference", "  train.steps = 50 (run: 25)")


def test_notes_about_a_yaml_file_and_flags_are_printed(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HERE", str(tmp_path))
    prompt = "data:\n  system_prompt: Put the answer after #### please"
    (tmp_path / "common.yaml").write_text(f"base: tiny\nparallel.ep: 1\n{prompt}")
    (tmp_path / "my.yaml").write_text("base: ${HERE}/common.yaml\n")
    cli.parse(["my.yaml", "--eval.path", "none"])
    cut, empty = capsys.readouterr().err.splitlines()
    assert cut.startswith(f"warning: {tmp_path}/common.yaml:4: data.system_prompt is 'Put the")
    assert empty == "warning: eval.path none: read as empty, not as the text 'none'"


def test_what_is_wrong_in_a_yaml_file_has_its_line(capsys: Capsys) -> None:
    Path("sub").mkdir()
    Path("sub/below.yaml").write_text(
        "base: tiny\nparallel: {ep: 1}\ntrain:\n  lr: -1\n  seed: -2\n  bf16: 1\n"
    )
    Path("sub/mine.yaml").write_text("base: below.yaml\nalgo.clip_low: 3\nlog.tensorboard: 1\n")
    message = refusal(capsys, "sub/mine.yaml", "--train.seed", "-3")
    assert "train.lr = -1.0 (set by sub/below.yaml:4): must be above 0" in message
    assert "algo.clip_low = 3.0 (set by sub/mine.yaml:2): must be" in message
    assert "train.seed = -3: must be" in message, "of a flag"
    assert "train.bf16 = 1 (set by sub/below.yaml:6): there is no" in message, "beside the others"
    assert "log.tensorboard = 1 (set by sub/mine.yaml:3): must be True or False" in message


ENVIRONMENT = """
class Mine:
    def reset(self, prompt): return prompt.messages
    def step(self, message): return [], 1.0, True
"""


MINE, OTHER = "path: mine.py:Mine", "env: {path: mine.py:Other, args: [a=1]}"
# Settings below, the environment above, and name, path, command and args that a run then has.
REPLACED: list[tuple[str, str, tuple[Any, ...]]] = [
    ("base: tiny-tools", MINE, ("single_turn", "mine.py:Mine", "", ())),
    ("base: tiny-tools", f"command: {sys.executable}", ("single_turn", "", sys.executable, ())),
    (f"base: tiny-tools\n{OTHER}", MINE, ("single_turn", "mine.py:Mine", "", ())),
    (f"base: tiny\n{OTHER}", "name: calculator", ("calculator", "", "", ())),
    (f"base: tiny-tools\n{OTHER}", "name: single_turn", ("single_turn", "", "", ())),
    (f"base: tiny\nenv: {{command: {sys.executable}}}", MINE, ("single_turn", MINE[6:], "", ())),
    # What says nothing of the environment keeps it.
    ("base: tiny-tools", "max_turns: 3", ("calculator", "", "", ())),
]


@pytest.mark.parametrize(("below", "above", "expected"), REPLACED)
@pytest.mark.parametrize("how", ["file", "flag"])
def test_an_environment_replaces_the_one_below(
    tmp_path: Path, below: str, above: str, expected: tuple[Any, ...], how: str
) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT + ENVIRONMENT.replace("Mine", "Other"))
    (tmp_path / "below.yaml").write_text(f"{below}\nparallel: {{ep: 1}}")
    key, value = above.split(": ")
    (tmp_path / "mine.yaml").write_text(f"base: below.yaml\nenv: {{{above}}}")
    argv = ["mine.yaml"] if how == "file" else ["below.yaml", f"--env.{key}", value]
    env = cli.parse(argv).config.env
    assert (env.name, env.path, env.command, env.args) == expected


def test_a_missing_file_is_named_once_with_its_folder(tmp_path: Path, capsys: Capsys) -> None:
    argv = ["tiny", "--parallel.ep", "1", "--reward.function", "no.py:f"]
    message = refusal(capsys, *argv)
    assert message.count("there is no file no.py") == 1, message
    assert f"relative paths begin at {tmp_path}, where the run starts" in message


def write_preset(name: str, values: dict[str, Any]) -> None:
    """Write a function that gives the settings of tiny with some changed."""
    imported = "from r3.config import with_values\nfrom r3.configs.tiny import tiny\n"
    Path("mine.py").write_text(f"{imported}def {name}(): return with_values(tiny(), {values})\n")


def test_a_python_function_is_a_preset() -> None:
    write_preset("small", {"parallel.ep": 1, "train.lr": 1e-5})
    invocation = cli.parse(["mine.py:small", "--train.seed", "2"])
    assert (invocation.config.train.lr, invocation.config.log.dir) == (1e-5, "runs/small")
    expected = ("mine.py:small with 1 difference", "  train.seed = 2 (mine.py:small: 0)")
    assert invocation.differences == expected
    assert "base: mine.py:small" in invocation.overrides


TWO = "base: tiny\nparallel: {ep: 1}\nenv: {path: mine.py:Mine, name: calculator}"


@pytest.mark.parametrize(
    ("name", "content", "word", "expected"),
    [
        ("my.yaml", "base: tinyy", "my.yaml", "PRESET = 'tinyy': there is no such preset"),
        ("my.yaml", "base: [tiny]", "my.yaml", "base = ['tiny']: my.yaml: must be text"),
        ("my.yaml", "base: my.yaml", "my.yaml", "names itself as its base"),
        ("my.yaml", "- 1", "my.yaml", "must map sections to settings"),
        ("my.yaml", "base: tiny\ntrain: {lrr: 1}", "my.yaml", "(set by my.yaml:2): there is no"),
        ("my.yaml", "", "other.yaml", "PRESET = 'other.yaml': cannot be read"),
        ("my.yaml", TWO, "my.yaml", "a conversation has one environment"),
        ("my.py", "x = 1", "my.py:small", "the file defines no 'small'. Fix: it defines nothing"),
        ("my.py", "def f(): return 1", "my.py:f", "f gives 1, not a Config"),
        ("my.py", "\ndef f(): return 1 / 0", "my.py:f", "line 2 raises ZeroDivisionError"),
        ("my.py", "def f(:", "my.py:f", "'my.py:f': raises SyntaxError"),
        ("my.py", "def f(a): ...", "my.py:f", "'my.py:f': raises TypeError: f() missing 1"),
        ("my.py", "async def f(): ...", "my.py:f", "f gives <coroutine object f at "),
        ("my.py", "import sys\nsys.exit(0)", "my.py:f", "line 2 raises SystemExit: 0"),
        ("my.py", "", "other.py:f", "there is no such file. Fix: give path/to/file.py:function"),
    ],
)
@pytest.mark.filterwarnings("error")  # of a coroutine that nobody awaits
def test_a_file_that_gives_no_settings_is_refused(
    capsys: Capsys, tmp_path: Path, name: str, content: str, word: str, expected: str
) -> None:
    (tmp_path / name).write_text(content)
    message = refusal(capsys, word, "--train.steps", "many")
    assert expected in message
    assert "train.steps = 'many': must be an integer" in message  # said at the same time


# ---- a preset and a flag that contradict each other


@pytest.mark.parametrize("where", ["flag", "file"])
def test_a_preset_that_contradicts_a_setting_is_refused_with_a_flag(
    where: str, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    Path("mine.yaml").write_text("base: tiny\nparallel: {tp: 2}")
    words = {"flag": ["tiny", "--parallel.tp", "2"], "file": ["mine.yaml"]}[where]
    message = refusal(capsys, *words)
    assert "parallel.ep = 2 (set by tiny): etp * ep * pp = 4" in message
    assert message.count("or add --parallel.ep 1") == 1
    assert cli.parse([*words, "--parallel.ep", "1"]).config.parallel.tp == 2
    message = refusal(capsys, *words, "--parallel.ep", "2")
    assert "parallel.ep = 2: etp * ep * pp = 4" in message


def test_a_default_that_ends_a_contradiction_is_the_flag_to_add(capsys: Capsys) -> None:
    message = refusal(capsys, "tiny", *ONE, "--eval.path", "", "--checkpoint.keep_best", "eval/a/b")
    assert "or add --checkpoint" not in message, "the user's own setting"
    write_preset("f", {"checkpoint.keep_best": "eval/heldout/accuracy"})
    message = refusal(capsys, "mine.py:f", *ONE, "--eval.path", "")
    assert "(set by mine.py:f)" in message and "; or add --checkpoint.keep_best ''" in message


def test_an_objective_brings_its_settings_and_refuses_others(capsys: Capsys) -> None:
    learned = ("--train.objective", "sft", "--eval.path", "", "--parallel.ep", "1")
    invocation = cli.parse(["tiny", *learned])
    assert (invocation.config.rollout.group_size, invocation.config.algo.loss) == (1, "pg")
    assert "  algo.loss = pg (tiny: ppo_clip), for train.objective sft" in invocation.differences
    message = refusal(capsys, "tiny", *learned, "--replay.mode", "r3", "--algo.loss", "pg")
    assert "config: 1 problem" in message
    assert "replay.mode = 'r3': train.objective sft needs off. Fix: leave it out" in message


# ---- going on with a run


ONE = ("--parallel.ep", "1")  # rank


def started_run(folder: Path, *, seed: int = 0, checkpoint: bool = True) -> Path:
    values = {"parallel.ep": 1, "log.dir": str(folder), "train.seed": seed}
    config = with_values(PRESETS["tiny"](), values)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    if checkpoint:
        (folder / "checkpoints" / "step_000010").mkdir(parents=True)
    return folder


def test_from_takes_config_and_folder_of_the_run(tmp_path: Path) -> None:
    run = started_run(tmp_path / "old", seed=7)
    moved = run.rename(tmp_path / "moved")
    invocation = cli.parse(["--from", str(moved), "--train.steps", "50"])
    config = invocation.config
    assert (config.train.seed, config.train.steps, config.log.dir) == (7, 50, str(moved))
    assert invocation.base == str(moved)
    config = cli.parse(["--from", str(moved), "--train.lr", "1e-3", "--log.dir", "new"]).config
    assert (config.train.lr, config.log.dir) == (1e-3, "new"), "a run elsewhere"


def test_an_evaluation_does_not_warn_of_the_run_s_settings(tmp_path: Path, capsys: Capsys) -> None:
    run = started_run(tmp_path / "old")
    (run / "overrides.yaml").write_text("base: tiny\nparallel: {ep: 1}\ntrain: {steps: 50}\n")
    invocation = cli.parse(["--from", str(run), "--eval.only", "--log.show_every", "3"])
    assert "  eval.only = true (tiny: false)" in invocation.differences
    said = capsys.readouterr().err
    assert said == "warning: log.show_every = 3 has no effect: eval.only trains nothing\n"


def test_a_resumed_run_may_not_change_what_is_learnt(
    capsys: Capsys, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("R3_RESUME", "launch/local.sh --from RUN_DIR")
    run = started_run(tmp_path / "old")
    words = "--train.lr 1e-3 --rollout.group_size 4 --eval.every 1 --check --world-size 1"
    message = refusal(capsys, "--from", str(run), *words.split())  # as launch/local.sh asks
    assert message.startswith(f"config: 1 problem\n  - log.dir = {str(run)!r}: has a run with")
    assert message.splitlines()[2:6] == [
        "      rollout.group_size = 4 (that run: 8)",
        "      train.lr = 0.001 (that run: 0.0002)",
        "    Fix: set them back to continue that run, or start a new one:",
        f"      launch/local.sh --from {run} --train.lr 1e-3 --rollout.group_size 4 --eval.every 1 "
        f"--log.dir {run}-2",
    ]
    model = f"{run}/hf/step_000010"
    assert f"add --model.path {model} (python -m r3.export {run} writes it)" in message
    (run / "hf" / "step_000010").mkdir(parents=True)
    message = refusal(capsys, "--from", str(run), "--train.lr", "1e-3")
    assert message.endswith(f"add --model.path {model}\n")
    words = ["--train.lr", "1e-3", "--lora.rank", "8", "--lora.start", str(tmp_path)]
    message = refusal(capsys, "--from", str(run), *words)  # the export has the adapter merged
    assert message.endswith(f"add --model.path {model} --lora.start ''\n")


def test_ctrl_c_before_the_run_ends_with_one_line(capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as end, cli.interruptible():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted before the first step\n"


def test_the_same_folder_resumes_under_a_preset_too(capsys: Capsys) -> None:
    started_run(Path("runs/tiny"))
    assert cli.parse(["tiny", "--parallel.ep", "1"]).config.log.dir == "runs/tiny"
    assert cli.parse(["tiny", *ONE, "--train.steps", "50"]).config.log.dir == "runs/tiny"
    assert capsys.readouterr() == ("", "")
    words = ["tiny", *ONE, "--train.seed", "1", "--log.dir=runs/tiny"]
    assert "train.seed = 1 (that run: 0)" in refusal(capsys, *words)


def test_other_settings_get_the_next_free_folder_and_find_it_again(capsys: Capsys) -> None:
    started_run(Path("runs/tiny"))
    words = ["tiny", *ONE, "--train.seed", "1"]
    assert cli.parse(words).config.log.dir == "runs/tiny-2"
    note = capsys.readouterr().out
    assert note.startswith("note: runs/tiny has a run with other settings, which may not change on")
    assert "\n      train.seed = 1 (that run: 0)\n  This one: runs/tiny-2. It starts from" in note
    assert f"the weights of {TINY_MOE_TIES}. To start from those of runs/tiny, add" in note
    started_run(Path("runs/tiny-2"), seed=1)
    more = cli.parse([*words, "--train.steps", "50"])  # may change on resume
    assert more.config.log.dir == "runs/tiny-2", "the run that these settings continue"
    assert cli.parse(["tiny", *ONE, "--train.seed", "2"]).config.log.dir == "runs/tiny-3"
    assert cli.parse(["tiny", *ONE]).config.log.dir == "runs/tiny", "equal settings resume"


@pytest.mark.parametrize(
    "words",
    [
        ["--log.dir", "runs/tiny"],
        ["--eval.only"],  # of the checkpoint there, not of the starting model
        ["--checkpoint.allow_changed", "data"],  # is for a resume
    ],
)
def test_no_other_folder_is_taken_where_one_is_meant(words: list[str], capsys: Capsys) -> None:
    started_run(Path("runs/tiny"))
    message = refusal(capsys, "tiny", *ONE, "--train.seed", "1", *words)
    assert "log.dir = 'runs/tiny': has a run with other settings" in message
    assert "--log.dir runs/tiny-2" in message


def test_r3_log_dir_is_a_folder_that_is_meant(capsys: Capsys, monkeypatch: Patch) -> None:
    started_run(Path("runs/job"))
    monkeypatch.setenv("R3_LOG_DIR", "runs/job")
    assert "runs/job" in refusal(capsys, "tiny", *ONE, "--train.seed", "1")


def test_a_check_notes_another_run_a_launch_refuses_it(capsys: Capsys, monkeypatch: Patch) -> None:
    started_run(Path("runs/tiny"))
    words = ["tiny", "--check", "--train.seed", "1", "--log.dir", "runs/tiny"]
    assert cli.parse(words).config.log.dir == "runs/tiny-2", "what a start there would read"
    assert "A start there is refused. Free: --log.dir runs/tiny-2" in capsys.readouterr().out
    monkeypatch.setenv("R3_RESUME", "launch/local.sh --from RUN_DIR")  # the ranks come next
    assert "has a run with other settings" in refusal(capsys, *words)
    cli.parse(words[:-2])
    assert capsys.readouterr().out == "", "the ranks say where the run is"


def test_a_run_whose_settings_cannot_be_read_is_not_left_aside(capsys: Capsys) -> None:
    (started_run(Path("runs/tiny")) / "config.yaml").unlink()
    assert "no config.yaml to compare with" in refusal(capsys, "tiny", *ONE, "--train.seed", "1")


def test_without_a_checkpoint_there_is_nothing_to_resume() -> None:
    run = started_run(Path("runs/tiny"), checkpoint=False)
    (run / "checkpoints" / ".step_000010.partial").mkdir(parents=True)
    assert cli.parse(["tiny", "--parallel.ep", "1", "--train.seed", "1"]).config.train.seed == 1


def test_a_run_whose_config_is_damaged_is_refused(capsys: Capsys, tmp_path: Path) -> None:
    run = started_run(tmp_path / "old")
    (run / "config.yaml").write_text("train: {stepz: 3, lr: high}")
    message = refusal(capsys, "--from", str(run))
    assert "train.stepz = 3: there is no such setting" in message
    assert "train.lr = 'high': must be a number" in message


# ---- mistakes


@pytest.mark.parametrize(("words", "expected"), table("wrong_words"))
def test_one_message_and_exit_code_2(capsys: Capsys, words: str, expected: str) -> None:
    message = refusal(capsys, *words.split())
    assert expected in message
    assert message.startswith("config: ") and message.count("config: ") == 1
    assert all(line.startswith("  - ") and ". Fix: " in line for line in message.splitlines()[1:])


def test_everything_wrong_is_said_at_once(capsys: Capsys, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"\n' * 10)
    words = "--train.lrr 3 --train.steps x --rollout.group_size 1 --parallel.ep 3"
    message = refusal(capsys, "tiny", *words.split(), "--data.path", "rows.jsonl")
    assert "--train.lrr = '3'" in message  # an unknown flag
    assert "train.steps = 'x'" in message  # a value of the wrong type
    assert "rollout.group_size = 1" in message  # a rule
    assert "parallel.ep = 3" in message
    assert "data.path = 'rows.jsonl:2': is not JSON" in message  # a row


def test_under_torchrun_the_first_rank_speaks_for_all(capsys: Capsys, monkeypatch: Patch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert refusal(capsys, "tiny", "--train.steps", "0") == ""
    assert waited == [5]  # or torchrun might stop rank 0 before it has spoken
    for words in (["--help"], ["tiny", "--help"], ["tiny", "--dry-run"]):
        assert printed(capsys, *words) == ""
    cli.parse(["tiny", "--train.min_lr", "1e-6"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert "train.steps = 0" in refusal(capsys, "tiny", "--train.steps", "0")


# ---- help and dry runs


def test_no_arguments_show_the_help_and_are_a_mistake(capsys: Capsys) -> None:
    assert refusal(capsys) == printed(capsys, "--help")


def test_help_lists_presets_and_sections(capsys: Capsys) -> None:
    text = printed(capsys, "--help")
    for preset, build in PRESETS.items():
        assert build.__doc__ and f"{preset}  " in text
        assert build.__doc__ in " ".join(text.split())
    for section in {name.partition(".")[0] for name in SETTINGS}:
        assert f"\n  {section} " in text
    assert "--from RUN_DIR" in text and "--dry-run" in text


def test_help_has_what_presets_use_and_all_has_the_rest(capsys: Capsys) -> None:
    text = printed(capsys, "tiny", "--help")
    listed = [name for name in SETTINGS if f"--{name}" in text.split()]
    assert f"{len(SETTINGS) - len(listed)} more: --help all" in text
    assert "train.lr" in listed and "parallel.ep" in listed and "log.tracker" not in listed
    assert 20 < len(listed) < 60 and "(default: 0.0002)" in text
    text = printed(capsys, "tiny", "--help", "all")
    assert [name for name in SETTINGS if f"--{name}" not in text.split()] == []


def test_help_of_a_section_has_its_settings_only(capsys: Capsys) -> None:
    text = printed(capsys, "tiny", "--help", "checkpoint", "log")
    shown = {name for name in SETTINGS if f"--{name}" in text.split()}
    assert shown == {name for name in SETTINGS if name.startswith(("checkpoint.", "log."))}
    assert "Defaults are those of tiny." in text
    text = printed(capsys, "--help", "train")  # no base: the defaults
    assert "--train.lr " in text and "--log.dir" not in text and "an empty preset" in text
    assert "  flat  " in printed(capsys, "--help", "columns")
    message = refusal(capsys, "tiny", "--help", "reword")
    assert "PRESET = 'reword'" in message and "sections: model, data, env" in message


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "argv", [["--help"], ["tiny", "--help", "all"], ["--help", "columns"]], ids=" ".join
)
def test_help_fits_the_terminal(
    capsys: Capsys, monkeypatch: Patch, argv: list[str], columns: int
) -> None:
    """No line is wider than the terminal, and no sentence is broken before the line is full."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, *argv).splitlines()
    assert max(map(len, lines)) <= columns
    text = [line.strip() for line in lines if line.startswith("    ") and "tiny" in argv]
    for line, following in pairwise(text):
        if not line.endswith(")"):  # the default, which ends a setting
            assert len(line) + 1 + len(following.split()[0]) > columns - 4, line


RANKS_OF_PRESETS = {"tiny": 2, "tiny-smoke": 2, "tiny-tools": 2, "qwen3-moe-30b-a3b": 8}
RANKS_OF_PRESETS |= {"qwen3-moe-30b-80gb": 8, "qwen3-30b-a3b-lora": 2, "qwen3.5-35b-a3b": 8}
RANKS_OF_PRESETS |= {"qwen3.5-35b-a3b-lora": 2, "gpt-oss-20b": 8, "glm-4.7-flash": 8}
RANKS_OF_PRESETS |= {"glm-4.5-air": 32, "kimi-k2": 256, "qwen3-0.6b": 1}
FOR_80_GB = ("qwen3.5-35b-a3b", "gpt-oss-20b", "glm-4.7-flash", "glm-4.5-air", "kimi-k2")
QUICK = ("tiny", "tiny-smoke", "tiny-tools", "qwen3-moe-30b-a3b", "qwen3.5-35b-a3b", "gpt-oss-20b")


@pytest.mark.parametrize("preset", sweep(PRESETS, kept=QUICK))
def test_every_preset_dry_runs_where_nothing_is_downloaded(capsys: Capsys, preset: str) -> None:
    world_size = RANKS_OF_PRESETS[preset]
    device = ("--device-gib", "80") if preset in FOR_80_GB else ()
    text = printed(capsys, preset, "--dry-run", *device)
    assert text.startswith(f"{preset}: dry run on {world_size} rank")
    for title in ("config", "model", f"ranks ({world_size})", "batch", "memory per rank, GiB"):
        assert f"\n{title}" in text
    assert not device or "\nverdict\n  fits: " in text
    assert ("needs (not here yet" in text) == (not preset.startswith("tiny"))
    assert not Path("runs").exists()
    if world_size > 64:  # a plan for hundreds of ranks takes seconds
        return
    more = max(16, 2 * world_size)
    text = printed(capsys, preset, "--dry-run", "--world-size", str(more))
    assert f"dry run on {more} ranks" in text


def test_the_table_above_has_every_preset() -> None:
    assert RANKS_OF_PRESETS.keys() == PRESETS.keys()


@pytest.mark.parametrize(
    ("preset", "path", "published"),
    [
        ("qwen3-moe-30b-a3b", "Qwen/Qwen3-30B-A3B", 30.5),
        ("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", 35),
        ("gpt-oss-20b", "openai/gpt-oss-20b", 20.9),
        ("glm-4.7-flash", "zai-org/GLM-4.7-Flash", 30),
        ("glm-4.5-air", "zai-org/GLM-4.5-Air", 106),
        ("kimi-k2", "moonshotai/Kimi-K2-Instruct", 1000),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B", 0.6),
    ],
)
def test_presets_have_the_published_sizes(preset: str, path: str, published: float) -> None:
    """Billions of parameters, as the model cards round them."""
    assert PRESETS[preset]().model.path == path
    ours = ModelShape.from_hf(KNOWN_SHAPES[path]).num_params / 1e9
    assert ours == pytest.approx(published, rel=0.03 if published == 1000 else 0.01)


def test_the_list_of_model_families_needs_no_preset(capsys: Capsys) -> None:
    text = printed(capsys, "--models")
    for name, family in FAMILIES.items():
        assert name in text and family.models.split(",")[0] in text
    assert all(proof in text for proof in PROOFS)


def test_a_python_that_skips_assertions_is_warned_of() -> None:
    words = ("train.py", "tiny", "--parallel.ep", "1", "--dry-run")
    for flags, warned in (((), False), (("-O",), True)):
        done = program(sys.executable, *flags, *words)
        assert done.returncode == 0 and ("unset PYTHONOPTIMIZE" in done.stdout) == warned, done


def test_a_dry_run_shows_changed_settings_and_warnings(capsys: Capsys) -> None:
    words = ["--rollout.group_size", "4", "--train.min_lr", "1e-6"]
    text = printed(capsys, "tiny", "--dry-run", *words)
    assert "group_size: 4" in text and "16 per step, 4 samples each: 64 rollouts" in text
    assert "warning: train.min_lr = 1e-06 has no effect" in text


def test_a_setting_that_is_wrong_itself_is_not_compared_with_the_run(capsys: Capsys) -> None:
    started_run(Path("runs/tiny"))
    message = refusal(capsys, "tiny", "--parallel.ep", "1", "--rollout.group_size", "0")
    assert "config: 1 problem\n" in message and "has a run with" not in message


def test_a_dry_run_excuses_only_what_the_preset_itself_names(capsys: Capsys) -> None:
    message = refusal(capsys, "qwen3-0.6b", "--dry-run", "--data.path", "mine.jsonl")
    assert "data.path = 'mine.jsonl': there is no such file" in message
    assert "model.path" in refusal(capsys, "tiny", "--dry-run", "--model.path", "Qwen/Qwen3-0.6B")
    message = refusal(capsys, "qwen3-0.6b", "--dry-run", "--rollout.group_size", "1")
    assert "config: 4 problems" in message  # what is missing is said beside what is wrong


def test_a_dry_run_plans_from_config_json_alone(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "config.json").write_bytes((TINY_MOE / "config.json").read_bytes())
    whole, alone = (["--model.path", str(path)] for path in (TINY_MOE, tmp_path))
    plans = []
    for words in (whole, alone, [*whole, "--algo.teacher", str(tmp_path)]):
        plans.append(printed(capsys, "tiny", "--dry-run", *words))
    memory, needs = (plans[1].partition(title)[2] for title in ("memory per rank", "needs ("))
    assert memory.partition("\n\nconfig\n")[0] in plans[0].partition("memory per rank")[2]
    for lacking in ("no tokenizer.json", "no chat template", "no *.safetensors files"):
        assert lacking in needs
    assert "algo.teacher = " in plans[2].partition("needs (")[2]
    # A run has to load the model.
    assert "no *.safetensors files" in refusal(capsys, "tiny", *alone)


def test_a_dry_run_reads_the_data_that_is_there(capsys: Capsys) -> None:
    for part, source in (("train", WORD_PROBLEMS_TRAIN), ("test", WORD_PROBLEMS_EVAL)):
        path = Path(f"data/gsm8k/{part}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text())
    text = printed(capsys, "qwen3-0.6b", "--dry-run")
    assert "model.path = 'Qwen/Qwen3-0.6B'" in text and "data.path = " not in text


def test_a_device_gives_the_verdict_and_a_search_gives_flags(capsys: Capsys) -> None:
    text = printed(capsys, BIG, "--dry-run", "--world-size", "16", "--device-gib", "80")
    verdict = text.split("\nverdict\n")[1]
    assert text.index("verdict") < text.index("settings")
    assert verdict.startswith("  does not fit 76.0 GiB")
    assert printed(capsys, BIG, "--plan-for", "16x80").startswith(f"{BIG}: ")
    with pytest.raises(SystemExit) as end:
        cli.parse([BIG, "--plan-for", "1x80"])
    assert end.value.code == 1 and "none of 1 layouts" in capsys.readouterr().err
    words = ("tiny", "--check", "--device-gib", "0.01")
    assert "device memory = '0.0 GiB': " in refusal(capsys, *words)


BIG = "qwen3-moe-30b-a3b"
PLANNED = (
    ("qwen3-0.6b", "1x40", "--model.recompute none"),
    (BIG, "8x141", "--model.recompute none"),
    (BIG, "8x80", "--parallel.tp 2 --parallel.ep 4 --model.recompute none "
    "--train.optimizer streamed --parallel.engine_tp 2"),
    (BIG, "32x80", "--parallel.tp 2 --parallel.ep 16 --model.recompute none "
    "--engine.memory_fraction 0.85"),
)  # fmt: skip


@pytest.mark.parametrize(("preset", "devices", "flags"), PLANNED)
def test_presets_are_planned_for_devices(
    preset: str, devices: str, flags: str, capsys: Capsys
) -> None:
    assert f"\n1. {flags}\n" in printed(capsys, preset, "--plan-for", devices)


# ---- as a program


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["tiny", "--help"], ["qwen3-moe-30b-a3b", "--dry-run"], ["tiny", "--dry-run"]],
)
def test_it_answers_at_once_and_imports_nothing_heavy(argv: list[str]) -> None:
    text = f"""
import sys
from r3.cli import parse as cli
try:
    cli.parse({argv!r})
except SystemExit as end:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    sys.exit(f"imported {{heavy}}" if heavy else end.code)
"""
    ended = program(sys.executable, "-c", text)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "tiny" in ended.stdout or "qwen3" in ended.stdout


@pytest.mark.parametrize("argv", ["--help", "tiny --help", "tiny --dry-run"])
def test_a_reader_that_leaves_is_no_error(argv: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m r3.cli.parse {argv} | :"
    ended = program("bash", "-c", command)
    assert (ended.returncode, ended.stderr) == (0, "")

"""Workflows without an engine: the test writes what the model says."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from r3 import assets
from r3.config import EnvConfig, RewardConfig
from r3.engine import Turn
from r3.envs import Model, Workflows, is_workflow
from r3.rewards.scorer import make_scorer
from r3.rollout import ConversationSetup, EnvironmentFailed, RoundResult, is_cut
from r3.tools import limit_notes
from r3.types import Prompt, Rollout
from r3.user_code import load
from tests.rounds import env_of, numbered, play_round
from tests.settings import found_in_files
from tests.talkers import values
from tests.tiny import BASE, parts_of, rewards_of, tokenizer_folder, tokenizer_with

WORKFLOWS = '''
import asyncio, random, time

def user(text):
    return {"role": "user", "content": text}

class Talks:
    """Three turns in one conversation."""
    async def run(self, task, model):
        messages = list(task.messages)
        for turn in range(3):
            messages += [await model.chat(messages), user(f"go on {turn}")]
        return 1.0, {"turns": 3}

class Forgets(Talks):
    """Every prompt replaces the one before."""
    async def run(self, task, model):
        for turn in range(3):
            await model.chat([user(f"turn {turn}")])
        return 0.5

class Branches(Talks):
    """One plan, two answers to it at once, a judge that is not trained on."""
    async def run(self, task, model):
        plan = [*task.messages, await model.chat(task.messages)]
        one, two = await asyncio.gather(
            model.chat([*plan, user("a")]), model.chat([*plan, user("b")])
        )
        judge = await model.chat([user(one["content"] + two["content"])], train=False,
                                 temperature=0.0, max_tokens=3)
        return float(len(judge.completion.tokens) == 3)

class Forks:
    """Two branches that are fast and slow by chance."""
    async def run(self, task, model):
        async def branch(name, model):
            messages = [user(name)]
            for turn in range(3):
                await asyncio.sleep(random.random() * 0.02)
                messages += [await model.chat(messages), user("more")]
        await asyncio.gather(*(branch(name, model.fork()) for name in "ab"))
        await model.chat([user("end")])
        return 0.0

class PerCall(Forgets):
    def __init__(self, count=3):
        self.count = count
    async def run(self, task, model):
        await super().run(task, model)
        return [0.1 * turn for turn in range(self.count)]

class PerTurn(Talks):
    async def run(self, task, model):
        await super().run(task, model)
        return [1, 2, 4]

class Silent(Talks):
    async def run(self, task, model):
        await super().run(task, model)

class Endless:
    async def run(self, task, model):
        messages = list(task.messages)
        while True:
            messages += [await model.chat(messages), user("go on")]

class Longer(Endless):
    """Answers with what it has when nothing is left."""
    async def run(self, task, model):
        try:
            await super().run(task, model)
        except Exception as limit:
            return 0.25, {"limit": float(limit.limit == "length")}

class Mixed:
    """By the number of the row: most are well, others crash, hang or are slow."""
    async def run(self, task, model):
        await model.chat(task.messages)
        number = int(task.answer)
        if number == 7:
            raise RuntimeError("the agent crashed")
        if number == 13:
            await asyncio.sleep(3600)
        if number == 21:
            while True:  # ignores its cancellation once
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    if hasattr(self, "cancelled"):
                        raise
                    self.cancelled = True
        if number == 30:
            await asyncio.sleep(0.4)
        if number == 31:
            try:
                await asyncio.wait_for(model.chat([user("late")]), 0.0001)
            except asyncio.TimeoutError:
                pass
        await model.chat([*task.messages, user("again")])
        return float(number)

class Leaves:
    """It returns while a call is in flight."""
    async def run(self, task, model):
        await model.chat(task.messages)
        late = asyncio.create_task(model.chat([user("late")]))
        await asyncio.sleep(0)
        return 1.0

class Haunts:
    """Its first attempt leaves a task behind, which calls the model during the second one."""
    async def run(self, task, model):
        await model.chat(task.messages)
        if not hasattr(Haunts, "task"):
            Haunts.task = asyncio.create_task(self.late(model))
            raise RuntimeError("once")
        await Haunts.task
        return 1.0
    async def late(self, model):
        await asyncio.sleep(0.1)
        try:
            await model.chat([user("late")])
        except RuntimeError as error:
            Haunts.error = str(error)

class Blocks:
    async def run(self, task, model):
        await model.chat(task.messages)
        time.sleep(8)

class Judges:
    """No call is trained on."""
    async def run(self, task, model):
        await model.chat(task.messages, train=False)
        return 1.0

class Completes:
    async def run(self, task, model):
        first = await model.complete(task.tokens_T)
        more = await model.complete([*task.tokens_T, *first.tokens, 5, 6])
        text = await model.complete("Tom has")
        return float(more.prompt_tokens - len(task.tokens_T) - len(first.tokens))

class Rendered:
    """The second prompt has what begins every text, as a rendered conversation does."""
    async def run(self, task, model):
        calls = [await model.complete(text) for text in ("Tom has", "<|endoftext|>Tom has")]
        return float(calls[1].prompt_tokens - calls[0].prompt_tokens)

class Tools:
    tools = ({"type": "function", "function": {"name": "calc"}},)
    async def run(self, task, model):
        message = await model.chat(task.messages)
        assert message["tool_calls"] == [{"name": "calc", "arguments": {"x": 1}}]
        await model.chat([*task.messages, message, {"role": "tool", "content": "2"}])
        plain = {"role": "assistant", "content": message["content"]}
        await model.chat([*task.messages, plain, {"role": "tool", "content": "3"}], tools=[])
        return 1.0

'''


CALL = '<tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'


class Play:
    """Rounds of episodes in which the test says what the model answers.

    Attributes:
        turns: what the engine was asked for, in the order of the requests.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.py"
        self.file.write_text(WORKFLOWS)
        self.tokenizer = tokenizer_with()
        self.turns: list[Turn] = []

    def __call__(
        self, workflow: str, *, prompts: int = 1, says: str = "hello", **options: Any
    ) -> RoundResult:
        """Play one round; `options` are those of `play_round`, or settings of `env`."""
        settings = env_of(options, path=f"{self.file}:{workflow}")

        def answer(turn: Turn) -> str:
            self.turns.append(turn)
            return says

        collected, _ = play_round(
            ConversationSetup.of(settings, self.tokenizer, "tiny"),
            self.tokenizer,
            {number: numbered(number) for number in range(prompts)},
            says=answer,
            **options,
        )
        return collected


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def shape(collected: RoundResult) -> list[tuple[int, int, int]]:
    """Sample, sequence and number of the model's messages of each rollout."""
    return [(each.sample_index, each.sequence, messages_of(each)) for each in collected.rollouts]


def messages_of(rollout: Rollout) -> int:
    return sum((rollout.loss_mask_T[1:] > rollout.loss_mask_T[:-1]).tolist())


# --- sequences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_base", [False, True], ids=["chat model", "base model"])
def test_a_conversation_that_grows_is_one_sequence(
    is_base: bool, play: Play, tmp_path: Path
) -> None:
    if is_base:  # each message of the model ends with another token than the template's
        play.tokenizer = tokenizer_with("", tokenizer_folder(tmp_path, **BASE))
    collected = play("Talks", samples=2)
    assert shape(collected) == [(0, 0, 3), (1, 0, 3)]
    rollout = collected.rollouts[0]
    text = play.tokenizer.decode(rollout.tokens_T)
    hello = {"role": "assistant", "content": "hello"}
    more = [{"role": "user", "content": f"go on {turn}"} for turn in range(2)]
    messages = [*numbered(0).messages, hello, more[0], hello, more[1], hello]
    rendered = play.tokenizer.apply_chat_template(messages, tokenize=False)
    said = f"hello{play.tokenizer.eos_token}"
    rendered = rendered.replace("hello<|im_end|>", said).rstrip("\n")
    assert text == rendered, "as the chat template renders the whole conversation"
    assert play.tokenizer.decode(rollout.tokens_T[rollout.loss_mask_T > 0]) == said * 3
    assert rewards_of(collected) == [1.0, 1.0] and rollout.metrics == {"env/turns": 3.0}
    assert values(collected.metrics)["env/continued_frac"] == 2 / 3


@pytest.mark.parametrize(
    ("workflow", "says", "sequences", "rewards"),
    [
        # Every prompt replaces the one before.
        ("Forgets", "hello", [(0, 0, 1), (0, 1, 1), (0, 2, 1)], [0.5] * 3),
        # One of two answers to a plan continues it. The judge is not there.
        ("Branches", "hello", [(0, 0, 2), (0, 1, 1)], [1.0, 1.0]),
        # Tokens continue tokens; a text is another sequence.
        ("Completes", "hello", [(0, 0, 2), (0, 1, 1)], [2.0, 2.0]),
        # Calls are rendered as they were sampled; without tools the prompt is another one.
        ("Tools", CALL, [(0, 0, 2), (0, 1, 1)], [1.0, 1.0]),
        # Rewards per call belong to their sequences.
        ("PerCall", "hello", [(0, 0, 1), (0, 1, 1), (0, 2, 1)], [0.0, 0.1, 0.2]),
        ("PerTurn", "hello", [(0, 0, 3)], [7.0]),
    ],
)
def test_calls_become_sequences(
    play: Play, workflow: str, says: str, sequences: list[Any], rewards: list[float]
) -> None:
    collected = play(workflow, says=says)
    assert shape(collected) == sequences and rewards_of(collected) == rewards
    assert values(collected.metrics)["env/sequences_mean"] == len(sequences)
    first = collected.rollouts[0]
    assert bool(first.own_reward) == workflow.startswith("Per")
    assert (first.turn_rewards == (1.0, 2.0, 4.0)) == (workflow == "PerTurn")
    if workflow == "Tools":
        assert play.tokenizer.decode(first.tokens_T).count("<tool_call>") == 2
    if workflow == "Completes":
        assert first.tokens_T[:3].tolist() == [3, 4, 5]
    if workflow == "Branches":
        assert len({turn.seed for turn in play.turns}) == 4
        assert play.turns[-1].sampling.temperature == 0.0 and play.turns[-1].max_tokens == 3


def test_a_call_in_flight_at_the_end_is_no_turn(play: Play) -> None:
    collected = play("Leaves", samples=2)
    assert shape(collected) == [(0, 0, 1), (1, 0, 1)] and len(play.turns) <= 4
    counted = values(collected.metrics)
    assert counted["env/turns_mean"] == counted["env/sequences_mean"] == 1.0
    assert counted["env/continued_frac"] == 0.0


def test_white_space_that_a_template_trims_does_not_end_a_sequence(play: Play) -> None:
    template = play.tokenizer.chat_template
    trims = template.replace("message.content", "(message.content | trim)")
    assert trims != template
    play.tokenizer.chat_template = trims
    assert shape(play("Talks", says=" hello \n")) == [(0, 0, 3)]


def test_seeds_of_forks_do_not_depend_on_which_branch_is_faster(play: Play) -> None:
    def once() -> dict[tuple[int, ...], int]:
        play.turns.clear()
        rollouts = play("Forks", samples=2).rollouts
        assert [each.sequence for each in rollouts] == [0, 1, 2] * 2
        firsts = [each.messages[0]["content"] for each in rollouts]
        assert firsts == ["a", "b", "end"] * 2
        return {(turn.seed, *turn.tokens_T): 1 for turn in play.turns}

    first = once()
    assert len(first) == 14
    assert all(once() == first for _ in range(3))


def test_a_text_begins_once(play: Play) -> None:
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    play.tokenizer.backend_tokenizer.post_processor = begin
    play.tokenizer.bos_token = "<|endoftext|>"
    collected = play("Rendered")
    assert rewards_of(collected) == [0.0, 0.0]
    assert [each.tokens_T[:2].tolist().count(0) for each in collected.rollouts] == [1, 1]


# --- rewards ------------------------------------------------------------------------------------


def test_reward_functions_score_the_last_sequence(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def length(response, prompt, messages): return len(messages)\n")
    scorer = make_scorer(RewardConfig(function=(f"{file}:length",)))
    collected = play("Silent", scorer=scorer)
    assert rewards_of(collected) == [6.0] and parts_of(collected) == {(0, 0): {"length": 6.0}}


def test_rewards_of_calls_are_a_part_before_its_weight(play: Play) -> None:
    """Whether a response is right does not depend on the weight of its reward."""
    scorer = make_scorer(RewardConfig(function=("env",), weights=(0.5,)))
    collected = play("PerCall", scorer=scorer)
    assert rewards_of(collected) == [0.0, 0.05, 0.1]
    assert parts_of(collected) == {(0, 0): {"env": pytest.approx(0.3, abs=1e-12)}}  # float64


@pytest.mark.parametrize(("limit", "finish"), [("max_turns", "turns"), ("", "length")])
def test_an_episode_at_a_limit_is_unfinished(play: Play, limit: str, finish: str) -> None:
    env: dict[str, Any] = {"max_turns": 4} if limit else {"max_turns": 1000}
    collected = play("Endless", unfinished_reward=-0.5, max_response_tokens=90, **env)
    assert rewards_of(collected) == [-0.5] and collected.rollouts[0].finish_reason == finish
    assert values(collected.metrics)["env/max_turns_frac"] == float(finish == "turns")


def test_a_workflow_may_go_on_at_a_limit(play: Play) -> None:
    collected = play("Longer", max_turns=1000, max_response_tokens=90)
    (rollout,) = collected.rollouts
    assert rewards_of(collected) == [0.25]
    assert rollout.metrics == {"env/limit": 1.0, "env/refused_length": 1.0}
    assert values(collected.metrics)["env/refused_length"] == 1
    assert values(collected.metrics)["env/refused_turns"] == 0


@pytest.mark.parametrize("at_limit", [True, False], ids=["no room", "cut"])
def test_a_response_without_room_for_another_one_is_not_cut(play: Play, at_limit: bool) -> None:
    """The note that none of the responses ended would blame eos_token_id."""
    collected = play("Endless", max_turns=1000, max_response_tokens=90 if at_limit else 2)
    (rollout,) = collected.rollouts
    setup = ConversationSetup.of(EnvConfig(), play.tokenizer, "tiny")
    assert rollout.finish_reason == "length" and is_cut(rollout, setup) is not at_limit
    counts, said = Counter(length=int(values(collected.metrics)["env/refused_length"])), {"turns"}
    counts["turns"] = 3

    def told() -> str:
        limit = "rollout.max_response_tokens 90"
        cut = [is_cut(rollout, setup)]
        return "\n".join(limit_notes(cut, counts, said, limit, setup, collected.rollouts))

    first = told()
    assert "without a message: 1 left no token to sample (rollout.max_response_" in first
    assert "env.max_turns" not in first and ("none of 1 responses ended" in first) is not at_limit
    assert told() == "", "each cause is named once"
    counts["aborted"] = 2
    assert "message: 2 that were aborted. env/refused_* count them" in told()


# --- failures -----------------------------------------------------------------------------------


def test_64_episodes_with_one_that_crashes_and_two_that_hang(play: Play) -> None:
    collected = play("Mixed", prompts=64, timeout_s=1.0, on_error="drop")
    kept = [number for number in range(64) if number not in (7, 13, 21)]
    assert sorted({each.group for each in collected.rollouts}) == kept
    found = {each.rollout.group: each.reward for each in collected.samples}
    assert found == {number: float(number) for number in kept}
    counts = values(collected.metrics)
    names = ("calls", "errors", "timeouts", "dropped")
    assert [counts[f"env/{name}"] for name in names] == [64, 1, 2, 3]


def test_a_failed_episode_keeps_sequences_with_reward_0_or_names_the_line(play: Play) -> None:
    collected = play("Mixed", prompts=8, timeout_s=1.0, on_error="zero")
    assert rewards_of(collected)[-1] == 0.0 and collected.rollouts[-1].finish_reason == "error"
    assert values(collected.metrics)["env/zeroed"] == 1
    with pytest.raises(EnvironmentFailed, match=r"(?s)rows:7/0.*mine.py.*the agent crashed"):
        play("Mixed", prompts=8)


SHOWS = """
class Shows:
    def __init__(self, where="init"):
        self.where = where
        self.show("init")
    def show(self, where):
        if where == self.where:
            self.tools = [{"type": "function", "function": {"name": "look_up"}}]
            self.stop = ["from " + where]
    async def run(self, task, model):
        self.show("run")
        await model.chat(task.messages)
        return 1.0
"""


def test_a_workflow_shows_what_its_instances_have(play: Play) -> None:
    play.tokenizer = tokenizer_with("", assets.TINY_MOE_TOOLS)
    play.file.write_text(SHOWS)
    assert rewards_of(play("Shows")) == [1.0]
    (turn,) = play.turns
    assert "look_up" in play.tokenizer.decode(turn.tokens_T)
    assert turn.sampling.stop == ("from init",)
    with pytest.raises(EnvironmentFailed, match=r"Shows.run changed self.tools to .*__init__"):
        play("Shows", args=("where=run",))
    assert "look_up" not in play.tokenizer.decode(play.turns[1].tokens_T)


def test_time_of_the_engine_is_not_time_of_the_episode(play: Play) -> None:
    assert rewards_of(play("Talks", engine_s=0.3, timeout_s=0.5)) == [1.0]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_an_engine_on_cpu_waits_for_calls_that_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """As long as its last step took for each; a GPU would idle meanwhile."""
    monkeypatch.setattr("r3.envs.workflows.has_gpu", lambda: on_gpu)
    monkeypatch.setattr("r3.envs.workflows._LONGEST_PAUSE_S", 2.0)
    came: list[int] = []

    class Agent:
        async def run(self, task: Prompt, model: Model) -> float: ...

    def calls() -> None:
        for number in range(4):
            time.sleep(0.3)
            came.append(number)
            workflows.wake.put(None)

    workflows = Workflows(EnvConfig(), Agent)
    thread = threading.Thread(target=calls)
    workflows.wake.put(None)
    thread.start()
    workflows.poll()  # after an engine's step of any length
    assert len(came) < 4 if on_gpu else len(came) == 4
    thread.join()
    workflows.wake.put(None)
    began = time.monotonic()
    workflows.poll()  # after one that took no time
    assert time.monotonic() - began < 1.0
    workflows.close()


def test_code_that_blocks_the_event_loop_is_named(play: Play) -> None:
    with pytest.raises(EnvironmentFailed, match=r"(?s)blocked the event loop.*time.sleep\(8\)"):
        play("Blocks", timeout_s=1.0)


def test_an_episode_without_a_trained_call_fails_in_training_only(play: Play) -> None:
    with pytest.raises(EnvironmentFailed, match="nothing to train on"):
        play("Judges")
    assert play("Judges", on_error="zero").rollouts == []
    collected = play("Judges", keep_failed=True)
    assert rewards_of(collected) == [1.0] and collected.rollouts[0].num_response_tokens == 0


def test_a_call_of_an_earlier_attempt_is_refused(play: Play) -> None:
    collected = play("Haunts", retries=1)
    assert shape(collected) == [(0, 0, 1)] and rewards_of(collected) == [1.0]
    assert play.turns[0].seed == play.turns[1].seed
    assert values(collected.metrics)["env/retries"] == 1
    assert "the episode is over" in load(f"{play.file}:Haunts").error


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("task.messages, temperature=0.5", "tokens that are trained on are sampled as rollout"),
        ("task.messages, train='list'", "train must be True or False, and is 'list'"),
        ("'hello'", "messages must be a list of messages, and is 'hello'"),
        ("task.messages, max_token=5", "a call of the model has no keyword max_token"),
        ("task.messages", "ended without a reward"),
    ],
)
def test_a_wrong_call_or_result_is_a_failure(play: Play, call: str, message: str) -> None:
    with pytest.raises(EnvironmentFailed, match="returned 2 rewards, and the episode has 3 calls"):
        play("PerCall", args=("count=2",))
    run = f"async def run(self, task, model): await model.chat({call})"
    play.file = play.file.with_name("calls.py")
    play.file.write_text(f"class Calls:\n    {run}\n")
    with pytest.raises(EnvironmentFailed, match=message):
        play("Calls")


# --- settings -----------------------------------------------------------------------------------


def test_a_workflow_cannot_be_suspended_or_moved_to_processes(play: Play) -> None:
    path = {"env.path": f"{play.file}:Talks"}
    assert found_in_files(path) == {}
    problems = found_in_files({**path, "rollout.step_token_budget": 8, "env.workers": 2})
    assert "Talks is a workflow: a coroutine cannot be" in problems["rollout.step_token_budget"]
    assert "asyncio.to_thread" in problems["env.workers"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def run(self, task, model): ...", "W.run is not async"),
        ("async def run(self, task): ...", "W.run cannot be called as run(task, model)"),
        ("async def go(self): ...", "W has no method reset"),
    ],
)
def test_check_names_what_a_workflow_lacks(tmp_path: Path, source: str, message: str) -> None:
    (file := tmp_path / "w.py").write_text(f"class W:\n    {source}\n")
    assert message in found_in_files({"env.path": f"{file}:W"})["env.path"]


def test_a_class_with_reset_and_step_may_have_a_method_run(tmp_path: Path) -> None:
    methods = ("reset(self, prompt)", "step(self, message)", "run(self, command)")
    lines = ["class Shell:", *(f"    def {method}: ..." for method in methods)]
    (file := tmp_path / "shell.py").write_text("\n".join(lines))
    assert found_in_files({"env.path": f"{file}:Shell", "env.workers": 1}) == {}
    assert not is_workflow(load(f"{file}:Shell"))

"""`self_judge`: the policy scores its own responses, with the engine and the weights that sampled.

The scorer's calls become questions. The round in progress samples a reply to each among its own
turns, greedily (`Judging`). Tokens sampled for a judgement are never trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3.config import RewardConfig
from r3.data.rendering import TemplateFault
from r3.data.template import Renderer
from r3.engine import Sampled, Sampling, Turn
from r3.judges.chat import filled, parsed, template_of
from r3.rewards import Score
from r3.types import Prompt
from r3.user_code.calls import CallError, Failure
from r3.user_code.workers import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt of the judge, until the engine has sampled its reply.

    Attributes:
        number: names the question among those of its scorer.
        tokens_T: the prompt.
    """

    number: int
    tokens_T: tuple[int, ...]


class SelfJudge(Place):
    """A place whose calls wait until the engine has replied.

    Attributes:
        max_tokens: maximum tokens of a reply.
        renderer: the policy's chat template.
    """

    def __init__(self, settings: RewardConfig, renderer: Renderer) -> None:
        """Read the judge's prompt.

        Args:
            renderer: the policy's chat template.

        Raises:
            ConfigError: `reward.prompt_file` cannot be read.
        """
        super().__init__()
        self.max_tokens = settings.max_tokens
        self._settings, self.renderer = settings, renderer
        self._template = template_of(settings)
        self._asked: list[Question] = []
        self._waiting: dict[int, Question] = {}

    @property
    def has_questions(self) -> bool:
        """Whether a question waits for the engine."""
        return bool(self._asked)

    def tokens(self, response: str, prompt: Prompt) -> tuple[int, ...]:
        """Return the judge's prompt about a response, in the policy's chat template.

        Raises:
            CallError: the chat template refuses it.
        """
        message = {"role": "user", "content": filled(self._template, response, prompt)}
        try:
            return tuple(self.renderer.tokens(self.renderer.render([message])))
        except TemplateFault as error:
            text = f"the chat template refuses the judge's prompt: {error}"
            raise CallError(text, again=False) from error

    def longest(self, conversation: int, answer: str) -> int:
        """Return about how many tokens the longest prompt of the judge and its reply have.

        Args:
            conversation: tokens of the longest conversation, question and response together.
            answer: the longest reference answer.
        """
        own = Prompt(id="", messages=({"role": "user", "content": ""},), tokens_T=(), answer=answer)
        times = max(self._template.count(place) for place in ("{question}", "{response}"))
        return len(self.tokens("", own)) + times * conversation + self.max_tokens

    def take_questions(self) -> list[Question]:
        """Return the questions since the last call; each needs its `answer`."""
        asked, self._asked = self._asked, []
        return asked

    def answer(self, number: int, text: str, *, complete: bool) -> None:
        """Take the reply to a question.

        Args:
            complete: False if it ran out of tokens, so that a number in it may be cut.
        """
        question = self._waiting.pop(number)
        value = self._settings.no_verdict
        judged = complete
        if complete:
            try:
                value = parsed(text, self._settings.pattern)
            except CallError:
                judged = False
        metrics = {
            "reward/no_verdict_frac": float(not judged),
            "reward/question_tokens_mean": float(len(question.tokens_T)),
        }
        self._ended.put((number, Score(value, metrics), None))

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            question = Question(number=token, tokens_T=function(*arguments))
        except CallError as error:
            self._ended.put((token, None, Failure("error", str(error), error.again)))
            return
        self._waiting[token] = question
        self._asked.append(question)

    def abandon(self, token: int) -> None:
        raise AssertionError("a question has no time limit and is never abandoned")


class Judging:
    """Passes questions to the engine and replies to the judge, on the leader rank of an engine.

    Its turns have negative keys, so that they meet no key of a conversation.
    """

    def __init__(self, judge: SelfJudge, max_model_len: int) -> None:
        """Take the judge of the round's scorer.

        Args:
            max_model_len: maximum tokens of a question and its reply.
        """
        self._judge, self._max_model_len = judge, max_model_len

    def with_questions(self, turns: list[Turn], finished: int) -> tuple[list[Turn], int]:
        """Add the questions since the last call to the turns that a round returned.

        A question that leaves no room for a reply gets no score.
        """
        judge = self._judge
        sampling = Sampling(temperature=0.0, stop_tokens=judge.renderer.ends)
        for question in judge.take_questions():
            tokens_T = question.tokens_T
            room = self._max_model_len - len(tokens_T)
            if room < 1:
                judge.answer(question.number, "", complete=False)
                continue
            turns.append(
                Turn(
                    key=-1 - question.number,
                    tokens_T=tokens_T,
                    first_row=len(tokens_T) - 1,  # its routes are not used
                    seed=0,
                    max_tokens=min(room, judge.max_tokens),
                    sampling=sampling,
                )
            )
        return turns, finished

    def takes(self, sampled: Sampled) -> bool:
        """Take a reply; return False for a turn of a conversation."""
        if sampled.key >= 0:
            return False
        text = self._judge.renderer.message_text(sampled.tokens_T)
        self._judge.answer(-1 - sampled.key, text, complete=sampled.finish_reason == "stop")
        return True

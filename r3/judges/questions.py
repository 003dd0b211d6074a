"""Questions of `reward.function self_judge`, sampled among the turns of a round."""

from __future__ import annotations

from r3.engine import Sampled, Sampling, Turn
from r3.judges.self_judge import SelfJudge


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

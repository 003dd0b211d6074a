"""A game: find a number from 0 to 30. The reply to a wrong guess is "higher" or "lower"."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from r3.types import Message, Prompt

LARGEST = 30
GUESSES = 6  # five halvings find any of 31 numbers


class GuessNumber:
    """The number depends only on the prompt's id, so all samples of a group have the same.

    The reward is 1 for the first guess, a sixth less for every further guess, and 0 if the number
    is not found. A message without a number is a lost guess. Every guess has a reward, so a game
    that runs out of turns is lost too, and no reward function is called.
    """

    def __init__(self) -> None:
        self.number = -1
        self.guesses = 0

    def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Return the rules of the game; only the id of the prompt is used."""
        digest = hashlib.blake2b(prompt.id.encode(), digest_size=8).digest()
        self.number = int.from_bytes(digest, "little") % (LARGEST + 1)
        return [{"role": "user", "content": f"Guess the number. It is from 0 to {LARGEST}."}]

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Compare the last number in the message."""
        self.guesses += 1
        numbers = re.findall(r"\d+", message["content"])
        guess = int(numbers[-1][-9:]) if numbers else None
        if guess == self.number:
            return [], 1 - (self.guesses - 1) / GUESSES, True
        if self.guesses == GUESSES:
            return [], 0.0, True
        if guess is None:
            return [{"role": "user", "content": "Say a number."}], 0.0, False
        return (
            [{"role": "user", "content": "higher" if guess < self.number else "lower"}],
            0.0,
            False,
        )

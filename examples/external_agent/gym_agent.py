"""Questions and scores of reasoning-gym, answered by the policy through the endpoint.

The rows of `data.path` only number the questions: row 17 is question 17 of the generated data set.

    python -m venv runs/gym && runs/gym/bin/pip install reasoning-gym openai
"""

from typing import Any

import openai
import reasoning_gym

SIZE = 4096


class Agent:
    """Runs all episodes of a rank; it generates the questions once."""

    def __init__(self) -> None:
        self.questions = reasoning_gym.create_dataset(
            "chain_sum", seed=0, size=SIZE, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )

    async def run(self, task: dict[str, Any], model: Any) -> float:
        question = self.questions[int(task["id"].rpartition(":")[2]) % SIZE]
        client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, timeout=600.0)
        reply = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": question["question"]}]
        )
        answer = (reply.choices[0].message.content or "").rpartition("####")[2].strip()
        return float(self.questions.score_answer(answer, question))

"""Questions and scores of reasoning-gym, answered by the policy through the endpoint.

The rows of `data.path` only number the questions: row 17 is question 17 of the generated data set.

    python -m venv runs/gym && runs/gym/bin/pip install reasoning-gym openai
"""

import json
import os
from pathlib import Path

import openai
import reasoning_gym

SIZE = 4096
task = json.loads(Path(os.environ["R3_TASK_FILE"]).read_text())
questions = reasoning_gym.create_dataset(
    "chain_sum", seed=0, size=SIZE, min_terms=2, max_terms=2, min_digits=1, max_digits=1
)
question = questions[int(task["id"].rpartition(":")[2]) % SIZE]
reply = openai.OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"],
    messages=[{"role": "user", "content": question["question"]}],
)
answer = (reply.choices[0].message.content or "").rpartition("####")[2].strip()
reward = float(questions.score_answer(answer, question))
Path(os.environ["R3_RESULT_FILE"]).write_text(json.dumps(reward))

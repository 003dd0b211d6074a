"""Train with TRL's GRPOTrainer and write the seconds of every step.

`against_trl.py` calls this with the interpreter of TRL's environment, in which R3 is not installed.
The only argument is a JSON object: the fields of its `Task`, and data, reward_file, out.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds and sampled tokens of every step."""

    def __init__(self):
        self.seconds, self.tokens, self.began = [], [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Keep the mean number of sampled tokens of the step."""
        if logs and "completions/mean_length" in logs:
            self.tokens.append(logs["completions/mean_length"])


def main():
    """Train as the argument says."""
    task = json.loads(sys.argv[1])
    spec = importlib.util.spec_from_file_location("reward", task["reward_file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, task["reward"])

    def reward(completions, answer, **kwargs):
        return [
            score(completion[0]["content"], SimpleNamespace(answer=reference))
            for completion, reference in zip(completions, answer, strict=True)
        ]

    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()]
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in rows
        ]
    )
    count = task["prompts"] * task["samples"]
    torch.set_num_threads(2)
    clock = Clock()
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=reward,
        train_dataset=data,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=task["out"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": task["dtype"]},
            per_device_train_batch_size=task["trl_batch"],
            gradient_accumulation_steps=count // task["trl_batch"],
            num_generations=task["samples"],
            max_completion_length=task["max_tokens"],
            max_steps=task["steps"],
            learning_rate=task["lr"],
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            num_iterations=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    figures = {"seconds": clock.seconds, "tokens": clock.tokens}
    (Path(task["out"]) / "steps.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()

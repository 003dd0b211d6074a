"""A taskset of verifiers: word problems in one turn, with a rubric of two rewards and a metric."""

import json
import re
from pathlib import Path

import verifiers.v1 as vf

DATA = Path(__file__).parents[2] / "r3" / "assets" / "data" / "word_problems_train.jsonl"


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rpartition("####")[2].strip() == self.data.answer)

    @vf.reward(weight=0.2)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 60)

    @vf.metric
    async def equations(self, trace: vf.Trace) -> float:
        return float(len(re.findall(r"=\d", trace.last_reply)))


class WordProblems(vf.Taskset[WordTask]):
    def load(self) -> list[WordTask]:
        rows = map(json.loads, DATA.read_text().splitlines())
        return [
            WordTask(WordData(prompt=each["question"], answer=each["answer"].split("#### ")[1]))
            for each in rows
        ]


__all__ = ["WordProblems"]

"""Make the embedded models, which are Qwen3-MoE of 1.1 million parameters, and their data.

    python tools/make_tiny_model.py --data r3/assets/data                               # at once
    python tools/make_tiny_model.py --out r3/assets/tiny-moe                            # 2 minutes
    python tools/make_tiny_model.py --near-ties --out r3/assets/tiny-moe-ties           # 5 minutes
    python tools/make_tiny_model.py --with-calculator --out r3/assets/tiny-moe-tools    # 3 minutes
    python tools/make_tiny_model.py --family glm4_moe --out runs/tiny-glm               # 6 minutes

Pre-training has bare facts (`17+8=25`), problems with only the answer (three of four) and problems
with written steps (one of four). The model then usually writes only the answer, which is mostly
wrong. When it writes the steps, its answer is mostly right. Reinforcement learning can therefore
improve it by making the steps more frequent.

`--family` makes a model of another family for the same task. `r3` does not ship it.

`--near-ties` makes a model with many near ties between experts. A penalty pulls all router logits
towards one value, where bfloat16 cannot distinguish many of them. The engine then often chooses
other experts than the policy.

`--with-calculator` continues the training of `tiny-moe` with conversations. Two of five call the
calculator for every step, three of five have only the answer. Reinforcement learning can improve
this model by making the calls more frequent.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# Run from a checkout, r3 need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from r3.assets import TINY_MOE
from r3.assets.word_problems import (
    Row,
    evaluation_rows,
    final_answer,
    held_out_answers,
    make_problem,
    problems,
    training_rows,
)
from r3.data.template import Renderer
from r3.envs.calculator import Calculator
from r3.envs.chat import Chat

IGNORED = -100  # a label that carries no loss
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, START, END, "<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL_TOKENS += ["<tool_response>", "</tool_response>", "<tools>", "</tools>"]
# The tokenizer needs fewer; a power of two divides evenly among tensor-parallel ranks.
VOCABULARY = 512
CONTEXT = 512

# As in Qwen's template, tool results are inside a user turn.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- '<tools>' ~ tool.function.name ~ '</tools>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {%- set text = arguments if arguments is string else arguments | tojson %}
            {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' ~ text ~ '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

BATCH_ROWS = 20
# The longest problem fits with its steps; truncated ones would not teach the model to end.
ROW_TOKENS = 72
WORKED = 0.25  # share of the problems whose answer shows its steps
CONVERSATIONS = 32  # per batch; one is longer than a row of 72 tokens
CALLING = 0.4  # share of the conversations that call the calculator
ROUTER_BIAS = 0.05
WARMUP_STEPS = 50
MATRIX_LR, OTHER_LR = 0.02, 3e-3
BALANCE_WEIGHT = 0.02
# With --near-ties. Between 2 and 4 neighbouring bfloat16 numbers are 1/64 apart, which is as far as
# the penalty lets the logits of one token spread.
ROUTER_LOGIT, ROUTER_PENALTY = 3.0, 1.0
ROUTER_INIT = 0.1  # smaller routers at the start, so that their logits do not begin far apart
SLOW_ROUTERS = 16.0  # a power of two: the weights are scaled without rounding
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_ANSWER_TOKENS = 40
# Four calls, the answer and one more; the longest call has seven tokens.
MAX_TURNS, MAX_TURN_TOKENS = (6, 14)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE in which every number 0..99 and every word of the task is one token.

    With digits as tokens, a model of this size does not learn to add in minutes. Any text can be
    encoded and decoded, because all 256 bytes are in the vocabulary.
    """
    rng = random.Random(0)  # not the user's seed: one tokenizer serves the models of all seeds
    texts = [str(number) for number in range(100)]
    for _ in range(1000):
        row = make_problem(rng)
        texts.append(f"system\nuser\n{row['question']}\nassistant\n{row['answer']}")
    words = Regex(r"#+|\d{1,2}| ?[A-Za-z]+|\s| ?[^\sA-Za-z\d]")  # merges never cross these pieces
    bpe = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), as_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=CONTEXT,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(100)), (
        "a number was split"
    )
    return tokenizer


STEPS = {"qwen3_moe": 600, "glm4_moe": 1200}
# Keys of config.json beside those in `build_model`
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    # A dense layer, biased attention, heads rotated by half, and a shared expert for as many of
    # the parameters
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
    },
}


def build_model(tokenizer: PreTrainedTokenizerFast, family: str = "qwen3_moe") -> PreTrainedModel:
    """Return a small model that TP 2, PP 2 and 4, and EP 2, 4 and 8 can divide."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        # the usual 0.02 is for wide models: this one would learn much slower
        "initializer_range": 0.08,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **shape, **FAMILIES[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation("eager")
    for name, biases in model.named_buffers():
        # Of the router: they move the choice of experts, and pre-training leaves them as they are
        if name.endswith("e_score_correction_bias"):
            biases.normal_(std=ROUTER_BIAS)
    return model


class Stream:
    """Endless rows of token ids and labels: one problem each, then facts to the end of the row.

    Only answers and results have loss, not questions and operands. A second problem would not fit
    with its answer. With separate rows of facts the model saw too few problems: it copied a wrong
    number from the question in every fourth answer with steps.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.encode: Callable[[str], list[int]] = tokenizer.encode
        self.rng = random.Random(seed)
        self.problems = problems(self.rng, held_out_answers())

    def fact(self) -> tuple[str, str]:
        """Return an addition or subtraction of a problem's steps: its left side and its result."""
        total = self.rng.randint(0, 30)
        if self.rng.random() < 0.5:
            operand = self.rng.randint(0, min(10, 30 - total))
            return f"{total}+{operand}=", f"{total + operand}\n"
        operand = self.rng.randint(0, min(10, total))
        return f"{total}-{operand}=", f"{total - operand}\n"

    def problem(self) -> tuple[str, str]:
        row = next(self.problems)
        answer = row["answer"] if self.rng.random() < WORKED else f"#### {final_answer(row)}"
        return f"{START}user\n{row['question']}{END}\n{START}assistant\n", f"{answer}{END}\n"

    def row(self) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < ROW_TOKENS:
            asked, said = (self.encode(text) for text in (self.fact() if ids else self.problem()))
            ids += asked + said
            labels += [IGNORED] * len(asked) + said
        return ids[:ROW_TOKENS], labels[:ROW_TOKENS]

    def batch(self, rows: int = BATCH_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = zip(*(self.row() for _ in range(rows)), strict=True)
        return torch.tensor(ids), torch.tensor(labels)


class ToolStream:
    """Endless conversations about problems in which the calculator does the arithmetic.

    The environment and `Chat` make them as in a run, so the tokens are the same as there. The
    model's messages have loss, the calculator's results do not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.encode: Callable[[str], list[int]] = tokenizer.encode
        self.padding: int = tokenizer.pad_token_id
        self.chat = Chat(Renderer(tokenizer), "the embedded model", Calculator.tools)
        self.rng = random.Random(seed)
        self.problems = problems(self.rng, held_out_answers())

    def conversation(self) -> tuple[list[int], list[int]]:
        row = next(self.problems)
        *steps, answer = row["answer"].split("\n")
        if self.rng.random() >= CALLING:
            steps = []
        calculator = Calculator()
        ids = self.chat.first([{"role": "user", "content": row["question"]}])
        labels = [IGNORED] * len(ids)
        for text in (
            *(f"<tool_call>{step.partition('=')[0]}</tool_call>" for step in steps),
            answer,
        ):
            said = self.encode(f"{text}{END}")
            replies, _, done = calculator.step({"role": "assistant", "content": text})
            told = [] if done else self.chat.following(replies, said[-1])
            ids += said + told
            labels += said + [IGNORED] * len(told)
        return ids, labels

    def batch(self, rows: int = CONVERSATIONS) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and labels [rows, longest], padded on the right."""
        ids, labels = zip(*(self.conversation() for _ in range(rows)), strict=True)
        return self._padded(ids, self.padding), self._padded(labels, IGNORED)

    def _padded(self, rows: tuple[list[int], ...], value: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al., 2024).

    Unlike torch.optim.Muon it treats leading dimensions as a batch: the experts of a layer are one
    tensor. It learns the facts in less than half the steps that AdamW needs.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.mul_(group["momentum"]).add_(param.grad)
                update = orthogonalise(param.grad + group["momentum"] * average)
                # An orthogonal matrix has entries of rms 1/sqrt(longer side); AdamW's updates are
                # near 0.2.
                param.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(update.shape[-2:])))


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Set all singular values to about 1. The quintic's coefficients prefer speed to accuracy."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def balance_loss(
    router_logits: tuple[torch.Tensor, ...], experts_per_token: int, real: torch.Tensor
) -> torch.Tensor:
    """Return the load-balancing loss: mean over layers of sum_e load_e * probability_e.

    It counts real tokens only and is smallest when both are even. The loss in transformers balances
    only the average of the layers: with it, single layers had experts without any token while the
    loss was at its optimum.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits[real].float().softmax(-1)
        chosen = probabilities.topk(experts_per_token, -1).indices
        load = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0)
        losses.append(logits.shape[-1] * (load * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def router_penalty(router_logits: tuple[torch.Tensor, ...], real: torch.Tensor) -> torch.Tensor:
    """Return the mean square difference of real tokens' router logits from ROUTER_LOGIT."""
    layers = [(logits[real].float() - ROUTER_LOGIT).square().mean() for logits in router_logits]
    return torch.stack(layers).mean()


@torch.no_grad()
def shrink_routers(model: PreTrainedModel) -> None:
    """Make all routers smaller at the start of pre-training."""
    for layer in model.model.layers:
        layer.mlp.gate.weight.mul_(ROUTER_INIT)


@torch.no_grad()
def slow_routers(model: PreTrainedModel) -> None:
    """Divide the norm before the experts by SLOW_ROUTERS and multiply the matrices after it.

    The model's function stays the same. Adam changes every weight by about the learning rate, so a
    router logit changes in proportion to the size of its input. With the large learning rate of the
    demo, the near ties would be gone in ten steps, or every token would go to the same experts. In
    a large model with a learning rate of 1e-6 the routers hardly change.
    """
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.div_(SLOW_ROUTERS)
        layer.mlp.gate.weight.mul_(SLOW_ROUTERS)
        layer.mlp.experts.gate_up_proj.mul_(SLOW_ROUTERS)


def pretrain(
    model: PreTrainedModel, stream: Stream | ToolStream, steps: int, *, penalty: float = 0.0
) -> None:
    """Train with Muon on the matrices and AdamW on the rest; warm-up, then cosine to a fiftieth.

    Args:
        model: trained in place.
        stream: source of the batches.
        steps: number of batches.
        penalty: weight of `router_penalty`.
    """
    # Their rows are looked up or compared
    tables = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, param in model.named_parameters():
        (others if param.ndim < 2 or name.endswith(tables) else matrices).append(param)
    optimizers = [
        (Muon(matrices, MATRIX_LR), MATRIX_LR),
        (torch.optim.AdamW(others, OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0), OTHER_LR),
    ]
    start = time.perf_counter()
    for step in range(steps):
        ids, labels = stream.batch()
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        predictions = output.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(predictions, labels[:, 1:].flatten(), ignore_index=IGNORED)
        real = (ids != model.config.pad_token_id).flatten()
        balance = balance_loss(output.router_logits, model.config.num_experts_per_tok, real)
        total = loss + BALANCE_WEIGHT * balance
        if penalty:
            total = total + penalty * router_penalty(output.router_logits, real)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        scale = min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * cosine)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        model.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - start
            print(
                f"step {step + 1:4d}  loss {loss:.3f}  balance {balance:.3f}  {seconds:.0f} s",
                flush=True,
            )


@torch.no_grad()
def answers(
    model: Any, tokenizer: PreTrainedTokenizerFast, rows: list[Row], sampled: bool
) -> list[str]:
    """Return answers, greedy or sampled at temperature 1 from the full vocabulary."""
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    inputs: Any = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    how: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=sampled, **how)
    prompt_tokens = inputs["input_ids"].shape[1]
    texts: list[str] = tokenizer.batch_decode(output[:, prompt_tokens:], skip_special_tokens=True)
    return texts


@torch.no_grad()
def conversations(
    model: Any, tokenizer: PreTrainedTokenizerFast, rows: list[Row], sampled: bool
) -> list[tuple[str, int]]:
    """Return the last message and the number of calculator calls of a conversation per row."""
    chat = Chat(Renderer(tokenizer), "the embedded model", Calculator.tools)
    tokens = [chat.first([{"role": "user", "content": row["question"]}]) for row in rows]
    end = tokenizer.eos_token_id
    texts, calls = [""] * len(rows), [0] * len(rows)
    how: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    open_rows = list(range(len(rows)))
    for _ in range(MAX_TURNS):
        inputs: Any = tokenizer.pad(
            {"input_ids": [tokens[i] for i in open_rows]}, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=MAX_TURN_TOKENS, do_sample=sampled, **how)
        still_open = []
        for i, ids in zip(
            open_rows, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            said = ids[: ids.index(end)] if end in ids else ids
            texts[i] = tokenizer.decode(said)
            replies, _, done = Calculator().step({"role": "assistant", "content": texts[i]})
            if done or end not in ids:
                continue
            calls[i] += 1
            tokens[i] = [*tokens[i], *said, end, *chat.following(replies, end)]
            still_open.append(i)
        if not (open_rows := still_open):
            break
    return list(zip(texts, calls, strict=True))


def mean(values: list[bool] | list[int]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"


def final(text: str) -> str:
    # A plain comparison is enough: these models write nothing after the final answer.
    return text.rpartition("####")[2].strip()


def report_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print accuracy on the evaluation set, with and without steps."""
    rows = evaluation_rows()
    for title, sampled in (("greedy", False), ("T=1", True)):
        texts = answers(model, tokenizer, rows, sampled)
        right = [final(text) == final_answer(row) for text, row in zip(texts, rows, strict=True)]
        by_steps = [good for good, text in zip(right, texts, strict=True) if "=" in text]
        at_once = [good for good, text in zip(right, texts, strict=True) if "=" not in text]
        print(
            f"{title:6s}  accuracy {mean(right)}  share with steps {len(by_steps) / len(rows):.3f}"
        )
        print(f"        accuracy with steps {mean(by_steps)}  at once {mean(at_once)}")


def report_conversations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print accuracy on the evaluation set, with and without calls of the calculator."""
    rows = evaluation_rows()
    for title, sampled in (("greedy", False), ("T=1", True)):
        said = conversations(model, tokenizer, rows, sampled)
        right = [
            final(text) == final_answer(row) for (text, _), row in zip(said, rows, strict=True)
        ]
        calls = [count for _, count in said]
        with_calls = [good for good, count in zip(right, calls, strict=True) if count]
        at_once = [good for good, count in zip(right, calls, strict=True) if not count]
        print(
            f"{title:6s}  accuracy {mean(right)}  share with calls "
            f"{len(with_calls) / len(rows):.3f}"
        )
        print(
            f"        accuracy with calls {mean(with_calls)}  at once {mean(at_once)}  calls "
            f"{mean(calls)}"
        )


@torch.no_grad()
def report_load(model: PreTrainedModel, stream: Stream | ToolStream) -> None:
    """Print how evenly the experts are used."""
    ids, _ = stream.batch(64)
    output = model(input_ids=ids, output_router_logits=True, use_cache=False)
    real = (ids != model.config.pad_token_id).flatten()
    for layer, logits in enumerate(output.router_logits):
        chosen = logits[real].topk(model.config.num_experts_per_tok, -1).indices.flatten()
        load = chosen.bincount(minlength=logits.shape[-1]) / chosen.numel()
        print(f"layer {layer}  expert load {' '.join(f'{share:.3f}' for share in load.tolist())}")


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Write files beside `folder`, then move each, so that no file is ever incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(draft)
        for file in sorted(draft.iterdir()):
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_data(folder: Path) -> None:
    for name, rows in (("train", training_rows()), ("eval", evaluation_rows())):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"word_problems_{name}.jsonl").write_text(text, encoding="ascii")


@torch.no_grad()
def give_padding_a_vector(model: PreTrainedModel) -> None:
    """The mean of all other tokens' embeddings for the padding token, which transformers leaves at
    exactly zero.

    A model may sample that token. RMSNorm divides by sqrt(0 + eps) there, and its gradient is a
    thousand times any other. Training never reads the row, so nothing else changes.
    """
    table, padding = model.get_input_embeddings().weight, model.config.pad_token_id
    table[padding] = 0.0
    table[padding] = table.sum(0) / (len(table) - 1)


def write_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    give_padding_a_vector(model)
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Names by which version 4 of transformers, and tools built on it, find these; version 5 takes
    # both.
    names: list[tuple[str, str, Any]] = [
        ("tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast")
    ]
    if model.config.model_type == "qwen3_moe":
        names.append(("config.json", "num_experts", model.config.num_experts))
    for name, key, value in names:
        content = json.loads((folder / name).read_text(encoding="utf-8")) | {key: value}
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", type=Path, help="folder for the data files")
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument(
        "--with-calculator",
        action="store_true",
        help="go on from tiny-moe with conversations that call the calculator",
    )
    parser.add_argument(
        "--near-ties", action="store_true", help="routers whose choices bfloat16 changes"
    )
    parser.add_argument(
        "--family", choices=FAMILIES, default="qwen3_moe", help="model_type of transformers"
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights and stream; 1: as shipped")
    parser.add_argument(
        "--steps",
        type=int,
        help="of pre-training; 600, 900 with near ties, 350 with the calculator, 1200 of GLM",
    )
    args = parser.parse_args()
    if args.near_ties and args.with_calculator:
        parser.error(
            "--near-ties makes a model from nothing, --with-calculator goes on from tiny-moe"
        )
    if args.family != "qwen3_moe" and (args.near_ties or args.with_calculator):
        parser.error("--near-ties and --with-calculator are of qwen3_moe")
    if args.data is None and args.out is None:
        parser.error("nothing to make: give --data, --out or both")
    if args.data is not None:
        replace_files(args.data, write_data)
        print(f"wrote the data to {args.data}")
    if args.out is None:
        return
    # The same sums on every run; a second thread would save only a quarter
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.with_calculator:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(TINY_MOE)
        model = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
        model.set_experts_implementation("eager")
        stream: Stream | ToolStream = ToolStream(tokenizer, args.seed)
    else:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, args.family)
        stream = Stream(tokenizer, args.seed)
    is_first = not args.near_ties and args.family == "qwen3_moe"
    if not is_first:
        # A quarter faster; tiny-moe was made without
        model.set_experts_implementation("grouped_mm")
    if args.near_ties:
        shrink_routers(model)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, seed {args.seed}")
    steps = args.steps or (
        350 if args.with_calculator else 900 if args.near_ties else STEPS[args.family]
    )
    pretrain(model, stream, steps, penalty=ROUTER_PENALTY if args.near_ties else 0.0)
    if args.near_ties:
        slow_routers(model)

    def write(folder: Path) -> None:
        write_checkpoint(folder, model, tokenizer)
        # A tokenizer that was loaded would be saved with a note of where it was
        if args.with_calculator:
            for name in TOKENIZER_FILES:
                shutil.copyfile(TINY_MOE / name, folder / name)

    replace_files(args.out, write)
    print(f"wrote the checkpoint to {args.out}")
    # Report on what was written, read back: casting the model to and fro would round its rotary
    # table too.
    written = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    (report_conversations if args.with_calculator else report_answers)(written, tokenizer)
    report_load(written, stream)


if __name__ == "__main__":
    main()

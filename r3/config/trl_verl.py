"""Settings of TRL and verl and their names in R3, for the mapping page and for error messages."""

from __future__ import annotations

import re
from functools import cache

# By the table of docs/coming-from-trl-and-verl.md: a line has names of the other program, and what
# to write in R3.
TABLES = {
    "grpo": """\
`model` argument of the trainer | `model.path`
`train_dataset` with column `prompt` | `data.path`, `data.prompt_key`
`reward_funcs`, `reward_weights` | `reward.function`, `reward.weights`
`num_generations` | `rollout.group_size`
`per_device_train_batch_size`, `gradient_accumulation_steps`, `generation_batch_size` | \
`rollout.prompts_per_step` (samples per step = prompts * group size)
`steps_per_generation` | `train.updates_per_step` = `steps_per_generation` / \
`gradient_accumulation_steps`
`num_iterations` | `train.epochs_per_step`
`max_completion_length` | `rollout.max_response_tokens`
`temperature`, `top_p`, `top_k` | `rollout.temperature`, `rollout.top_p`, `rollout.top_k`
`learning_rate`, `warmup_steps`, `lr_scheduler_type` | `train.lr`, `train.warmup_updates`, \
`train.lr_schedule`
`max_steps` | `train.steps`
`max_grad_norm`, `weight_decay`, `adam_beta1`, `adam_beta2` | `train.clip_grad`, \
`train.weight_decay`, `train.beta1`, `train.beta2`
`beta` | `algo.kl_coef`, with `--algo.kl_in loss --algo.kl_estimator k3`
`epsilon`, `epsilon_high` | `algo.clip_low`, `algo.clip_high`
`delta` | `algo.clip_dual` is related, for negative advantages only
`loss_type="grpo"` | `--algo.aggregation sequence`
`loss_type="dapo"` (TRL's default) | `--algo.aggregation token`
`loss_type="dr_grpo"` | `--algo.aggregation constant`
`loss_type="cispo"` | `--algo.loss cispo --algo.clip_low 1`
`importance_sampling_level="sequence"` | `--algo.loss gspo --algo.aggregation sequence`
`scale_rewards="group"`, `False` | `--algo.advantage grpo`, `dr_grpo`
`scale_rewards="batch"` | `--algo.advantage reinforce_pp_baseline`
`vllm_importance_sampling_mode` `token_truncate`, `token_mask`, `sequence_truncate`, \
`sequence_mask` | `algo.correction` `token_tis`, `token_mis`, `sequence_tis`, `sequence_mis`
`vllm_importance_sampling_cap` | `algo.correction_high`
`mask_truncated_completions` | `algo.overlong_filter`
`cast_lm_head_to_fp32` | `model.fp32_head`
`use_vllm`, `vllm_mode="colocate"` | always
`vllm_gpu_memory_utilization` | `engine.memory_fraction`
`vllm_tensor_parallel_size` | `parallel.engine_tp`
`vllm_max_model_length` | `engine.max_model_len`
`vllm_enable_sleep_mode` | always; `engine.sleep_level`
`gradient_checkpointing` | `model.recompute`
`bf16` | `model.dtype`, `engine.dtype`
`eval_dataset`, `eval_steps`, `num_generations_eval` | `eval.path`, `eval.every`, `eval.samples`
`save_steps`, `save_total_limit`, `resume_from_checkpoint` | `checkpoint.every`, \
`checkpoint.keep`, the same `log.dir`
`save_strategy="best"`, `metric_for_best_model`, `greater_is_better`, `load_best_model_at_end` | \
`checkpoint.keep_best`, `checkpoint.best_is`; `python -m r3.export RUN --step best`
`EarlyStoppingCallback`, `early_stopping_patience` | `train.patience`
`output_dir`, `log_completions` | `log.dir`, `log.show_every` and `log.rollouts_every`
`report_to`, `project` | `log.tracker`, `log.project`
`peft_config` with `r`, `lora_alpha`, `use_rslora`, `target_modules` | `lora.rank`, `lora.alpha`, \
`lora.rslora`, `lora.targets` ([LoRA](lora.md))
`trainer.train()` | `r3.train` ([Train from Python](python.md))
`seed` | `train.seed`
""",
    "sft": """\
rows with `messages` | `--data.prompt_key messages --data.answer_key ''`
rows with `prompt` and `completion` | `--data.prompt_key prompt --data.answer_key completion`
`assistant_only_loss`, `completion_only_loss` | always: assistant messages alone are learned
`per_device_train_batch_size`, `gradient_accumulation_steps` | `rollout.prompts_per_step` rows \
per step over all ranks
`packing`, `max_length` | always packed up to `train.micro_batch_tokens`; \
`data.max_prompt_tokens`, `--data.on_too_long drop`: nothing is truncated
`num_train_epochs`, `max_steps` | `train.steps`
""",
    "gkd": """\
`teacher_model_name_or_path` | `--train.objective distill`, `algo.teacher`
`lmbda=1`, `beta=1` (student's samples, reverse KL) | always, from the sampled token instead of \
the whole vocabulary
`lmbda=0`, `seq_kd` (teacher's samples) | `--train.objective sft` on rows that the teacher wrote
`temperature` | `rollout.temperature`
""",
    "verl": """\
`actor_rollout_ref.model.path` | `model.path`
`data.train_files`, `data.val_files` | `data.path`, `eval.path`
`data.prompt_key`, `reward_model.ground_truth` in a row | `data.prompt_key`, `--data.answer_key \
reward_model.ground_truth`
`data.train_batch_size` | `rollout.prompts_per_step`
`data.max_prompt_length`, `data.max_response_length` | `data.max_prompt_tokens`, \
`rollout.max_response_tokens`
`data.filter_overlong_prompts` | `--data.on_too_long drop`
`actor_rollout_ref.rollout.n` | `rollout.group_size`
`actor_rollout_ref.rollout.temperature`, `top_p`, `top_k` (-1 = all) | `rollout.temperature`, \
`rollout.top_p`, `rollout.top_k` (0 = all)
`actor_rollout_ref.actor.ppo_mini_batch_size` (prompts) | `train.updates_per_step` = \
`train_batch_size` / `ppo_mini_batch_size`
`actor_rollout_ref.actor.ppo_epochs` | `train.epochs_per_step`; `actor.shuffle` `false`: always
`use_dynamic_bsz`, `ppo_max_token_len_per_gpu` | `train.micro_batch_tokens`; always dynamic
`actor.optim.lr`, `lr_warmup_steps`, `lr_decay_style`, `weight_decay`, `clip_grad` | `train.lr`, \
`train.warmup_updates`, `train.lr_schedule`, `train.weight_decay`, `train.clip_grad`
`actor.clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c` | `algo.clip_low`, `algo.clip_high`, \
`algo.clip_dual`
`actor.policy_loss.loss_mode` `vanilla`, `gspo` | `algo.loss` `ppo_clip`, `gspo`
`actor.loss_agg_mode` `token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum-norm` | \
`algo.aggregation` `token`, `sequence`, `constant`
`actor.entropy_coeff` | `algo.entropy_coef`
`actor.use_kl_loss`, `kl_loss_coef`, `kl_loss_type` | `--algo.kl_in loss`, `algo.kl_coef`, \
`algo.kl_estimator` (`low_var_kl` is `k3`)
`algorithm.use_kl_in_reward`, `kl_ctrl.kl_coef` | `--algo.kl_in reward`, `algo.kl_coef`
`algorithm.adv_estimator` `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline` | \
`algo.advantage` `grpo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`
`register_policy_loss`, `register_adv_est` | `--algo.loss my.py:f`, `--algo.advantage my.py:g` \
([Adding a loss](adding-a-loss.md))
`algorithm.norm_adv_by_std_in_grpo=False` | `--algo.advantage dr_grpo`
`algorithm.rollout_correction.rollout_is`, `rollout_is_threshold` | `algo.correction`, \
`algo.correction_high`
`algorithm.rollout_correction.bypass_mode` | `--algo.correction bypass`
`algorithm.filter_groups` (DAPO recipe), `filter_groups.metric` `acc`, `seq_final_reward` | \
`algo.dynamic_sampling`, `algo.dynamic_sampling_metric` `correct`, `reward`
`overlong_buffer` (DAPO recipe) | `algo.overlong_buffer`, `algo.overlong_penalty`
`actor.megatron.tensor_model_parallel_size`, `expert_model_parallel_size`, \
`expert_tensor_parallel_size`, `pipeline_model_parallel_size`, \
`virtual_pipeline_model_parallel_size`, `context_parallel_size` | `parallel.tp`, `parallel.ep`, \
`parallel.etp`, `parallel.pp`, `parallel.vpp`, `parallel.cp`
`rollout.tensor_model_parallel_size` | `parallel.engine_tp`
`model.lora_rank`, `lora_alpha`, `target_modules`, `lora_adapter_path` | `lora.rank`, \
`lora.alpha`, `lora.targets`, `lora.start`
`rollout.gpu_memory_utilization`, `max_num_seqs` | `engine.memory_fraction`, `engine.max_num_seqs`
`actor.megatron.*_offload` | gradients and optimizer always leave the device while the engine has it
`actor.router_replay.mode` R2 or R3, `rollout.enable_rollout_routing_replay` | `replay.mode` `r2` \
or `r3`: one setting
`rollout.multi_turn.*`, agent loops | `env.*`, [workflows](workflows.md); agents of any language: \
`env.command`, [endpoint](endpoint.md)
`custom_reward_function.path`, `name` | `--reward.function path/to/file.py:name`
`verl.trainer.sft_trainer` | `--train.objective sft`
`trainer.total_training_steps`, `test_freq`, `save_freq` | `train.steps`, `eval.every`, \
`checkpoint.every`
`trainer.max_actor_ckpt_to_keep` | `checkpoint.keep`, `checkpoint.keep_best`
`actor.checkpoint.save_contents` with `hf_model` | `checkpoint.export_every`
`trainer.default_local_dir`, `resume_mode=auto` | `log.dir`; always resumes
`trainer.rollout_data_dir` | `log.rollouts_every`
`trainer.logger`, `project_name` | TensorBoard, `metrics.jsonl`, and `log.tracker`, `log.project`
""",
}


@cache
def _meanings() -> dict[str, str]:
    """What to write in R3, by the last word of the other program's name.

    The first table that has a name decides; a name has one line per value.
    """
    found: dict[str, str] = {}
    for lines in TABLES.values():
        in_table: dict[str, list[str]] = {}
        for line in lines.splitlines():
            theirs, ours = line.split(" | ")
            names, settings = (re.findall("`([^`]*)`", cell) for cell in (theirs, ours))
            is_paired = len(names) == len(settings) and "=" not in theirs
            for place, name in enumerate(names):
                word = name.partition("=")[0].rpartition(".")[2]
                in_table.setdefault(word, []).append(settings[place] if is_paired else ours)
        found = {word: " or ".join(each) for word, each in in_table.items()} | found
    return found


def meaning(name: str) -> str:
    """What to write in R3 for a setting of TRL or verl; "" if it is none."""
    return _meanings().get(name.rpartition(".")[2], "").replace("`", "")

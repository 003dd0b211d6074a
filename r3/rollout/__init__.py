"""From prompts to rewarded samples: conversations, one round, one step, evaluation."""

from r3.rollout.collect import Collector, is_cut, rollout_metrics, without_end
from r3.rollout.conversation_setup import (
    ConversationRules,
    ConversationSetup,
    EnvironmentFailed,
    OneTurn,
    readable_message,
)
from r3.rollout.heldout import accuracy_metrics, is_graded, none_right, pass_at_k, readable
from r3.rollout.round import Round, RoundResult
from r3.rollout.step import BudgetError, Collected, NoSignalError, RolloutSource, rollout_source
from r3.rollout.step_rewards import (
    DroppedError,
    gather_rewards,
    groups_with_loss,
    groups_with_signal,
    require_groups,
    reward_metrics,
)
from r3.rollout.task import Task, read_task

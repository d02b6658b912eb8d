"""Rewards: graders with a name and a version (`grader`), for a `GraderPool` or any caller."""

from longtail.errors import GradeError, SandboxUnavailable
from longtail.trainer_adapter.rewards.combine import CombinedGrader, Part
from longtail.trainer_adapter.rewards.grader import Grader, Score, label_of
from longtail.trainer_adapter.rewards.gym import ReasoningGymGrader
from longtail.trainer_adapter.rewards.math_answers import MathGrader
from longtail.trainer_adapter.rewards.patterns import FormatGrader, RegexGrader
from longtail.trainer_adapter.rewards.programs import CodeGrader
from longtail.trainer_adapter.rewards.sandbox import Limits, Sandbox
from longtail.trainer_adapter.rewards.specs import GRADERS, make_grader
from longtail.trainer_adapter.rewards.units import UnitsGrader

__all__ = [
    "GRADERS",
    "CodeGrader",
    "CombinedGrader",
    "FormatGrader",
    "GradeError",
    "Grader",
    "Limits",
    "MathGrader",
    "Part",
    "ReasoningGymGrader",
    "RegexGrader",
    "Sandbox",
    "SandboxUnavailable",
    "Score",
    "UnitsGrader",
    "label_of",
    "make_grader",
]

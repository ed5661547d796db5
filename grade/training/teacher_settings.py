"""Settings of a run with a teacher (`grade.training.teacher`), known without torch."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field, NonNegativeFloat

from grade.config import Config, Text


class TeacherSettings(Config):
    """Settings of a run with a teacher."""

    teacher: str | None = Field(
        None, description="model to learn from: a folder or hub id, an adapter of the same base, or base"
    )
    teacher_beta: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0,
        description="divergence from the teacher, as TRL's beta: 0 forward KL, 1 reverse KL, between them generalised "
        "Jensen-Shannon",
    )
    teacher_weight: NonNegativeFloat = Field(1.0, description="weight of the divergence, in reward per nat and token")
    teacher_context: Text = Field(
        "", description="text that the teacher alone reads before the prompt; {column} is the row's"
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_reward(cls, values: dict[str, Any]) -> dict[str, Any]:
        """No reward where none is named: the teacher is what is learned."""
        if "reward" in cls.model_fields and values.get("teacher") and values.get("reward") is None:
            return {**values, "reward": []}
        return values

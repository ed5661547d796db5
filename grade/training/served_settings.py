"""Settings of a run whose completions a server samples (`grade.training.served`), known without torch."""

from __future__ import annotations

from typing import Self

import pydantic
from pydantic import Field, PositiveFloat

from grade.config import Config
from grade.errors import InputError
from grade.gradients.methods import TILT


class SamplerSettings(Config):
    """Settings of a run whose completions a server samples."""

    sampler: str = Field(pattern="^https?://", description="address of a vLLM server, as http://host:port")
    sampler_folder: str | None = Field(
        None, description="folder where adapters are handed to the server, which reads the same path; null: temporary"
    )
    sampler_max_difference: PositiveFloat = Field(
        1.0, description="a run ends where the server's log-probabilities differ by more on average, in nats per token"
    )

    @pydantic.model_validator(mode="after")
    def _check_method(self) -> Self:
        if not hasattr(self, "num_generations") or self.method == TILT:
            why = "which samples nothing, or soft tokens, or has a token bias"
            raise InputError("sampler", self.sampler, f"none with {self.method}, {why}")
        return self

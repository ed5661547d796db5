"""Settings of the adapter, known without torch."""

from pydantic import Field

from grade.config import Config


class LoraSettings(Config):
    """Settings of the trained adapter (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, ge=1, description="scale is alpha / r")
    target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        description="names of the linear layers that get an adapter; the default is all of a base that lacks one",
    )

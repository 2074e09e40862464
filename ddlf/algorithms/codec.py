"""How updates and weights are made smaller for the network: every codec by name. Runs on master and workers.

``payload.py`` says what a codec is, ``encoding.py`` applies it to a model's tensors.
"""

from dataclasses import dataclass
from functools import lru_cache

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.payload import Codec, Float32s, Payload, added
from ddlf.algorithms.powersgd import PowerSGD
from ddlf.algorithms.rounding import BFloat16, Float16, Float32, Int4, Int8
from ddlf.algorithms.topk import TopK
from ddlf.errors import ConfigError

__all__ = [
    "CODEC",
    "BFloat16",
    "Codec",
    "Float16",
    "Float32",
    "Float32s",
    "Int4",
    "Int8",
    "Outward",
    "Payload",
    "PowerSGD",
    "TopK",
    "added",
    "codec_named",
]

CODEC: Family[Codec] = Family(
    "codec",
    float32=Float32,
    float16=Float16,
    bfloat16=BFloat16,
    int8=lambda: Int8(),
    **{"int8-block": lambda block=4096: Int8(block=block)},
    **{"int4-block": Int4},
    topk=TopK,
    powersgd=PowerSGD,
)
"""Every codec by name."""


@lru_cache(maxsize=64)
def codec_named(text: str) -> Codec:
    """Return ``CODEC.read(text)``, which each update of a run names again."""
    return CODEC.read(text)


@dataclass(frozen=True, slots=True)
class Outward(Named):
    """How weights travel to the workers: ``float16``, or ``delta:int8`` for the difference to what a worker holds.

    Args:
        codec: Codec of the weights, or of the difference.
        delta: Whether the difference travels.

    Raises:
        ConfigError: The codec is biased, and whole weights travel.
    """

    codec: Codec
    delta: bool = False

    def __post_init__(self) -> None:
        if self.codec.biased and not self.delta:
            raise ConfigError(
                f"weights cannot travel as {self.codec.name!r}: what it loses would never come back",
                hint=f"use float32, float16 or bfloat16; or delta:{self.codec.name} where the master gives them to the workers",
            )

    @classmethod
    def read(cls, text: str) -> "Outward":
        """Return what a text says: a codec's, or one after ``delta:``.

        Raises:
            ConfigError: The text does not name a codec, or the codec cannot encode weights.
        """
        return cls(CODEC.read(text.removeprefix("delta:")), text.startswith("delta:"))

    def __str__(self) -> str:
        return "delta:" * self.delta + str(self.codec)

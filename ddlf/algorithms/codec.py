"""All codecs by name. A codec makes updates and weights smaller for the network. Runs on master and workers.

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
    """Return ``CODEC.read(text)`` from a cache, because each update of a run names its codec."""
    return CODEC.read(text)


@dataclass(frozen=True, slots=True)
class Outward(Named):
    """The encoding of weights for the workers: ``float16``, or ``delta:int8`` for the difference to a worker's weights.

    Args:
        codec: Codec for the weights, or for the difference.
        delta: Whether the master sends the difference instead of the weights.

    Raises:
        ConfigError: The codec is biased, and would encode whole weights.
    """

    codec: Codec
    delta: bool = False

    def __post_init__(self) -> None:
        if self.codec.biased and not self.delta:
            raise ConfigError(
                f"weights cannot travel as {self.codec.name!r}: the lost part would never arrive",
                hint=f"use float32, float16 or bfloat16; or delta:{self.codec.name}, for weights from the master to the workers",
            )

    @classmethod
    def read(cls, text: str) -> "Outward":
        """Return the encoding that a text names: a codec, or ``delta:`` and a codec.

        Raises:
            ConfigError: The text does not name a codec, or the codec cannot encode weights.
        """
        return cls(CODEC.read(text.removeprefix("delta:")), text.startswith("delta:"))

    def __str__(self) -> str:
        return "delta:" * self.delta + str(self.codec)

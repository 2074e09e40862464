"""All outer optimizers by name. They apply a merged update to the weights. Runs on the master.

An outer optimizer is a value with two pure functions::

    init(weights) -> state
    update(state, weights, merged, trainable) -> (state, weights)

The state is a list of arrays, so that a checkpoint can store it. An outer optimizer never modifies its arguments.

| rule | step | file |
|---|---|---|
| ``subtract``, ``fedavg`` | the merged update | ``per_tensor.py`` |
| ``nesterov``, ``diloco``, ``fedavgm`` | a velocity of merged updates | ``per_tensor.py`` |
| ``fedadagrad``, ``fedadam``, ``fedyogi`` | of each weight, by the size of its updates | ``adaptive.py`` |
| ``streaming`` | that of ``diloco``, a fragment of the weights in each round | ``streaming.py`` |
"""

from ddlf.algorithms.adaptive import FedAdagrad, FedAdam, FedYogi
from ddlf.algorithms.named import Family
from ddlf.algorithms.per_tensor import FedAvgM, Nesterov, OuterOptimizer, State, Subtract
from ddlf.algorithms.streaming import Streaming

__all__ = [
    "OUTER",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Nesterov",
    "OuterOptimizer",
    "State",
    "Streaming",
    "Subtract",
]

OUTER: Family[OuterOptimizer] = Family(
    "outer optimizer",
    subtract=Subtract,
    nesterov=Nesterov,
    fedavgm=FedAvgM,
    fedadam=FedAdam,
    fedadagrad=FedAdagrad,
    fedyogi=FedYogi,
    streaming=Streaming,
    fedavg=lambda: Subtract(),
    diloco=Nesterov,
)
"""Every outer optimizer by name. The last two are aliases; checkpoints store and compare the original names."""

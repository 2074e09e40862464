"""Remote calls: one function on all workers, with the same or with different arguments.

python apps/calculate.py --local 3
ddlf run apps/calculate.py --config cluster.yaml
"""

import ddlf


async def calculate(self, a, b, c):
    """Run on a worker; `self` is the worker, and keeps its attributes between calls."""
    self.data["calls"] = self.data.get("calls", 0) + 1
    return a + b - c


async def main(cluster: ddlf.Cluster) -> None:
    """Run on the master."""
    print("the same arguments:", await cluster.run_method(calculate, a=10, b=8, c=2))
    print("different ones:    ", await cluster.run_method(calculate, dict(a=10, b=8, c=2), dict(a=100, b=80, c=20)))

    await cluster.add_method(calculate)  # stays on the workers until removed
    print("hosted, by name:   ", await cluster.run("calculate", a=1, b=2, c=3))
    print("on worker 1 only:  ", await cluster.run_at(1, calculate, a=1, b=2, c=3))
    await cluster.remove_method(calculate)

    await cluster.set_variable("v", each=list(range(cluster.N)))
    print("a variable each:   ", await cluster.get_variable("v"))
    print("code:              ", await cluster.run_code("self.data['calls'] * 100 + self.id"))
    await cluster.clean()


if __name__ == "__main__":
    ddlf.main(main)

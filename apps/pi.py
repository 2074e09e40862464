"""Any work, not only training: estimate pi by throwing random points on all workers at once.

python apps/pi.py --local 2 -p points=20_000_000
"""

import math
import time

import numpy as np

import ddlf


def count_inside(self, points, seed):
    """Count the points of the unit square that fall into the quarter circle. Each worker has its own stream of numbers."""
    random = np.random.default_rng([seed, self.id])
    inside, remaining = 0, points
    while remaining:
        size = min(remaining, 1_000_000)
        x, y = random.random(size), random.random(size)
        inside += int(np.count_nonzero(x * x + y * y < 1))
        remaining -= size
    return inside


async def main(cluster: ddlf.Cluster, points: int = 10_000_000, seed: int = 0) -> None:
    """Share the points over the workers and add up their counts."""
    share, remainder = divmod(points, cluster.N)
    begin = time.perf_counter()
    inside = await cluster.run_method(
        count_inside, *(dict(points=share + (number < remainder), seed=seed) for number in range(cluster.N))
    )
    estimate = 4 * sum(inside) / points
    error = math.sqrt(math.pi * (4 - math.pi) / points)
    print(f"pi is about {estimate:.6f} (off by {abs(estimate - math.pi):.6f}, standard error {error:.6f})")
    print(f"{points:,} points on {cluster.N} workers in {time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    ddlf.main(main)

"""The account of releases of a training by peers: who pays for what. Runs on the server.

If the server adds the noise, a round is a release, and each peer whose update is in its sum pays for it. If each peer adds a
share, the server sees each post alone. So each post is a release, with the noise of one share, and its peer pays when it arrives.
"""

from __future__ import annotations

from pathlib import Path

from ddlf.peers.plan import Plan
from ddlf.privacy.accountant import DELTA, Cost, Noise
from ddlf.training.checkpoints.releases import RELEASES, ReleaseAccount, Terms


class Spending:
    """Counts the releases of a training by peers before they leave.

    Args:
        plan: The plan, with clip and noise.
        folder: The folder of the run.
        continues: Whether the run continues. Then it must have its account.

    Raises:
        CheckpointError: The account is missing, damaged, or has other terms; or the disk refuses.
        BudgetSpent: Not even the next release fits into the budget.
        ConfigError: dp-accounting is not installed.
    """

    def __init__(self, plan: Plan, folder: Path, *, continues: bool) -> None:
        mechanism = plan.mechanism
        assert mechanism is not None
        self.is_by_post = mechanism.trust == "nobody"
        self._noise = Noise(multiplier=mechanism.noise_of_one if self.is_by_post else mechanism.noise)
        terms = Terms(unit="peer", clip=mechanism.clip, delta=DELTA if plan.delta is None else plan.delta)
        has_account = continues or (folder / RELEASES).exists()
        open_account = ReleaseAccount.resume if has_account else ReleaseAccount.begin
        self.account = open_account(folder, terms, plan.privacy_budget)
        self.account.check(self._cost(0))  # of a peer that was in no release

    def check_complete(self, releases: int, posts: int) -> None:
        """Refuse an account that is older than the journal.

        Args:
            releases: Releases that the account had at the last mean in the journal.
            posts: Posts in the journal.

        Raises:
            CheckpointMismatch: The account has fewer releases.
        """
        self.account.check_complete(max(releases, posts * self.is_by_post))

    def count(self, *peers: int) -> str:
        """Count a release of some peers. After the return, it may leave.

        Returns:
            Why these peers cannot take part in another release; empty if they can.

        Raises:
            BudgetSpent: It would exceed the budget, so it must not leave.
            CheckpointError: The disk refuses.
        """
        cost = self._cost(*peers)
        self.account.count(cost, has_left=self.is_by_post)
        return self.account.spent(cost)

    def spent_by_post(self) -> dict[int, str]:
        """Return the peers that must not post again, and why, if each post is a release."""
        peers = self.epsilons() if self.is_by_post else {}
        return {peer: reason for peer in peers if (reason := self.account.spent(self._cost(peer)))}

    def epsilons(self) -> dict[int, float]:
        """Return the epsilon of each peer that was in a release."""
        return {int(peer): epsilon for peer, epsilon in self.account.accountant.epsilons().items()}

    def epsilon(self, peer: int) -> float:
        """Return the epsilon of a peer; 0 before its first release."""
        return self.account.accountant.epsilon(str(peer))

    def line(self) -> str:
        """Return what the server says after a release."""
        accountant = self.account.accountant
        largest = max(self.epsilons().items(), key=lambda pair: pair[1])
        releases = f"{accountant.releases:,} release{'s' * (accountant.releases != 1)}"
        return f"epsilon {largest[1]:.4g} at delta {accountant.delta:g} after {releases}, the most of a peer ({largest[0]})"

    def _cost(self, *peers: int) -> Cost:
        return Cost(members=tuple(map(str, sorted(set(peers)))), noise=self._noise)

"""``ddlf peers audit``: run a release many times, and show a lower bound on its epsilon. Runs anywhere."""

from __future__ import annotations

import argparse

from ddlf.cli.parsing import Parser, action, number


def audit(options: argparse.Namespace) -> int:
    """Run ``ddlf peers audit``. The exit code is 1 if a lower bound is above the stated value."""
    from ddlf.peers.auditing import audit_rounds
    from ddlf.peers.plan import Plan
    from ddlf.privacy.accountant import Noise, epsilon

    least = options.least
    plan = Plan(
        way="rounds",
        merge="mean",
        clip=options.clip,
        noise=options.noise,
        trust=options.trust,
        quorum=least,
        divisor=max(2, least),
        delta=options.delta,
    )
    noise_source = "the server adds the noise" if options.trust == "server" else f"{least} peers or more add the noise"
    print(f"release   clip {options.clip:g}, noise {options.noise:g}; {noise_source}", flush=True)
    result = audit_rounds(plan, runs=options.runs)
    print(f"stated    epsilon {result.stated:.4g} at delta {result.delta:g}, for one release")
    if (mechanism := plan.mechanism) is not None and mechanism.least > 1:
        epsilon_of_post = epsilon({Noise(multiplier=mechanism.noise_of_one): 1}, result.delta)
        print(
            f"server    it sees each post alone, with one share of the noise: epsilon {epsilon_of_post:.4g}, which is not measured here"
        )
    print(f"measured  {result.runs:,} releases, half of them with a worst-case update, which somebody tries to notice")
    print(
        f"bound     epsilon is at least {result.as_gaussian:.4g} if the noise is Gaussian, {result.as_any:.4g} in any case (95 %)"
    )
    if result.is_refuted:
        print("result    REFUTED: this build protects less than it states. About 1 in 20 audits says so by chance")
        return 1
    print("result    consistent: no bound is above the stated value")
    return 0


def _options(parser: Parser) -> None:
    parser.add(
        "--noise", type=float, required=True, metavar="Z", help="noise multiplier: std of the noise by clip norm"
    )
    parser.add("--clip", type=float, default=1.0, metavar="C", help="largest norm of an update (default: 1)")
    parser.add(
        "--trust",
        choices=("server", "nobody"),
        default="server",
        help="who may see updates without noise (default: server)",
    )
    parser.add("--least", type=number(1, 1000), default=1, metavar="N", help="least updates in a release (default: 1)")
    parser.add("--runs", type=number(1), default=20_000, metavar="N", help="number of releases (default: 20000)")
    parser.add("--delta", type=float, default=1e-5, metavar="D", help="delta of epsilon (default: 1e-5)")


AUDIT = action(
    "measure what noise protects",
    "Run the code of a round (clip, sum, noise, rounding) many times, with and without one worst-case update, and show the "
    "lower bound on epsilon that follows beside the stated value.",
    _options,
    audit,
    *("ddlf peers audit --noise 1", "ddlf peers audit --noise 1 --trust nobody --least 8"),
)

"""Attack the gate for joining workers with forged, replayed and reflected greetings, and with a flood.

    python -m tests.trials.gate [--greetings 1000000] [--sockets 2000] [--workers 256] [--drips 500]

- ``greetings``: Give changed copies of a genuine greeting to the functions of the gate. Bits are flipped, parts come from
  another greeting, and proofs of the gate are sent back. The gate may accept none.
- ``sockets``: Do the same over real connections to a real gate. No place may have a worker afterwards.
- ``workers``: Let this number of workers join from one address while strangers hold connections open. All must have joined
  within 10 seconds, and each must have its own place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from typing import Any

from ddlf.cluster.launch.gate import Gate
from ddlf.errors import DDLFError
from ddlf.rpc.handshake import PROOF_BYTES
from ddlf.rpc.join import ANSWER, KEPT, OFFER, OPENING, GateVerdict, Greeting, Offer, Offering
from tests.trials.flood import strangers
from tests.trials.options import read_options

TOKEN = b"gate-" + bytes(range(97, 123)) * 2
LIMIT_S = 10.0


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Return a copy of the data with one to eight flipped bits."""
    changed = bytearray(data)
    for bit in chance.sample(range(8 * len(data)), chance.randint(1, 8)):
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forged(offering: Offering, reply: bytes, before: tuple[bytes, bytes], chance: random.Random) -> tuple[bytes, str]:
    """Return an offer that the gate must refuse, and the name of the attack.

    Args:
        offering: A worker's greeting with the right token.
        reply: The gate's reply to its opening.
        before: The offer and the gate's answer of an earlier greeting that the gate has accepted.
        chance: The generator of random choices.
    """
    genuine = offering.answer(reply)
    match chance.choice(("flipped", "replayed", "reflected", "mixed", "guessed", "other token", "other reply")):
        case "flipped":
            return flipped(genuine, chance), "flipped"
        case "replayed":
            return before[0], "replayed"
        case "reflected":  # the gate's own proof instead of the worker's proof
            return genuine[: OFFER.size] + before[1][1:], "reflected"
        case "mixed":
            return before[0][: OFFER.size] + genuine[OFFER.size :], "mixed"
        case "guessed":
            return genuine[: OFFER.size] + chance.randbytes(PROOF_BYTES), "guessed"
        case "other token":
            other = Offering(chance.randbytes(40), Offer(0, 9))
            return other.answer(reply), "other token"
    return offering.answer(flipped(reply[:8] + reply[8:], chance)[:8] + chance.randbytes(32)), "other reply"


def accepted_greeting() -> tuple[bytes, bytes]:
    """Return the offer and the gate's answer of a greeting that the gate accepts."""
    offering, gate = Offering(TOKEN, Offer(0, 7)), Greeting((TOKEN,))
    offer = offering.answer(gate.reply(offering.opening))
    assert gate.read(offer) == Offer(0, 7), "the trial can make a genuine greeting"
    return offer, gate.answer(GateVerdict.WELCOME)


def greet(count: int, chance: random.Random) -> dict[str, Any]:
    """Give ``count`` forged greetings to the functions of the gate. Return their number by kind, and the accepted ones."""
    before, kinds, let_in = accepted_greeting(), dict[str, int](), []
    for _ in range(count):
        offering, gate = Offering(TOKEN, Offer(chance.randrange(4), 8)), Greeting((TOKEN,))
        try:
            offer, kind = forged(offering, gate.reply(offering.opening), before, chance)
        except DDLFError:
            kinds["refused by the worker"] = kinds.get("refused by the worker", 0) + 1
            continue
        kinds[kind] = kinds.get(kind, 0) + 1
        with contextlib.suppress(DDLFError):
            gate.read(offer)
            let_in.append(kind)
    return {"kinds": kinds, "let in": let_in}


async def forge(port: int, before: tuple[bytes, bytes], chance: random.Random) -> bytes:
    """Offer a forged greeting to a gate over a connection, and return the gate's last answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        offering = Offering(TOKEN, Offer(0, 8))
        writer.write(offering.opening)
        reply = await reader.readexactly(OPENING.size)
        offer = b""
        while not offer:
            with contextlib.suppress(DDLFError):
                offer, _ = forged(offering, reply, before, chance)
        writer.write(offer + KEPT)
        return await reader.read(ANSWER.size)
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()


async def over_sockets(count: int, chance: random.Random) -> dict[str, Any]:
    """Send ``count`` forged greetings to a real gate, 50 at a time. Return the answers, and the places that got a worker."""
    gate = Gate("127.0.0.1", 0, (TOKEN,), 4)
    try:
        before = accepted_greeting()
        answers: dict[str, int] = {}
        for first in range(0, count, 50):
            ends = await asyncio.gather(*(forge(gate.port, before, chance) for _ in range(min(50, count - first))))
            for end in ends:
                name = GateVerdict(end[0]).name if end and end[0] in iter(GateVerdict) else "closed"
                answers[name] = answers.get(name, 0) + 1
        absent = await gate.run(gate.absent())
        return {"answers": answers, "let in": sorted({0, 1, 2, 3} - set(absent))}
    finally:
        gate.close()


async def join(port: int, place: int) -> asyncio.StreamWriter:
    """Join at a place, and keep the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    offering = Offering(TOKEN, Offer(place, 7))
    writer.write(offering.opening)
    writer.write(offering.answer(await reader.readexactly(OPENING.size)))
    offering.check(await reader.readexactly(ANSWER.size))
    writer.write(KEPT)
    return writer


async def crowd(workers: int, drips: int) -> dict[str, Any]:
    """Let workers join from one address during a flood. Return the seconds until all have joined, and counts."""
    gate = Gate("127.0.0.1", 0, (TOKEN,), workers)
    writers: list[asyncio.StreamWriter] = []
    try:
        async with strangers(gate.port, drips, 50):
            begin = time.perf_counter()
            waiting = asyncio.ensure_future(gate.run(gate.wait(workers)))
            tries = 0
            for place in range(workers):
                while True:
                    tries += 1
                    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, DDLFError):
                        writers.append(await join(gate.port, place))
                        break
            await asyncio.wait_for(waiting, 600)
            seconds = time.perf_counter() - begin
            sockets = [await gate.take(place, 5) for place in range(workers)]
            names = {sock.getpeername() for sock in sockets}
            worker_names = [writer.get_extra_info("sockname") for writer in writers]
            swapped = sum(sock.getpeername() != name for sock, name in zip(sockets, worker_names, strict=True))
            for sock in sockets:
                sock.close()
        return {"seconds": round(seconds, 2), "places": len(names), "swapped": swapped, "tries": tries}
    finally:
        for writer in writers:
            writer.close()
        gate.close()


def main() -> None:
    """Run the trial, and print its results as JSON. Exit with 1 if the gate accepted a forgery or took too long."""
    options = read_options(__doc__, greetings=1_000_000, sockets=2000, workers=256, drips=500, seed=17)
    chance = random.Random(options.seed)
    results = {
        "seed": options.seed,
        "greetings": greet(options.greetings, chance),
        "sockets": asyncio.run(over_sockets(options.sockets, chance)),
        "workers": asyncio.run(crowd(options.workers, options.drips)),
    }
    print(json.dumps(results, indent=2))
    kept_out = not results["greetings"]["let in"] and not results["sockets"]["let in"]
    crowd_is_in = results["workers"]["places"] == options.workers and results["workers"]["swapped"] == 0
    sys.exit(0 if kept_out and crowd_is_in and results["workers"]["seconds"] < LIMIT_S else 1)


if __name__ == "__main__":
    main()

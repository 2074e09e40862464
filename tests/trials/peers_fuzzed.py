"""Send broken input to a server of peers: ``python -m tests.trials.peers_fuzzed [INPUTS] [CODES] [CODEC]``.

The trial sends INPUTS frames of a WebSocket, as many HTTP requests (200,000 each), then CODES wrong codes (10,000). CODEC
(float32) encodes the sets. Each input breaks a rule of the protocol, and an honest peer posts meanwhile. These statements
must be true:

- The server accepts no broken input.
- It prints no error, and gives a reason for each connection that it closes.
- The honest peer gets all answers on one connection.
- The memory does not grow.

``test_peers_fuzzed.py`` is the short form.
"""

import asyncio
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from websockets.exceptions import ConnectionClosed

from tests.peers.light import END, POST, SCORE, Light, frame, get, opened
from tests.trials.peers_killed import PROGRAM, codes_of

SET_BYTES = 4_000
AT_ONCE = 16
MOST_GROWTH_BYTES = 16 * 2**20
"""Allowed growth of the server's memory after the first tenth of the inputs."""
REASONS = {"a reason", "rejected", "code 1002", "code 1007", "code 1009", "cut off"}
"""Allowed answers to a broken frame. The codes stand for a broken WebSocket frame, invalid text, and too many bytes."""
FULL = {"number": 1, "contains": 0, "updates": 1, "base": 0, "accuracy": 0.5, "loss": 1.0}


def start(folder: Path, codec: str) -> tuple[subprocess.Popen[str], int]:
    """Start a server that prints its port and its errors."""
    program = PROGRAM.replace("lambda line: None", "lambda line: line.startswith('error') and print(line, flush=True)")
    program = program.replace('print("ready"', "print(sock.getsockname()[1]")
    program = program.replace(
        "import numpy as np\n", "import numpy as np\nfrom ddlf.peers.quotas import Quota, Quotas\n"
    )
    wide = "Quotas(requests=Quota(1e9, 1e9), connections=Quota(1e9, 1e9))"  # usual quotas would stop the trial
    program = program.replace('control="secret"', f'control="secret", quotas={wide}')
    words = [sys.executable, "-c", program, str(folder), "0", str(SET_BYTES), codec]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def broken_frame(chance: random.Random, number: int, data: bytes) -> bytes | str:
    """Return a message that a server must refuse, made from a correct post or score.

    Args:
        chance: The generator of random numbers.
        number: The correct number of the post.
        data: A correct set.
    """
    full = FULL | {"number": number}
    good = frame(POST, full, data)
    text_bytes = struct.unpack_from("<I", good, 8)[0]
    header_bytes = 8 + struct.unpack_from("<Q", data)[0]
    match chance.randrange(11):
        case 0:  # cut off
            return good[: chance.randrange(len(good))]
        case 1:  # too long, up to twice the largest frame
            return good + chance.randbytes(chance.randrange(1, 2 * len(good)))
        case 2:  # a bit of the prefix
            at = chance.randrange(16)
            return good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :]
        case 3:  # a byte of the text that JSON cannot have
            at = 16 + chance.randrange(text_bytes)
            return good[:at] + bytes([chance.choice((0, 1, 0x80, 0xFF))]) + good[at + 1 :]
        case 4:  # a bit in the header of the set
            at = 16 + text_bytes + chance.randrange(header_bytes)
            return good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :]
        case 5:  # a value of another type or out of its range
            name = chance.choice(list(FULL))
            wrong: object = chance.choice(("1", None, [], {}, True, -5, 2**70, 1e400, float("nan")))
            if name not in ("accuracy", "loss") or not isinstance(wrong, int | float):
                return frame(POST, full | {name: 2**70 if wrong is True else wrong}, data)
            return frame(POST, full | {name: wrong, "number": 0}, data)
        case 6:  # an unknown field, or a missing one
            if chance.random() < 0.5:
                return frame(POST, full | {f"x{chance.randrange(10**6)}": 1}, data)
            return frame(POST, {key: value for key, value in full.items() if key not in ("number", "updates")}, data)
        case 7:  # random bytes
            return chance.randbytes(chance.randrange(200))
        case 8:  # a set of numbers that are not finite, also if the last two bytes are one number
            return frame(POST, full, data[:-4] + struct.pack("<f", chance.choice((float("nan"), float("inf")))))
        case 9:  # text instead of bytes
            return "".join(chance.choices('{}[]":,0x ', k=chance.randrange(100)))
        case _:  # an impossible score of a set
            return frame(SCORE, {"set_number": 1, "accuracy": 2.0 + chance.random(), "loss": 0.0, "samples": 1})


def broken_stream(chance: random.Random) -> bytes:
    """Return bytes that break the rules of WebSockets: random bytes, or a frame with a reserved bit, no mask or a huge size."""
    begins = (b"", b"\xf2\x80", b"\x82\x05", b"\x82\xff" + b"\x7f" * 8, b"\x80\x80", b"\x8f\x80", b"\x89\xfe\x01\x00")
    return chance.choice(begins) + chance.randbytes(chance.randrange(8, 200))


def broken_request(chance: random.Random) -> bytes:
    """Return an HTTP request without a valid code, cookie or secret, in one of many broken forms."""
    path = chance.choice((b"/join", b"/live", b"/control/list", b"/control/stop", b"/%00", b"/../etc/passwd"))
    method = chance.choice((b"GET", b"GET", b"GET", b"POST", b"PUT", b"\x16\x03\x01", chance.randbytes(3)))
    rows = [b"Host: 127.0.0.1", *chance.choices(HEADERS, k=chance.randrange(6))]
    rows += [b"X-DDLF-Code: " + chance.randbytes(32).hex().encode()] * chance.randrange(2)
    rows += [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(3))]
    rows += [b"A: " + b"a" * 9000] * (chance.random() < 0.1)
    rows += [b"B%d: b" % number for number in range(300)] * (chance.random() < 0.05)
    request = method + b" " + path + chance.choice((b" HTTP/1.1", b" HTTP/9.9", b"")) + b"\r\n" + b"\r\n".join(rows)
    request += b"\r\n\r\n" + chance.randbytes(chance.randrange(100))
    return request[: chance.randrange(len(request))] if chance.random() < 0.2 else request


HEADERS = (
    b"Origin: http://evil.example",
    b"Host: evil.example",
    b"Authorization: Bearer wrong",
    b"Cookie: ddlf-peer-8930=wrong; ddlf-peer=wrong",
    b"Upgrade: websocket",
    b"Connection: Upgrade",
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    b"Sec-WebSocket-Version: 13",
    b"Content-Length: 100",
    b"Transfer-Encoding: chunked",
    b" folded: yes",
)


async def ask(port: int, request: bytes) -> bytes:
    """Send bytes, and return everything that the server sends until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(request)
        writer.write_eof()
        answer = await reader.read()
    except OSError:
        pass
    finally:
        writer.close()
    return answer


def is_accepted(answer: bytes) -> bool:
    """Return whether a server has accepted a request: the answer opens a WebSocket, or has facts as JSON."""
    return answer.startswith(b"HTTP/1.1 101") or b"\r\n\r\n{" in answer


def memory(process: subprocess.Popen[str]) -> int:
    """Return the resident memory of a process in bytes."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


async def repeat(count: int, process: subprocess.Popen[str], do: Callable[[], Awaitable[None]]) -> int:
    """Call ``do`` about ``count`` times, in parallel. Return the growth of the server's memory after the first tenth."""

    async def some(times: int) -> None:
        for _ in range(times):
            await do()

    await asyncio.gather(*(some(max(count // 10 // AT_ONCE, 1)) for _ in range(AT_ONCE)))
    before = memory(process)
    await asyncio.gather(*(some(max(9 * count // 10 // AT_ONCE, 1)) for _ in range(AT_ONCE)))
    return memory(process) - before


async def main(inputs: int, wrong_codes: int, codec: str, seed: int = 0) -> None:
    """Run the trial."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        process, port = start(Path(name), codec)
        try:
            await _fuzz(process, port, chance, inputs, wrong_codes)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            errors = process.stdout.read()
            process.stdout.close()
            print(errors, end="")
    assert not errors


async def _fuzz(
    process: subprocess.Popen[str], port: int, chance: random.Random, inputs: int, wrong_codes: int
) -> None:
    codes = await codes_of(port, AT_ONCE + 1)
    honest = Light(port)
    await honest.join(codes.pop())
    waits: list[float] = []

    async def play() -> None:
        while True:
            begun = time.monotonic()
            await honest.post(honest.set)
            waits.append(time.monotonic() - begun)
            await asyncio.sleep(0.05)

    playing = asyncio.ensure_future(play())
    bad = [Light(port) for _ in codes]
    for peer, code in zip(bad, codes, strict=True):
        await peer.join(code)
        await peer.socket.close()
    idle = list(bad)
    ends: Counter[str] = Counter()

    async def send_frame() -> None:
        peer = idle.pop()
        await peer.connect()
        is_stream = chance.random() < 0.1
        broken = broken_stream(chance) if is_stream else broken_frame(chance, peer.number + 1, honest.set)
        try:
            if is_stream:
                peer.socket.transport.write(broken)
                peer.socket.transport.write_eof()  # otherwise the server may wait for the rest of a frame
            elif chance.random() < 0.2:  # in two parts
                at = chance.randrange(len(broken) + 1)
                await peer.socket.send([broken[:at], broken[at:]])
            else:
                await peer.socket.send(broken)
            async for message in peer.socket:
                kind, content, _ = opened(message)
                assert kind == END or content["answer"] == "rejected", (broken, content)
                ends["a reason" if kind == END else "rejected"] += 1
                break
            else:
                ends[f"code {peer.socket.close_code}"] += 1
        except ConnectionClosed as error:
            ends[f"code {error.rcvd.code}" if error.rcvd else "cut off"] += 1
        await peer.socket.close()
        peer.sockets.clear()
        idle.append(peer)

    async def send_request() -> None:
        request = broken_request(chance)
        assert not is_accepted(await ask(port, request)), request

    statuses: Counter[int] = Counter()

    async def send_code() -> None:
        status, _, _ = await get(port, "/join", {"X-DDLF-Code": chance.randbytes(32).hex()[:43]})
        statuses[status] += 1

    for label, count, do in (
        ("frames", inputs, send_frame),
        ("requests", inputs, send_request),
        ("wrong codes", wrong_codes, send_code),
    ):
        begun, first = time.monotonic(), len(waits)
        growth = await repeat(count, process, do)
        assert growth <= MOST_GROWTH_BYTES, f"{label}: the memory grew by {growth:,} bytes"
        assert len(waits) > first, f"{label}: the honest peer was not answered"
        assert not playing.done(), playing
        slowest = max(waits[first:])
        print(
            f"{count:,} {label} in {time.monotonic() - begun:.0f} s: none accepted, memory {growth / 2**20:+.1f} MiB, "
            f"the honest peer waited {slowest:.2f} s at most",
            flush=True,
        )
    playing.cancel()
    await honest.abort()
    print(
        f"frames were answered by {', '.join(f'{reason}: {count:,}' for reason, count in ends.most_common())}",
        flush=True,
    )
    assert not ends.keys() - REASONS, "the server ended a connection without a reason"
    assert not statuses.keys() - {403, 429}, statuses
    _, _, body = await get(port, "/control/list", {"Authorization": "Bearer secret"})
    listed = json.loads(body)
    posts = listed["counts"]["posts"]
    assert len(waits) <= posts == listed["peers"][0]["posts"], "a broken post was accepted"
    assert listed["accuracy"] is None


if __name__ == "__main__":
    words = sys.argv[1:] + ["200000", "10000", "float32"][len(sys.argv) - 1 :]
    asyncio.run(main(int(words[0]), int(words[1]), words[2]))

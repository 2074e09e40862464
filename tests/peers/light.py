"""A peer without a model, for tests, trials and benchmarks. It shares no code with ``ddlf.peers``."""

import asyncio
import json
import struct

from websockets.asyncio.client import connect

HELLO, WELCOME, POST, ANSWER, SCORE, BROKEN, BYE, END = range(1, 9)


def frame(kind, content, data=b""):
    """Return the bytes of a frame, in the format of the page of the protocol."""
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return b"DDLP" + struct.pack("<BBHII", 1, kind, 0, len(text), 0) + text + data


def opened(data):
    """Return kind, content and set of a frame."""
    magic, version, kind, zero, length, rest = struct.unpack_from("<4sBBHII", data)
    assert (magic, version, zero, rest) == (b"DDLP", 1, 0, 0)
    return kind, json.loads(data[16 : 16 + length]), data[16 + length :]


async def get(port, path, headers=None):
    """Send a GET request, and return status, headers and body: bytes if they are a file, else text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    rows = {"Host": f"127.0.0.1:{port}"} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
    writer.write(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    rows = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    return int(head.split()[1]), rows, body if rows.get("Content-Type") == "application/octet-stream" else body.decode()


class Light:
    """A peer that posts the sets that a test gives it.

    Attributes:
        set: The bytes of the last set that the server has sent.
        set_number: Number of that set.
        number: Number of its last post.
    """

    def __init__(self, port, samples=100):
        self.port, self.samples = port, samples
        self.sockets = []
        self.key, self.run, self.number, self.set_number, self.set = "", "", 0, 0, b""

    async def join(self, code):
        """Use a code, and connect."""
        status, _, body = await get(self.port, "/join", {"X-DDLF-Code": code})
        assert status == 200, body
        self.key = json.loads(body)["key"]
        return await self.connect()

    async def connect(self, *, keeps=False, run=""):
        """Connect, and return the content of the welcome."""
        self.socket = await connect(
            f"ws://127.0.0.1:{self.port}/live",
            additional_headers={"Authorization": f"Bearer {self.key}"},
            compression=None,
            max_size=None,
            proxy=None,
            ping_interval=None,
        )
        self.sockets.append(self.socket)
        hello = {"name": "light", "samples": self.samples, "keeps": keeps, "run": run or (self.run if keeps else "")}
        await self.socket.send(frame(HELLO, hello))
        kind, content, data = opened(await self.socket.recv())
        if kind != WELCOME:
            return {"end": content}
        self.run = content["run"]
        if not keeps:
            self.number = content["number"]
        if data:
            self.set, self.base = data, content["set_number"]
        return content

    async def abort(self):
        """End all connections at once."""
        for socket in self.sockets:
            socket.transport.abort()
            await socket.wait_closed()

    async def send_post(self, data, **more):
        """Send the next post without waiting for its answer."""
        self.number += 1
        await self.send_again(data, **more)

    async def send_again(self, data, **more):
        """Send a post with the number of the last one."""
        content = {"number": self.number, "contains": self.set_number, "updates": 1} | more
        await self.socket.send(frame(POST, content, data))

    async def answer(self):
        """Return the next message: its content, or ``{"end": content}``."""
        kind, content, data = opened(await self.socket.recv())
        if kind == END:
            return {"end": content, "set": data}
        assert kind == ANSWER
        if data:
            self.set = data
        if content["answer"] in ("merge", "replace", "rejected") and content["set_number"]:
            self.set_number = content["set_number"]
        return content

    async def post(self, data, **more):
        """Send the next post, and return the content of its answer."""
        await self.send_post(data, **more)
        return await self.answer()

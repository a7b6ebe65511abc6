"""Firefox ESR for Playwright, which speaks WebDriver BiDi as newer ones do.

    bidi_bridge.py FIREFOX ARGUMENTS...

Starts Firefox and passes on what the two say to each other; commands of Playwright's that Firefox does not
know become one that does nothing. Playwright reads a page by `eval`, which our pages' policy forbids, so
answers come by way of a proxy that leaves the policy out. With KEEP_POLICY set they come as they are, and
Playwright can type and hear complaints, but not read. Downloads go to the folder DOWNLOADS.
"""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio import StreamReader, StreamWriter
from functools import partial
from pathlib import Path

from dsv4.child import end_with

# What ESR 140 lacks: bodies of responses, a folder for downloads, preferred colours, the size of a screen.
MISSING = (
    *("network.addDataCollector", "browser.setDownloadBehavior", "emulation.setMediaFeaturesOverride"),
    *("emulation.setScreenSettingsOverride", "emulation.setScreenOrientationOverride"),
)
NOTHING = {"method": "session.status", "params": {}}
POLICY = re.compile(rb"(?im)^content-security-policy:.*\r\n")


async def read_frame(reader: StreamReader) -> tuple[bytes, bytes]:
    """A client's WebSocket frame -> its bytes as they are, and its payload unmasked."""
    head = await reader.readexactly(2)
    size = head[1] & 127
    more = await reader.readexactly({126: 2, 127: 8}.get(size, 0))
    mask = await reader.readexactly(4)
    body = await reader.readexactly(int.from_bytes(more) if more else size)
    return head + more + mask + body, masked(body, mask)


def masked(data: bytes, mask: bytes) -> bytes:
    key = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(len(data))


def text_frame(payload: bytes, mask: bytes = b"mask") -> bytes:
    assert len(payload) < 126
    return bytes([0x81, 0x80 | len(payload)]) + mask + masked(payload, mask)


async def pipe(reader: StreamReader, writer: StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def commands(reader: StreamReader, writer: StreamWriter, port: int) -> None:
    """The handshake, then frames; Firefox refuses a host that is not its own."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(re.sub(rb"(?i)(\r\nHost: 127\.0\.0\.1:)\d+", rb"\g<1>%d" % port, head))
    while True:
        frame, payload = await read_frame(reader)
        if frame[0] & 15 == 1 and (command := json.loads(payload))["method"] in MISSING:
            frame = text_frame(json.dumps({"id": command["id"], **NOTHING}).encode())
        writer.write(frame)
        await writer.drain()


async def without_policy(reader: StreamReader, writer: StreamWriter) -> None:
    """A proxy's connection, for one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, port, rest = re.match(rb"(\w+) http://127\.0\.0\.1:(\d+)(.*)\Z", head, re.S).groups()  # type: ignore[union-attr]
    rest = re.sub(rb"(?im)^(proxy-)?connection:.*\r\n", b"", rest)
    theirs, ours = await asyncio.open_connection("127.0.0.1", int(port))
    ours.write(method + b" " + rest[:-2] + b"Connection: close\r\n\r\n")
    sending = asyncio.create_task(pipe(reader, ours))
    try:
        writer.write(POLICY.sub(b"", await theirs.readuntil(b"\r\n\r\n")))
        await pipe(theirs, writer)
    finally:
        sending.cancel()
        ours.close()
        writer.close()


async def start_proxy() -> dict[str, object]:
    """-> the preferences that make Firefox use it."""
    server = await asyncio.start_server(quiet(without_policy), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    return {
        **{"network.proxy.type": 1, "network.proxy.http": "127.0.0.1", "network.proxy.http_port": port},
        "network.proxy.allow_hijacking_localhost": True,
    }


def quiet(serve):  # type: ignore[no-untyped-def]
    """Connections that end in the middle are the tests' business."""

    async def run(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    return run


async def main() -> int:
    prefs = {"browser.download.folderList": 2, "browser.download.dir": os.environ["DOWNLOADS"]}
    prefs |= {} if "KEEP_POLICY" in os.environ else await start_proxy()
    with (Path(sys.argv[sys.argv.index("--profile") + 1]) / "user.js").open("a") as file:
        for name, value in prefs.items():
            file.write(f"user_pref({json.dumps(name)}, {json.dumps(value)});\n")
    bound = partial(end_with, os.getpid())
    firefox = await asyncio.create_subprocess_exec(
        *sys.argv[1:], stderr=asyncio.subprocess.PIPE, preexec_fn=bound
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, firefox.terminate)
    port = 0

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        answers = asyncio.create_task(pipe(theirs, writer))
        try:
            await commands(reader, ours, port)
        finally:
            answers.cancel()
            ours.close()

    server = await asyncio.start_server(quiet(serve), "127.0.0.1", 0)
    own = server.sockets[0].getsockname()[1]
    assert firefox.stderr is not None
    async for line in firefox.stderr:
        if found := re.search(rb"BiDi listening on ws://127\.0\.0\.1:(\d+)", line):
            port = int(found[1])
            line = line.replace(found[1], str(own).encode())
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
    return await firefox.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

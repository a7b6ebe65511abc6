"""Clients that nobody here wrote, from their registries, against `dsv4 serve` on the embedded model.

    PYTHONPATH=. python tests/bench/serve_clients.py FOLDER [--record] [CLIENT ...]

Installs Claude Code, Codex and Vercel's AI SDK with npm into FOLDER, runs each, prints how it ended and what
the server answered. With --record the bodies that they sent, texts cut and most tools of a kind left out, go
to tests/data/clients, one file per client and version, which tests/serve/test_serve_wishes.py sends. The
embedded model has 16,384 positions, so Claude Code gets a short system prompt and one tool.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.serve.serve_support import KEY, Server

DATA = Path(__file__).parents[1] / "data" / "clients"
MAX_TEXT, MAX_ALIKE = 60, 2
PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex", "ai", "@ai-sdk/openai")
# Two turns, the second with references to the first, then a tool that must be called and its result.
AI_SDK = """
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, tool, jsonSchema, stepCountIs } from 'ai';
const model = createOpenAI({ baseURL: process.env.URL + '/v1', apiKey: process.env.KEY })('tiny');
const first = await generateText({ model, prompt: 'What is 2 + 3?', maxOutputTokens: 40 });
const messages = [{ role: 'user', content: 'What is 2 + 3?' }, ...first.response.messages];
messages.push({ role: 'user', content: 'And 3 + 4?' });
await generateText({ model, messages, maxOutputTokens: 40 });
const parameters = { type: 'object', properties: { c: { type: 'string', enum: ['red'] } }, required: ['c'] };
const pick = tool({ inputSchema: jsonSchema(parameters), execute: async () => 'done' });
const asked = { prompt: 'pick', tools: { pick }, toolChoice: 'required', stopWhen: stepCountIs(2) };
const done = await generateText({ model, ...asked, maxOutputTokens: 400 });
console.log(done.steps.map((step) => step.finishReason).join(' '));
"""
CODEX = """
model = "tiny"
model_provider = "dsv4"
[model_providers.dsv4]
name = "dsv4"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""


class Recorder(ThreadingHTTPServer):
    """Passes requests on to the server and keeps the bodies."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.seen = port, list[tuple[str, Any, int]]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=600)
        upstream.request(self.command, self.path, body or None, dict(self.headers))
        answer = upstream.getresponse()
        if body:
            self.server.seen.append((self.path, json.loads(body), answer.status))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.end_headers()
        while part := answer.read1(1 << 16):
            self.wfile.write(part)
            self.wfile.flush()

    do_GET = do_HEAD = do_POST

    def log_message(self, *_: Any) -> None:
        pass


def cut(value: Any) -> Any:
    """The same shape, smaller and without what names a person or a machine."""
    if isinstance(value, dict):
        return {key: cut(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = [
            (item.get("type"), item.get("defer_loading")) if isinstance(item, dict) else 0 for item in value
        ]
        kept = [
            at
            for at, kind in enumerate(kinds)
            if "name" not in value[at] or kinds[:at].count(kind) < MAX_ALIKE
        ]
        return [cut(value[at]) for at in kept]
    if not isinstance(value, str):
        return value
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "0" * 8, re.sub(r"/\S+", "/x", value))[:MAX_TEXT]


def run(name: str, folder: Path, url: str) -> tuple[str, str]:
    """-> the client's version, and the end of what it printed."""
    home, work, bin = folder / "home", folder / "work", folder / "node_modules" / ".bin"
    for path in (home, work):
        path.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "KEY": KEY, "URL": url}
    if name == "claude_code":
        env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": "tiny"}
        env |= {"ANTHROPIC_SMALL_FAST_MODEL": "tiny", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "40"}
        env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        asked = ["-p", "--tools", "Read", "--system-prompt", "Be short.", "say hi"]
        command, version = [str(bin / "claude"), *asked], [str(bin / "claude"), "--version"]
    elif name == "codex":
        (home / "config.toml").write_text(CODEX.format(url=url))
        env["CODEX_HOME"] = str(home)
        command = [str(bin / "codex"), "exec", "--skip-git-repo-check", "say hi"]
        version = [str(bin / "codex"), "--version"]
    else:
        (folder / "ai_sdk.mjs").write_text(AI_SDK)
        command = ["node", str(folder / "ai_sdk.mjs")]
        version = ["node", "-p", f"require('{folder}/node_modules/ai/package.json').version"]
    told = subprocess.run(version, env=env, capture_output=True, text=True, timeout=60).stdout
    done = subprocess.run(
        command, env=env, cwd=work, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    found = re.search(r"\d+\.\d+\.\d+", told)
    said = (done.stdout + done.stderr).strip().splitlines()
    return found[0] if found else "unknown", f"exit {done.returncode}: {said[-1] if said else ''}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("clients", nargs="*", default=["claude_code", "codex", "ai_sdk"])
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *PACKAGES], check=True)
    with tempfile.TemporaryDirectory() as keys, Server(Path(keys), "--max-context", 16384) as server:
        for name in args.clients:
            recorder = Recorder(server.port)
            version, said = run(name, folder, recorder.url)
            print(f"{name} {version}: {said}; answered {[status for _, _, status in recorder.seen]}")
            assert recorder.seen and all(status == 200 for _, _, status in recorder.seen)
            if args.record:
                client = f"{name}_{version}"
                seen = [
                    {"client": client, "path": path, "body": cut(body)} for path, body, _ in recorder.seen
                ]
                (DATA / f"{client}.json").write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n")
            recorder.shutdown()


if __name__ == "__main__":
    main()

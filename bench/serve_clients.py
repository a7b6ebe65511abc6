"""Clients that nobody here wrote, from their registries, against `dsv4 serve` on the embedded model.

python -m bench.serve_clients FOLDER [CLIENT ...] [--record]: installs each into FOLDER (npm, pip), has it
read a note with a tool, and ask with a wrong key. A proxy makes the first request a call of that tool, since
the embedded model is too small to choose one; the client runs it and sends its result. A line of JSON per
client: the statuses, whether it streamed, whether the note came back, how it showed the error. With --record
the bodies, texts cut and most tools of a kind left out, go to tests/data/clients, one file per client and
version; tests/serve sends them. The embedded model has 16,384 positions, so of tools one is left.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dsv4.cli.launch import CLIENTS as LAUNCHED
from tests.serve.serve_support import KEY, Server

DATA = Path(__file__).parents[1] / "tests" / "data" / "clients"
MAX_TEXT, MAX_ALIKE = 60, 2
NOTE, TASK = "the heron is number 4217", "Read note.txt and tell me what it says."
WRONG = "not-a-key-of-this-server-0000"

# Programs that use a library: they stream, declare `read_note`, run it, send its result.
PYTHON_TOOL = """
import os, sys
URL, KEY, TASK = os.environ["URL"], os.environ["KEY"], os.environ["TASK"]
def read_note(path: str) -> str:
    "Read a file."
    return open("note.txt").read()
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read_note", "description": "Read a file.", "parameters": SCHEMA}
"""
PROGRAMS = {
    "openai_sdk": """
import json
from openai import OpenAI
client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": TASK}]
tools = [{"type": "function", "function": FUNCTION}]
with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
    message = stream.get_final_completion().choices[0].message
messages.append(message.to_dict())
for call in message.tool_calls:
    messages.append({"role": "tool", "tool_call_id": call.id, "content": read_note("")})
print(client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0].message.content)
""",
    "tool_runner": """
from anthropic import Anthropic, beta_tool
client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ask = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": TASK}]}
runner = client.beta.messages.tool_runner(tools=[beta_tool(read_note)], stream=True, max_iterations=2, **ask)
for stream in runner:
    for event in stream:
        pass
    print(stream.get_final_message().content)
""",
    "litellm": """
import litellm
ask = {"model": "openai/tiny", "api_base": URL + "/v1", "api_key": KEY, "num_retries": 0}
ask["tools"] = [{"type": "function", "function": FUNCTION}]
messages = [{"role": "user", "content": TASK}]
chunks = list(litellm.completion(messages=messages, stream=True, **ask))
message = litellm.stream_chunk_builder(chunks).choices[0].message
messages.append(message)
for call in message.tool_calls:
    messages.append({"role": "tool", "tool_call_id": call.id, "content": read_note("")})
print(litellm.completion(messages=messages, **ask).choices[0].message.content)
ask |= {"model": "anthropic/tiny", "api_base": URL}
print(litellm.completion(messages=messages[:1], max_tokens=20, **ask).choices[0].message)
""",
    "langchain": """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
for responses in (False, True):
    to = {"model": "tiny", "base_url": URL + "/v1", "api_key": KEY, "max_retries": 0}
    model = ChatOpenAI(use_responses_api=responses, **to)
    agent = create_agent(model, tools=[read_note])
    for part in agent.stream({"messages": [{"role": "user", "content": TASK}]}, stream_mode="messages"):
        last = part
    print(last)
""",
    "llm": """
import subprocess
extra = '- {model_id: here, model_name: tiny, api_base: "%s/v1", api_key_name: here, supports_tools: true}'
path = subprocess.check_output([sys.prefix + "/bin/llm", "logs", "path"], text=True).strip()
folder = os.path.dirname(path)
os.makedirs(folder, exist_ok=True)
open(folder + "/extra-openai-models.yaml", "w").write(extra % URL)
code = "def read_note(path: str) -> str:\\n    return open('note.txt').read()\\n"
run = [sys.prefix + "/bin/llm", "-m", "here", "--key", KEY, "--functions", code, "--td", TASK]
sys.exit(subprocess.run(run).returncode)
""",
    "guidellm": """
import subprocess
run = [sys.prefix + "/bin/guidellm", "run", "--disable-console-interactive", "--profile", "kind=synchronous"]
run += ["--backend", "kind=openai_http,target=%s,model=tiny,api_key=%s" % (URL, KEY)]
run += ["--tokenizer", "kind=huggingface_auto,model=" + os.environ["PROCESSOR"]]
run += ["--constraint", "kind=max_requests,count=3"]
run += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=20"]
sys.exit(subprocess.run(run).returncode)
""",
}
# A chat front, through the API that its own page uses.
PROGRAMS["open_webui"] = """
import json, socket, subprocess, tempfile, time, urllib.request
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
env = {**os.environ, "OPENAI_API_BASE_URL": URL + "/v1", "OPENAI_API_KEY": KEY, "WEBUI_AUTH": "False"}
env |= {"ENABLE_OLLAMA_API": "False", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_MODEL": ""}
env |= {"DATA_DIR": tempfile.mkdtemp(), "OFFLINE_MODE": "true", "WEBUI_SECRET_KEY": "x"}
log = open("webui.log", "w")
serve = [sys.prefix + "/bin/open-webui", "serve", "--host", "127.0.0.1", "--port", port]
front = subprocess.Popen(serve, env=env, stdout=log, stderr=log)
def call(path, body=None, token=""):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + token}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:" + port + path, data, headers)
    return urllib.request.urlopen(request, timeout=120).read().decode()
try:
    while True:
        try:
            call("/health")
            break
        except OSError:
            assert front.poll() is None, open("webui.log").read()[-400:]
            time.sleep(1)
    token = json.loads(call("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    print([model["id"] for model in json.loads(call("/api/models", None, token))["data"]])
    tools = [{"type": "function", "function": FUNCTION}]
    messages, body = [{"role": "user", "content": TASK}], {"model": "tiny", "stream": True, "tools": tools}
    text = call("/api/chat/completions", {**body, "messages": messages}, token)
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [part["choices"][0]["delta"] for part in parts if part.get("choices")]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    function = {"name": calls[0]["function"]["name"],
                "arguments": "".join(call["function"]["arguments"] for call in calls)}
    made = {"id": calls[0]["id"], "type": "function", "function": function}
    messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
    messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": read_note("")})
    print(call("/api/chat/completions", {**body, "messages": messages}, token)[-300:])
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
finally:
    front.terminate()
    front.wait(20)
"""
AI_SDK = """
import { createOpenAI } from '@ai-sdk/openai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { streamText, tool, jsonSchema, stepCountIs } from 'ai';
import { readFileSync } from 'fs';
const { URL, KEY, TASK } = process.env;
const parameters = { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] };
const execute = async () => readFileSync('note.txt', 'utf8');
const read_note = tool({ inputSchema: jsonSchema(parameters), execute });
const to = { baseURL: URL + '/v1', apiKey: KEY };
const models = [createOpenAI(to)('tiny'), createOpenAI(to).chat('tiny'), createAnthropic(to)('tiny')];
models.push(createOpenAICompatible({ ...to, name: 'dsv4', includeUsage: true })('tiny'));
for (const model of models) {
  const said = { prompt: TASK, tools: { read_note }, stopWhen: stepCountIs(2), maxRetries: 0 };
  const result = streamText({ model, ...said, onError: ({ error }) => { throw error; } });
  const first = await result.text;
  const messages = [{ role: 'user', content: TASK }, ...(await result.response).messages];
  messages.push({ role: 'user', content: 'What is 2 + 3?' });
  const again = streamText({ model, messages, tools: { read_note }, maxRetries: 0 });
  console.log(JSON.stringify([first, await again.text]));
}
"""


@dataclass(frozen=True)
class Client:
    """`packages`: of npm where `command` is one of its programs, else of pip. `tool`: a call of its own."""

    packages: tuple[str, ...]
    command: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    tool: tuple[str, dict[str, Any]] | None = ("read_note", {"path": "note.txt"})
    is_npm: bool = False


def claude_code(version: str) -> Client:
    variables = {**LAUNCHED["claude"][0], "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400"}
    asked = ("--tools", "Read", "--allowedTools", "Read", "--system-prompt", "Be short.", "-p", TASK)
    read = ("Read", {"file_path": "{work}/note.txt"})
    return Client((f"@anthropic-ai/claude-code@{version}",), ("claude", *asked), variables, read, True)


CLIENTS = {
    "claude_code_2.1.100": claude_code("2.1.100"),
    "claude_code_2.1.197": claude_code("2.1.197"),
    "claude_code": claude_code("latest"),
    "codex": Client(
        ("@openai/codex",),
        (
            *("codex", "exec", *LAUNCHED["codex"][1]),
            *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        ),
        LAUNCHED["codex"][0],
        ("exec_command", {"cmd": "cat note.txt"}),
        True,
    ),
    "opencode": Client(
        ("opencode-ai",),
        ("opencode", "run", TASK),
        LAUNCHED["opencode"][0],
        ("read", {"filePath": "{work}/note.txt"}),
        True,
    ),
    "ai_sdk": Client(
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"),
        ("node", "{folder}/ai_sdk.mjs"),
        is_npm=True,
    ),
    "aider": Client(
        ("aider-chat",),
        ("aider", "--no-git", "--yes-always", "--no-check-update", "--message", TASK, "note.txt"),
        LAUNCHED["aider"][0],
        None,
    ),
    "openai_sdk": Client(("openai",)),
    "tool_runner": Client(("anthropic",)),
    "litellm": Client(("litellm", "mcp")),
    "langchain": Client(("langchain", "langchain-openai")),
    "llm": Client(("llm",)),
    "guidellm": Client(("guidellm",), tool=None),
    "open_webui": Client(("open-webui",)),
}


class Proxy(ThreadingHTTPServer):
    """Passes requests on, keeps the bodies, and has the first of a conversation call `tool`."""

    def __init__(self, port: int, tool: tuple[str, dict[str, Any]] | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.tool, self.seen = port, tool, list[tuple[str, Any, int]]()
        self.refused: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = json.loads(body) if body else None
        if sent:
            body = json.dumps(shaped(self.path, sent, *(self.server.tool or ("", {})))).encode()
        left_out = ("content-length", "accept-encoding", "connection", "host")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=600)
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        if sent:
            self.server.seen.append((self.path, sent, answer.status))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while part := answer.read1(1 << 16):
                self.server.refused += [part.decode(errors="replace")] if answer.status >= 400 else []
                self.wfile.write(part)
                self.wfile.flush()

    do_GET = do_HEAD = do_POST

    def log_message(self, *_: Any) -> None:
        pass


def shaped(path: str, body: dict[str, Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """With that tool alone; before there is a result, it must be called, with these arguments."""
    body, tools = dict(body), []
    for tool in body.get("tools") or ():
        tools += tool["tools"] if tool.get("type") == "namespace" else [tool]
    function = next((t.get("function", t) for t in tools if t.get("function", t).get("name") == name), None)
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    body.pop("max_completion_tokens", None)
    body[limit] = 1500 if "responses" in path else min(body.get(limit) or 60, 60)  # Codex wants an end
    if function is None:
        return {key: value for key, value in body.items() if key not in ("tools", "tool_choice")}
    talk = json.dumps(body.get("messages") or body["input"])
    if not re.search(r'"tool_result"|"role": "tool"|"function_call_output"', talk):
        properties = {key: {"type": "string", "enum": [value]} for key, value in arguments.items()}
        schema = {"type": "object", "properties": properties, "required": list(arguments)}
        key = "input_schema" if "input_schema" in function else "parameters"
        function = {**function, key: {**schema, "additionalProperties": False}}
        is_messages = "/messages" in path
        body |= {"tool_choice": {"type": "any"} if is_messages else "required", limit: 400}
        off: dict[str, Any] = {"reasoning": {"effort": "none"}}
        body |= off if "responses" in path else {"thinking": {"type": "disabled"}}
        body.pop("output_config", None)
    is_chat = "chat/completions" in path
    return {**body, "tools": [{"type": "function", "function": function} if is_chat else function]}


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


def installed(client: Client, folder: Path) -> str:
    """-> the version of its first package."""
    package = re.sub(r"(.)@.*", r"\1", client.packages[0])
    if client.is_npm:
        command = ["npm", "install", "--silent", "--prefix", str(folder), *client.packages]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return str(json.loads((folder / "node_modules" / package / "package.json").read_text())["version"])
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *client.packages]
        subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
    found = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.check_output([str(python), "-c", found], text=True).strip()


def run(name: str, client: Client, folder: Path, url: str, key: str) -> tuple[int, str]:
    """-> the client's exit code, and what it printed."""
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir(exist_ok=True)
    (work / "note.txt").write_text(NOTE + "\n")
    values = {"url": url, "key": key, "model": "tiny", "context": "16384", "output": "400"}
    programs = folder / ("node_modules/.bin" if client.is_npm else "bin")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "CODEX_HOME": str(home)}
    env |= {"URL": url, "KEY": key, "TASK": TASK, "TERM": "dumb", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"PROCESSOR": str(Path(sys.modules["dsv4"].__path__[0]) / "models" / "tiny")}
    env |= {variable: value.format(**values) for variable, value in client.variables.items()}
    if name in PROGRAMS:
        command = ["python", "-c", PYTHON_TOOL + PROGRAMS[name]]
    else:
        (folder / "ai_sdk.mjs").write_text(AI_SDK)
        command = [part.replace("{folder}", str(folder)) for part in client.command]
        if name == "codex":
            command = [part if part is TASK else part.format(**values) for part in command]
    command[0] = str(programs / command[0]) if (programs / command[0]).exists() else command[0]
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=env, cwd=work, timeout=240, **pipes)
    except subprocess.TimeoutExpired as late:
        said = [text.decode(errors="replace") for text in (late.stdout, late.stderr) if text]
        return -1, "".join(said) + "\nno end within 240 s"
    return done.returncode, done.stdout + done.stderr


def tried(name: str, client: Client, folder: Path, server: Server) -> tuple[dict[str, Any], list[Any]]:
    """What it did, and the bodies that it sent."""
    version = installed(client, folder)
    tool = client.tool
    if tool is not None:
        work = str((folder / "work").resolve())
        tool = tool[0], {key: value.replace("{work}", work) for key, value in tool[1].items()}
    proxy = Proxy(server.port, tool)
    code, said = run(name, client, folder, proxy.url, KEY)
    answers = [json.dumps(body) for _, body, _ in proxy.seen]
    refused, proxy.refused = proxy.refused, []
    wrong = run(name, client, folder, proxy.url, WRONG)[1]
    proxy.shutdown()
    shown = [line.strip() for line in wrong.splitlines() if re.search(r"401|key|auth", line, re.I)]
    client_name = f"{name.removesuffix('_' + version)}_{version}"
    facts = {
        "client": client_name,
        "exit": code,
        "statuses": [status for _, _, status in proxy.seen][: len(answers)],
        "streamed": any(json.loads(answer).get("stream") for answer in answers),
        "used_result": None if tool is None else any(NOTE in answer for answer in answers),
        "refused": refused,
        "said": said.strip()[-200:],
        "error": shown[-1][:160] if shown else wrong.strip()[-160:],
    }
    sent = proxy.seen[: len(answers)]
    return facts, [{"client": client_name, "path": path, "body": cut(body)} for path, body, _ in sent]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "clients", nargs="*", default=list(CLIENTS), metavar="CLIENT", help=", ".join(CLIENTS)
    )
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as keys, Server(Path(keys), "--max-context", 16384) as server:
        for name in args.clients:
            folder = (args.folder / name).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            facts, bodies = tried(name, CLIENTS[name], folder, server)
            print(json.dumps(facts, ensure_ascii=False), flush=True)
            if args.record:
                file = DATA / f"{bodies[0]['client']}.json"
                file.write_text(json.dumps(bodies, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

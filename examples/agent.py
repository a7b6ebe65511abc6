"""Lets the model call two Python functions until it can answer. Start `dsv4 serve` first; needs `openai`.

python examples/agent.py "Add 47 and 38, then multiply by 3."
"""

import json
import sys

from openai import OpenAI

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


FUNCTIONS = {function.__name__: function for function in (add, multiply)}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f.__doc__, "parameters": NUMBERS}}
    for name, f in FUNCTIONS.items()
]


def run(client: OpenAI, question: str, most_turns: int = 8) -> str:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            sys.stderr.write(f"{call.function.name}({call.function.arguments}) = {result}\n")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    raise RuntimeError(f"no answer after {most_turns} turns")


if __name__ == "__main__":
    question = sys.argv[1] if len(sys.argv) > 1 else "Add 47 and 38, then multiply by 3."
    sys.stdout.write(run(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none"), question) + "\n")

"""The forms of rows that supervised fine-tuning accepts, and the form that each is trained as.

{"text"}                                a text
{"messages": [{"role", "content"}]}     a conversation
{"conversations": [{"from", "value"}]}  a conversation (ShareGPT): human, gpt, system, tool
{"instruction", "input"?, "output"}     a conversation of two turns (Alpaca): the input follows the instruction
{"prompt", "completion"}                loss on the completion only (TRL); both texts, or both lists of messages
"""

from __future__ import annotations

from typing import Any

# Names of the roles in ShareGPT and its successors.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
FORMS = (
    "a 'text' string, 'messages' of {'role', 'content'}, 'prompt' and 'completion', 'instruction' and 'output' "
    "(Alpaca), or 'conversations' of {'from', 'value'} (ShareGPT)"
)


def as_conversation(row: Any) -> list[dict[str, Any]] | None:
    """The turns of a row that is a conversation in any of its forms; None for another row."""
    if not isinstance(row, dict):
        return None
    if is_conversation(row.get("messages")):
        return row["messages"]  # type: ignore[no-any-return]
    turns = row.get("conversations")
    if is_conversation(turns):
        return turns
    if isinstance(turns, list) and turns and all(_is_turn(turn) for turn in turns):
        return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        given = row.get("input") or ""
        if not isinstance(given, str):
            return None
        asked = f"{row['instruction']}\n\n{given}" if given.strip() else row["instruction"]
        system = row.get("system")
        first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        return [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    return None


def as_pair(row: Any) -> tuple[Any, Any] | None:
    """Prompt and completion, texts or conversations; None for another row."""
    if not isinstance(row, dict) or "prompt" not in row or "completion" not in row:
        return None
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return (prompt, completion) if is_conversation(prompt) and is_conversation(completion) else None


def is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    role, content = message.get("role"), message.get("content")
    return isinstance(role, str) and bool(role) and isinstance(content, str)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("from") in ROLES and isinstance(turn.get("value"), str)


def flattened(part: str | list[dict[str, Any]]) -> str:
    return part if isinstance(part, str) else "\n".join(m["content"] for m in part)


def length(example: Any) -> int:
    """Characters of a conversation, or of a prompt and its completion."""
    return sum(len(flattened(part)) for part in example) if isinstance(example, tuple) else len(flattened(example))

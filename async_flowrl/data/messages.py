"""Prompt columns that hold a list of chat messages (role and content), as in verl's files, and `PromptError`."""

from typing import Any


class PromptError(ValueError):
    """Raised for a prompt file that cannot be used; the message names the file, and the line or row if there is one."""


def split_messages(value: Any, where: str) -> tuple[str, str | None]:
    """Returns (text, system prompt or None) of a prompt column.

    `value` is plain text, or a list of one user message and at most one system message. Raises PromptError naming
    `where` for anything else.
    """
    if isinstance(value, str):
        return value, None
    by_role: dict[str, str] = {}
    for message in _messages(value, where):
        role = message.get("role")
        if role not in ("system", "user") or role in by_role:
            raise PromptError(f"{where}: expected at most one system and one user message, got roles {_roles(value)}")
        by_role[role] = _content(message.get("content"), where)
    if "user" not in by_role:
        raise PromptError(f"{where}: the messages hold no user message, got roles {_roles(value)}")
    return by_role["user"], by_role.get("system")


def content_of(value: Any, where: str) -> str:
    """Returns the text of a column that holds plain text or messages with one user message. Raises PromptError."""
    if isinstance(value, str):
        return value
    return split_messages(value, where)[0]


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise PromptError(f"{where}: expected text or a list of messages, got {type(value).__name__} {value!r:.200}")
    return value


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if isinstance(part, str))
    raise PromptError(f"{where}: only text messages can be used, got {content!r:.200}")


def _roles(value: list[dict[str, Any]]) -> list[Any]:
    return [message.get("role") for message in value]

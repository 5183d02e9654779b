"""What each coding agent needs to use a server: variables, flags, and profiles in a folder of its own.

Nothing here reads or changes a file of the user. Where an agent takes its provider only from a file, it gets a folder
for its configuration that is not the user's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

_PROVIDER = "caravan"
# For agents that insist on a key where the server needs none.
_ANY_KEY = "caravan"
# Agents ask for this many tokens of output at most, and leave the rest of the context to the prompt.
_OUTPUT_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model on a server, and the folder that belongs to the agent's launch. ``api_key``: "" if none is needed."""

    url: str
    model: str
    context: int
    api_key: str
    folder: PurePath

    @property
    def key(self) -> str:
        """A key that no agent takes for missing."""
        return self.api_key or _ANY_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How an agent is started. ``files``: contents by their path in the folder. ``flags`` precede those of the user.

    ``variables`` are set; those named in ``removed`` are not inherited.
    """

    variables: Mapping[str, str]
    flags: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its program, how to install it, and what it needs."""

    program: str
    install: str
    launch: Callable[[Target], Launch]


def _claude(target: Target) -> Launch:
    tiers = ("OPUS", "SONNET", "HAIKU")
    return Launch(
        variables={
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            "ANTHROPIC_MODEL": target.model,
            "ANTHROPIC_SMALL_FAST_MODEL": target.model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in tiers},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_OUTPUT_TOKENS),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        # With both, Claude Code asks which one to use.
        removed=("ANTHROPIC_API_KEY",),
    )


def _codex(target: Target) -> Launch:
    provider = f"model_providers.{_PROVIDER}"
    settings = {
        "model": target.model,
        "model_provider": _PROVIDER,
        "model_context_window": target.context,
        f"{provider}.name": "Caravan",
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "CARAVAN_API_KEY",
    }
    # Values are TOML, of which JSON's texts and numbers are a part.
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(variables={"CARAVAN_API_KEY": target.key}, flags=tuple(flags))


def _opencode(target: Target) -> Launch:
    limit = {"context": target.context, "output": min(_OUTPUT_TOKENS, target.context // 4)}
    config = {
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Caravan",
                "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
                "models": {target.model: {"name": target.model, "limit": limit}},
            }
        },
        "model": f"{_PROVIDER}/{target.model}",
        "small_model": f"{_PROVIDER}/{target.model}",
    }
    return Launch(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _pi(target: Target) -> Launch:
    model = {"id": target.model, "contextWindow": target.context, "maxTokens": _OUTPUT_TOKENS}
    provider = {
        "baseUrl": f"{target.url}/v1",
        "api": "openai-completions",
        "apiKey": target.key,
        "models": [model],
    }
    return Launch(
        variables={"PI_CODING_AGENT_DIR": str(target.folder)},
        flags=("--provider", _PROVIDER, "--model", target.model),
        files={"models.json": _json({"providers": {_PROVIDER: provider}})},
    )


def _cline(target: Target) -> Launch:
    kind = "openai-compatible"
    settings = {"provider": kind, "apiKey": target.key, "model": target.model, "baseUrl": f"{target.url}/v1"}
    written = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": kind, "providers": {kind: written}}
    return Launch(
        variables={},
        flags=("--data-dir", str(target.folder)),
        files={"settings/providers.json": _json(providers)},
    )


def _qwen(target: Target) -> Launch:
    return Launch(
        variables={
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
        },
        flags=("--auth-type", "openai", "--model", target.model),
    )


def _gemini(target: Target) -> Launch:
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    return Launch(
        variables={
            "GOOGLE_GEMINI_BASE_URL": target.url,
            "GEMINI_API_KEY": target.key,
            "GEMINI_MODEL": target.model,
            "GEMINI_CLI_SYSTEM_SETTINGS_PATH": str(target.folder / "settings.json"),
        },
        flags=("--model", target.model),
        files={"settings.json": _json(settings)},
        removed=("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI"),
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    "cline": Agent("cline", "npm install -g cline", _cline),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "gemini": Agent("gemini", "npm install -g @google/gemini-cli", _gemini),
}

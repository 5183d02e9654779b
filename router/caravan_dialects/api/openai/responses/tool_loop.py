"""The tool loop of one response: the model calls tools of MCP servers, reads their results and goes on.

Everything that goes wrong with a server becomes an item, which the model and the client read. The loop itself is
bounded: in calls, in the time of each, and in the response's own limits.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from caravan_dialects.api.body import object_of
from caravan_dialects.api.errors import ContextLengthError
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.openai.chat.validation import ValidChat
from caravan_dialects.api.openai.responses.mcp_tools import Decision, McpEntry, decisions, listed_tools, mcp_entries
from caravan_dialects.api.openai.responses.output import OpenMcpCall, OutputItems
from caravan_dialects.api.openai.responses.schema import InputFields, ResponseRequest, ResponseUsage
from caravan_dialects.api.openai.responses.tools import OfferedTools, ServerTools, ToolName, offered_tools
from caravan_dialects.api.openai.responses.turn import Turn
from caravan_dialects.api.openai.responses.validation import ValidTurn, validate_turn
from caravan_dialects.conversations.nodes import ExactTokens, Json
from caravan_dialects.tool_servers import INVALID_ARGUMENTS, NO_CONNECTION, McpTool, ToolServerError, ToolServers
from caravan_scheduler.core.errors import TextTooLongError

# The scheduler ends what is late.
_NO_TIME_S = 0.001
# Items after which the model goes on. For others the client has to send something, such as results.
_GOES_ON = frozenset({"message", "reasoning", "mcp_call"})

Tell = Callable[[], Awaitable[None]]


class LoopEnd(Exception):
    """The response ends as it is. ``reason``: why it is incomplete."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRequest:
    """A request with MCP servers. ``entries``: by their labels. ``session``: the session if nothing else names one."""

    body: ResponseRequest
    turn: Turn
    entries: Mapping[str, McpEntry]
    session: str


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """What a response with calls to MCP servers has before the tokens that are stored: they begin after its items.

    ``items``: of its output. ``usage``: of the parts so far. ``calls``: those that were made. ``token_ids``: of the
    last prompt and its output, by the model of this ``fingerprint``.
    """

    items: list[Json]
    usage: ResponseUsage
    calls: int
    token_ids: list[int]
    fingerprint: str


class ToolLoop:
    """``calls``: those that were made so far."""

    def __init__(
        self, context: Context, request: LoopRequest, items: OutputItems, state: LoopState | None = None
    ) -> None:
        """``state``: of a loop that goes on, whose ``items`` these are."""
        self._context = context
        self._request = request
        self._items = items
        self._servers: ToolServers = context.tool_servers
        self.calls = 0 if state is None else state.calls
        self._known = None
        if state is not None:
            self._known = ExactTokens(fingerprint=state.fingerprint, token_ids=tuple(state.token_ids))
        asked = request.body.max_tool_calls
        self._max_calls = self._servers.max_calls if asked is None else min(asked, self._servers.max_calls)
        self._deadline: float | None = None
        # Items before those of the part of the output that is generated now.
        self._start = len(items.items)
        # Calls that were under way when the router ended.
        self._lost = [*items.waiting]
        items.offered = self._offered()

    @property
    def is_ready(self) -> bool:
        """Whether the prompt is known: every server's tools are, and no call has to be made before."""
        return not (self._lost or self._unlisted() or self._decisions())

    def starts(self, timeout_s: float) -> None:
        """Let the response end ``timeout_s`` from now."""
        self._deadline = time.monotonic() + timeout_s

    def _all_items(self) -> list[Json]:
        return [*self._request.turn.all_items, *self._items.items]

    def _unlisted(self) -> list[str]:
        listed = listed_tools(self._all_items())
        tried = {item["server_label"] for item in self._items.items if item["type"] == "mcp_list_tools"}
        return [label for label in self._request.entries if label not in listed and label not in tried]

    def _decisions(self) -> list[Decision]:
        return decisions(self._request.turn.items, self._all_items(), self._request.entries)

    def _offered(self) -> OfferedTools:
        servers = _server_tools(self._request.entries, listed_tools(self._all_items()))
        return offered_tools(self._request.body.tools or (), self._request.turn.all_items, servers)

    async def prepare(self, show: Tell, save: Tell) -> None:
        """List the tools of the servers, and make the calls that the client has approved.

        ``show``: sends the events so far. ``save``: also makes sure that they stay.
        """
        if self._lost:
            for call in self._lost:
                lost = "the router ended during the call, which may have been made"
                self._items.settle(call, None, _protocol_error(NO_CONNECTION, lost))
            self._lost.clear()
            await save()
        for label in self._unlisted():
            await self._list(label, show)
            await save()
        self._items.offered = self._offered()
        for decision in self._decisions():
            self._items.begin_call(
                ToolName(decision.name, decision.server_label), decision.arguments, decision.request_id
            )
            await save()
            [call] = self._items.waiting
            await self._settle(call, self._unknown(call) if decision.approve else _refusal(decision))
            await save()

    async def _list(self, label: str, show: Tell) -> None:
        opened = self._items.begin_list(label)
        await show()
        try:
            found = await self._servers.list_tools(label)
        except ToolServerError as error:
            self._items.end_list(opened, [], str(error))
        else:
            allowed = [tool for tool in found if self._request.entries[label].allows(tool)]
            self._items.end_list(opened, msgspec.to_builtins(allowed), None)

    async def call(self, save: Tell) -> bool:
        """Make the calls that the model has written, one after the other. Return whether the model goes on then.

        It does not if it has called anything that the client has to answer, or nothing. Raises LoopEnd.
        """
        self._items.end_turn()
        if not self._items.waiting:
            return False
        await save()
        before = self.calls
        for call in [*self._items.waiting]:
            if self.calls < self._max_calls:
                await self._settle(call, self._unknown(call))
            else:
                limit = f"a response may make at most {self._max_calls} calls"
                self._items.settle(call, None, _protocol_error(INVALID_ARGUMENTS, limit))
            await save()
        if any(item["type"] not in _GOES_ON for item in self._items.items[self._start :]):
            return False
        if self.calls == before:
            # It has read that there are no more, and goes on all the same.
            raise LoopEnd("max_tool_calls")
        return True

    def _unknown(self, call: OpenMcpCall) -> Json | None:
        """Return why a call is not made: a client may have brought a list of tools that the server does not allow."""
        return None if call.tool in self._items.offered.names else _protocol_error(INVALID_ARGUMENTS, "no such tool")

    async def _settle(self, call: OpenMcpCall, refusal: Json | None) -> None:
        output, error = None, refusal
        if error is None:
            self.calls += 1
            output, error = await self._result(call)
        self._items.settle(call, output, error)

    async def _result(self, call: OpenMcpCall) -> tuple[str | None, Json | None]:
        arguments = object_of(call.text)
        if arguments is None:
            return None, _protocol_error(INVALID_ARGUMENTS, "the arguments are no JSON object")
        assert call.tool.namespace is not None
        try:
            result = await self._servers.call(call.tool.namespace, call.tool.name, arguments)
        except ToolServerError as error:
            return None, _protocol_error(error.code, error.message)
        if result.failed:
            return None, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": result.text}]}
        return result.text, None

    async def first(self) -> ValidTurn:
        """Return the first prompt, or what is known of it so far. Raises what `validate_turn` raises."""
        body = self._request.body
        if not self.is_ready or self.calls:
            # Nothing can be chosen yet, or what had to be called has been.
            body = msgspec.structs.replace(body, tool_choice=None)
        return await self._validate(body, self._known)

    async def next(self, tokens: ExactTokens | None, generated: int, seed: int | None) -> ValidTurn:
        """Return the prompt with the items so far.

        ``tokens``: of the last prompt and its output. ``generated``: tokens of all outputs so far. ``seed``: of the
        first. Raises LoopEnd, and what `validate_turn` raises.
        """
        body, left_s = self._request.body, self.left_s
        left = None if body.max_output_tokens is None else body.max_output_tokens - generated
        if left is not None and left <= 0:
            raise LoopEnd("max_output_tokens")
        if left_s <= 0:
            raise LoopEnd("deadline_exceeded")
        self._start = len(self._items.items)
        # Who has to call a tool has called one.
        choice = body.tool_choice if not self.calls or body.tool_choice == "none" else None
        body = msgspec.structs.replace(body, max_output_tokens=left, seed=seed, tool_choice=choice)
        try:
            valid = await self._validate(body, tokens)
        except (ContextLengthError, TextTooLongError):
            if not self.calls:
                raise
            raise LoopEnd("max_context_length") from None
        return replace(valid, chat=within(valid.chat, self.left_s))

    @property
    def left_s(self) -> float:
        """Seconds that the response may still take."""
        assert self._deadline is not None, "it has not started"
        return self._deadline - time.monotonic()

    async def _validate(self, body: ResponseRequest, tokens: ExactTokens | None) -> ValidTurn:
        turn = self._request.turn
        chain = turn.chain if tokens is None else replace(turn.chain, tokens=tokens)
        shown = replace(turn, items=(*turn.items, *self._items.items), chain=chain)
        return await validate_turn(self._context, body, shown, self._items.offered, self._request.session)


def _protocol_error(code: int, message: str) -> Json:
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def _refusal(decision: Decision) -> Json:
    reason = f": {decision.reason}" if decision.reason else ""
    return _protocol_error(INVALID_ARGUMENTS, f"the user did not approve the call{reason}")


def within(chat: ValidChat, left_s: float) -> ValidChat:
    """Return ``chat`` with ``left_s`` seconds to its last token."""
    [spec] = chat.request.specs
    return replace(chat, request=replace(chat.request, specs=(replace(spec, timeout_s=max(_NO_TIME_S, left_s)),)))


def _server_tools(
    entries: Mapping[str, McpEntry], listed: Mapping[str, Sequence[McpTool]]
) -> Mapping[str, ServerTools]:
    found = {}
    for label, entry in entries.items():
        tools = [tool for tool in listed.get(label, ()) if entry.allows(tool)]
        found[label] = ServerTools(tools, frozenset(tool.name for tool in tools if entry.needs_approval(tool)))
    return found


async def offered_without_loop(context: Context, body: InputFields, turn: Turn) -> OfferedTools:
    """Return the tools of a request that is not answered. Those of servers that fail are left out.

    Raises ValidationError.
    """
    given = body.tools or ()
    entries = mcp_entries(given, context.tool_servers.names)
    listed: dict[str, Sequence[McpTool]] = {**listed_tools(turn.all_items)}
    for label in entries.keys() - listed.keys():
        with suppress(ToolServerError):
            listed[label] = await context.tool_servers.list_tools(label)
    return offered_tools(given, turn.all_items, _server_tools(entries, listed))

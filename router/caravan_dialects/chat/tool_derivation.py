"""Finds out from a chat template how its model writes calls of tools, by rendering known calls."""

from caravan_dialects.chat.grammar_terms import terms_for
from caravan_dialects.chat.known_tool_formats import known_format_of
from caravan_dialects.chat.template_errors import TemplateStoppedError
from caravan_dialects.chat.tool_analysis import derived_format
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_probes import PLAIN, VALUES, Probes, Render, conversation, make_room, rendered
from caravan_scheduler.core.engine import Engine


class ToolFormats:
    """The formats of templates. Each template is examined once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._formats: dict[str, ToolFormat] = {}
        # By template and model: the tags that are control tokens there.
        self._controls: dict[tuple[str, str], frozenset[str]] = {}

    async def of(self, source: str) -> ToolFormat:
        """Return the format in which the model with the template ``source`` writes calls."""
        if source in self._formats:
            return self._formats[source]
        try:
            found = known_format_of(source, derived=await self._derived(source))
        except TemplateStoppedError:
            # Perhaps the host was busy: the next request tries again.
            return known_format_of(source)
        make_room(self._formats)
        self._formats[source] = found
        return found

    async def controls(self, engine: Engine, source: str) -> frozenset[str]:
        """Return the tags in the format of ``source`` that are control tokens of the model. Raises NoShardError."""
        key = (source, engine.model.fingerprint)
        if key not in self._controls:
            terms = await terms_for(engine, (await self.of(source)).delimiters)
            make_room(self._controls)
            self._controls[key] = frozenset(terms.controls)
        return self._controls[key]

    async def _derived(self, source: str) -> ToolFormat | None:
        if "tool_calls" not in source:
            return None
        for as_text in (False, True):
            for content in (True, False):
                probes = await self._probes(source, content=content, as_text=as_text)
                if (derived := derived_format(source, probes)) is not None:
                    return derived
        return None

    async def _probes(self, source: str, *, content: bool, as_text: bool) -> Probes:
        async def probe(calls: int, kinds: tuple[str, ...] = PLAIN) -> str | None:
            variables = conversation(calls, kinds, content=content, as_text=as_text)
            return await rendered(self._render, source, variables)

        return Probes(
            none=await probe(0),
            one=await probe(1),
            two=await probe(2),
            typed=await probe(1, tuple(VALUES)),
        )

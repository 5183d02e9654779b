"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from aiohttp import web

from caravan_dialects.api.openai.audio.reply import AskedSpoken
from caravan_dialects.api.openai.audio.schema import Spoken, SpokenEvent, TranscriptionForm, TranslationForm
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import counting_refusals
from caravan_router.http.server.form import read_form
from caravan_router.http.server.route import GENERATION_ERRORS
from caravan_router.http.server.routes import Routes

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "POST",
    "/v1/audio/transcriptions",
    "Transcribe audio, with a model that reads audio",
    around=counting_refusals,
    form=TranscriptionForm,
    reply=Spoken,
    events=SpokenEvent,
    errors=GENERATION_ERRORS,
)
async def transcriptions(request: web.Request) -> web.StreamResponse:
    return await answer(request, AskedSpoken(await read_form(request, TranscriptionForm)))


@ROUTES.route(
    "POST",
    "/v1/audio/translations",
    "Translate audio into English, with a model that reads audio",
    around=counting_refusals,
    form=TranslationForm,
    reply=Spoken,
    errors=GENERATION_ERRORS,
)
async def translations(request: web.Request) -> web.StreamResponse:
    return await answer(request, AskedSpoken(await read_form(request, TranslationForm)))
